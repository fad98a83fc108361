"""Audit records: administrative acts with their actor, in the hash chain of the lane that they concern (CO-43).

An act that is an item of a batch (a member, a dropped tombstone) appends its record with `append_act`, so that act and
record are one transaction. An act that is decided elsewhere is submitted as a separate item, `RecordAct`. Its key is a
hash of the act: several servers that notice one act record it once.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.canonical import JsonValue, canonical
from oncelog.core.desk import Desk, LaneDesk
from oncelog.core.identity import frame, lane_of
from oncelog.core.internal_records import check_internal_record
from oncelog.core.limits import ACT_KEY_BYTES
from oncelog.core.policy import AUDIT_POLICY, RESTORE_POLICY
from oncelog.core.quotas import act_beyond_limits, count_act, is_charged
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
"""Recorded by restore records (core/leaps.py)."""
QUOTA_CHANGE: Final = "quota_change"
MEMBER_ADDED: Final = "member_added"
MEMBER_REMOVED: Final = "member_removed"
MEMBER_ROLE_CHANGED: Final = "member_role_changed"
KEY_REVOKED: Final = "key_revoked"
LEASE_RELEASED: Final = "lease_released"
READ_ONLY_ON: Final = "read_only_on"
READ_ONLY_OFF: Final = "read_only_off"

APPLICATION_ACTOR: Final = "system:application"
"""Actor of an act of the library's user that names no other."""


class AuditEntry(Struct, frozen=True):
    """An audit record or restore record, decoded for readers."""

    lane: int
    position: int
    log_time_ms: int
    time_ms: int
    """When the act happened: before the log time of the record if the record could not be committed then."""
    act: str
    actor: str
    scope: str
    """The stream that the act concerns; empty where it concerns the log."""
    target: str
    details: Mapping[str, JsonValue]
    erased: bool = False
    """The body of the record was erased: act, target and details are empty."""


class _Body(Struct):
    act: str = ""
    actor: str = ""
    target: str = ""
    time_ms: int = 0
    details: dict[str, JsonValue] = {}


_BODY: Final = msgspec.json.Decoder(_Body)
_OBJECT: Final = msgspec.json.Decoder(dict[str, JsonValue])


def act_key(*parts: str) -> bytes:
    """Return the key of an act: a hash of the texts that tell it from every other act."""
    return sha256(b"".join(frame(b"act", part.encode()) for part in parts)).digest()


def act_identity(item: RecordAct) -> KeyIdentity:
    """Return the identity under which an act is remembered: one act can have a record in each lane.

    The record of the act stores the key of its identity. It has no client, so the key is where the lane goes.
    """
    key = item.key if item.scope or not item.lane else act_key(item.key.hex(), str(item.lane))
    return (AUDIT_POLICY, item.scope, "", key)


def act_beyond_quota(act: RecordAct, desk: Desk, member: MemberIdentity | None = None) -> Refused | None:
    """Refuse an act of a client whose audit record does not fit, together with the member that the act adds.

    The record is a new write of the tenants of its stream, also for their rates: `count_admitted_act` takes the token.
    """
    if desk.tenants is None:
        return None
    size = 0
    if is_charged(act.actor):
        body = _body(act, desk.stream_lane(act.scope))
        size = act_bytes(act.scope, act.actor, act.key, body)
    return act_beyond_limits(act.scope, desk, act=size, member=member)


def append_act(act: RecordAct, lane: LaneDesk, desk: Desk, key: bytes = b"") -> Record:
    """Append the audit record of an act to its lane, in the transaction of the batch."""
    lane.next_position()
    record = desk.append_internal(lane, AUDIT_POLICY, act.actor, _body(act, lane), scope=act.scope, key=key)
    if desk.tenants is not None and is_charged(act.actor):
        count_act(act.scope, act_bytes(act.scope, act.actor, key, record.body), desk.tenants, desk)
    return record


def _body(act: RecordAct, lane: LaneDesk) -> bytes:
    return canonical(
        {
            "act": act.act,
            "actor": act.actor,
            "details": _OBJECT.decode(act.details),
            "target": act.target,
            "time_ms": act.time_ms or lane.log_time_ms,
            "type": "audit",
        }
    )


def record_act(item: RecordAct, desk: Desk) -> Committed | Replayed | Refused:
    """Decide a `RecordAct` item: append its record, unless its key is known."""
    if item.lane > desk.settings.lanes:
        return Refused(Reason.MALFORMED, f"must be from 0 to {desk.settings.lanes}, not {item.lane}", field="lane")
    lane = desk.stream_lane(item.scope) if item.scope else desk.numbered_lane(item.lane)
    identity = act_identity(item)
    known = desk.keys.get(identity) if item.key else None
    if known is not None:
        return Replayed(known.receipt, erased=known.erased)
    record = append_act(item, lane, desk, identity[3] if item.key else b"")
    if item.key:
        desk.keys.put(identity, record.remembered)
    return Committed(record.receipt)


def with_detail(item: RecordAct, name: str, value: JsonValue) -> RecordAct:
    """Return the act with one more detail."""
    return replace(item, details=canonical({**_OBJECT.decode(item.details), name: value}))


def check_audit_record(record: Record, lanes: int) -> str | None:
    """Describe the fault of an audit record; None without a fault."""
    if record.scope and lane_of(record.scope, lanes) != record.lane:
        return f"an audit record of {record.scope!r} belongs in another lane"
    if len(record.key) not in (0, ACT_KEY_BYTES):
        return f"an audit record has a key of {len(record.key)} bytes, not of {ACT_KEY_BYTES}"
    if not record.actor:
        return "an audit record has no actor"
    return check_internal_record(record)


def audit_entry(record: Record) -> AuditEntry:
    """Decode an audit record or a restore record. Raises msgspec.MsgspecError for a body that is neither."""
    is_restore = record.policy == RESTORE_POLICY
    if record.erased:
        body = _Body()
    elif is_restore:
        body = _BODY.decode(record.body)
        details = _OBJECT.decode(record.body)
        body.details = {name: value for name, value in details.items() if name not in ("type", "actor")}
    else:
        body = _BODY.decode(record.body)
    return AuditEntry(
        lane=record.lane,
        position=record.position,
        log_time_ms=record.log_time_ms,
        time_ms=body.time_ms or record.log_time_ms,
        act=RESTORE if is_restore else body.act,
        # The actor of a restore record is a constant. Its body names the caller since the command line does.
        actor=body.actor if is_restore and body.actor else record.actor,
        scope=record.scope,
        target=body.target,
        details=body.details,
        erased=record.erased,
    )
