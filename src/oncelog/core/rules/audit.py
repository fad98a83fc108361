"""Audit records: administrative acts and their actors, stored in the hash chain of the lane that they concern (CO-43).

An act within a batch (such as a changed member or dropped tombstones) appends its record with `append_act`, in the same
transaction. An act outside a batch is submitted as a separate item, `RecordAct`. Its key is a hash of the act, so
several servers that notice the act record it only once.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState, LaneDraft
from oncelog.core.canonical import JsonValue, canonical
from oncelog.core.identity import compute_lane, frame
from oncelog.core.internal_records import check_internal_record, find_first_fault
from oncelog.core.limits import ACT_KEY_BYTES
from oncelog.core.policy import AUDIT_POLICY, RESTORE_POLICY
from oncelog.core.rules.quotas import check_act_limits, count_in_stream, is_charged
from oncelog.core.stored_bytes import act_bytes
from oncelog.core.values import (
    Committed,
    KeyIdentity,
    MemberIdentity,
    Reason,
    Record,
    RecordAct,
    Refused,
    Replayed,
)

ERASE: Final = "erase"
COMPACT: Final = "compact"
RESTORE: Final = "restore"
"""Act of restore records (core/rules/leaps.py)."""
QUOTA_CHANGE: Final = "quota_change"
MEMBER_ADDED: Final = "member_added"
MEMBER_REMOVED: Final = "member_removed"
MEMBER_ROLE_CHANGED: Final = "member_role_changed"
KEY_REVOKED: Final = "key_revoked"
LEASE_RELEASED: Final = "lease_released"
READ_ONLY_ON: Final = "read_only_on"
READ_ONLY_OFF: Final = "read_only_off"

APPLICATION_ACTOR: Final = "system:application"
"""Actor of the embedding application's acts, unless the application specifies a different one."""


class AuditEntry(Struct, frozen=True):
    """A decoded audit record or restore record."""

    lane: int
    position: int
    log_time_ms: int
    time_ms: int
    """Time of the act, which is before the log time if the record could not be committed immediately."""
    act: str
    actor: str
    scope: str
    """Stream that the act concerns. Empty if it concerns the log."""
    target: str
    details: Mapping[str, JsonValue]
    erased: bool = False
    """Whether the record's body was erased. If so, act, target and details are empty."""


class _AuditBody(Struct):
    act: str = ""
    actor: str = ""
    target: str = ""
    time_ms: int = 0
    details: dict[str, JsonValue] = {}


_BODY_DECODER: Final = msgspec.json.Decoder(_AuditBody)
_OBJECT_DECODER: Final = msgspec.json.Decoder(dict[str, JsonValue])


def act_key(*parts: str) -> bytes:
    """Return the key of an act: a hash of the strings that identify it."""
    return sha256(b"".join(frame(b"act", part.encode()) for part in parts)).digest()


def act_identity(item: RecordAct) -> KeyIdentity:
    """Return the identity under which an act is stored. An act can have one record in each lane.

    The record stores this identity's key. Because the record has no client, the key includes the lane.
    """
    key = item.key if item.scope or not item.lane else act_key(item.key.hex(), str(item.lane))
    return (AUDIT_POLICY, item.scope, "", key)


def check_act_quota(act: RecordAct, state: BatchState, member: MemberIdentity | None = None) -> Refused | None:
    """Refuse a client's act if its audit record and the member that it adds would exceed a quota.

    The record is a new write for the tenants of its stream and counts against their rates. `members` takes the token.
    """
    if state.tenants is None:
        return None
    size = 0
    if is_charged(act.actor):
        body = _encode_body(act, state.get_stream_lane(act.scope))
        size = act_bytes(act.scope, act.actor, act.key, body)
    return check_act_limits(act.scope, state.tenants, state, act_bytes=size, member=member)


def append_act(act: RecordAct, lane: LaneDraft, state: BatchState, key: bytes = b"") -> Record:
    """Append the audit record of an act to its lane, in the batch's transaction."""
    lane.advance_position()
    record = state.append_internal(lane, AUDIT_POLICY, act.actor, _encode_body(act, lane), scope=act.scope, key=key)
    if state.tenants is not None and is_charged(act.actor):
        size = act_bytes(act.scope, act.actor, key, record.body)
        count_in_stream(act.scope, state, size=size, records=1)
    return record


def _encode_body(act: RecordAct, lane: LaneDraft) -> bytes:
    return canonical(
        {
            "act": act.act,
            "actor": act.actor,
            "details": _OBJECT_DECODER.decode(act.details),
            "target": act.target,
            "time_ms": act.time_ms or lane.log_time_ms,
            "type": "audit",
        }
    )


def record_act(item: RecordAct, state: BatchState) -> Committed | Replayed | Refused:
    """Decide a `RecordAct` item: append its record, unless its key is known."""
    if item.lane > state.settings.lanes:
        return Refused(Reason.MALFORMED, f"must be from 0 to {state.settings.lanes}, not {item.lane}", field="lane")
    lane = state.get_stream_lane(item.scope) if item.scope else state.get_lane(item.lane)
    identity = act_identity(item)
    known = state.keys.get(identity) if item.key else None
    if known is not None:
        return Replayed(known.receipt, erased=known.erased)
    record = append_act(item, lane, state, identity[3] if item.key else b"")
    if item.key:
        state.keys.put(identity, record.remembered)
    return Committed(record.receipt)


def add_detail(item: RecordAct, name: str, value: JsonValue) -> RecordAct:
    """Return the act with an additional detail."""
    return replace(item, details=canonical({**_OBJECT_DECODER.decode(item.details), name: value}))


def check_audit_record(record: Record, lanes: int) -> str | None:
    """Describe the fault of an audit record, or return None for a valid one."""
    is_in_other_lane = record.scope != "" and compute_lane(record.scope, lanes) != record.lane
    fault = find_first_fault(
        (is_in_other_lane, f"an audit record of {record.scope!r} belongs in another lane"),
        (
            len(record.key) not in (0, ACT_KEY_BYTES),
            f"an audit record has a key of {len(record.key)} bytes, not {ACT_KEY_BYTES}",
        ),
        (not record.actor, "an audit record has no actor"),
    )
    return fault or check_internal_record(record)


def decode_audit_entry(record: Record) -> AuditEntry:
    """Decode an audit record or a restore record. Raises msgspec.MsgspecError for any other body."""
    is_restore = record.policy == RESTORE_POLICY
    body = _AuditBody() if record.erased else _BODY_DECODER.decode(record.body)
    if is_restore and not record.erased:
        details = _OBJECT_DECODER.decode(record.body)
        body.details = {name: value for name, value in details.items() if name not in ("type", "actor")}
    return AuditEntry(
        lane=record.lane,
        position=record.position,
        log_time_ms=record.log_time_ms,
        time_ms=body.time_ms or record.log_time_ms,
        act=RESTORE if is_restore else body.act,
        # A restore record's actor is a constant; its body names the caller of the command.
        actor=body.actor if is_restore and body.actor else record.actor,
        scope=record.scope,
        target=body.target,
        details=body.details,
        erased=record.erased,
    )
