"""Validation of items against their policies and the limits.

APIs check their own messages; the core and the stores rely on this module. A valid item cannot make a later step fail,
so a malformed submission never affects the other submissions in its group commit.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from msgspec import structs

from oncelog.core.canonical import canonical_text, is_storable
from oncelog.core.hlc import HLC_MAX
from oncelog.core.identity import normal_partitions
from oncelog.core.limits import (
    ACT_CHARACTERS_MAX,
    ACT_DETAILS_BYTES_MAX,
    ACT_KEY_BYTES,
    ENTITY_KEY_CHARACTERS_MAX,
    FAILURE_BYTES_MAX,
    FINGERPRINT_BYTES_MAX,
    FOLDED_MAX,
    LEAP_ABOVE_MAX,
    LEASE_MS_MAX,
    NAME_CHARACTERS_MAX,
    OPERATIONS_MAX,
    PARTITION_CHARACTERS_MAX,
    PARTITIONS_MAX,
    RATE_MAX,
    ROW_COLUMNS_MAX,
    SEQUENCE_MAX,
    STORED_INTEGER_MAX,
    TARGET_CHARACTERS_MAX,
    TOMBSTONES_MAX,
    WHOLE_REQUEST_ITEMS_MAX,
)
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import Must, Operation, SetEntity
from oncelog.core.policy import STREAM, Identity, Policy
from oncelog.core.values import (
    Acknowledge,
    Claim,
    DropTombstones,
    FoldRows,
    Item,
    Leap,
    Mode,
    OpenStream,
    Rate,
    Reason,
    RecordAct,
    Refused,
    Release,
    Renew,
    Request,
    Role,
    SetCursor,
    SetMember,
    Submission,
)
from oncelog.errors import CanonicalError

_ACT_NAME: Final = re.compile(rf"[a-z][a-z0-9_]{{0,{ACT_CHARACTERS_MAX - 1}}}")
T = TypeVar("T")
_Check = Callable[[Any], None]
"""Checks an item. Raises _FieldError."""


class _FieldError(Exception):
    """A malformed field of an item, with a message. `check_item` converts it to a refusal."""


def check_item(item: Item) -> Refused | None:
    """Return a refusal with the field's name for a malformed item, or None for a valid one."""
    try:
        if isinstance(item, Submission):
            _check_submission(item)
        else:
            for check in _CHECKS[type(item)]:
                check(item)
    except _FieldError as error:
        return _refuse(*error.args)
    return None


# --- checks of one field, by its name --------------------------------------------------------------------


def _name(field: str) -> _Check:
    return lambda item: _check_name(field, getattr(item, field))


def _text(field: str, characters_max: int = NAME_CHARACTERS_MAX) -> _Check:
    """Check a string that may be empty."""
    return lambda item: _check_text(field, getattr(item, field), characters_max)


def _count(field: str, count_max: int) -> _Check:
    def check(item: Any) -> None:
        count = len(getattr(item, field))
        if count > count_max:
            raise _FieldError(field, f"must have at most {count_max} entries, not {count}")

    return check


def _size(field: str, bytes_max: int) -> _Check:
    def check(item: Any) -> None:
        if len(getattr(item, field) or b"") > bytes_max:
            raise _FieldError(field, f"must have at most {bytes_max} bytes")

    return check


def _integer(field: str, lowest: int, highest: int) -> _Check:
    def check(item: Any) -> None:
        value: object = getattr(item, field)
        if type(value) is not int or not lowest <= value <= highest:
            raise _FieldError(field, f"must be a whole number from {lowest} to {highest}, not {value!r}")

    return check


# --- checks of one type of item ----------------------------------------------------------------------------


def _check_leased(item: Claim | Renew | Release) -> None:
    if not item.policy.leased:
        raise _FieldError("policy", f"{item.policy.name!r} does not use leases")


def _check_key(item: Submission | Claim | Renew | Release) -> None:
    key, policy = item.key, item.policy
    shortest, longest = policy.key_bytes
    if not shortest <= len(key) <= longest:
        length = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        raise _FieldError("key", f"must have {length} bytes, not {len(key)}")
    if not policy.zero_key and not any(key):
        raise _FieldError("key", "must not be all zero")


def _check_releaser(item: Release) -> None:
    """Check the actor if an operator releases the lease, because operators do not know the holder. Otherwise check the
    holder."""
    field = "actor" if item.actor != "" else "holder"
    _check_name(field, getattr(item, field))


def _check_open_rate(item: OpenStream) -> None:
    if item.rate is not None:
        _check_rate(item.rate, "rate")


def _check_role(item: SetMember) -> None:
    role: object = item.role
    if role is not None and not isinstance(role, Role):  # `plan` compares members by identity
        raise _FieldError("role", f"must be a Role or None, not {role!r}")
    if role is not None and not item.present:
        raise _FieldError("role", "must be None if present is False")


def _check_cursor(item: SetCursor) -> None:
    if item.cursor is not None and type(item.cursor) is not int:
        raise _FieldError("cursor", f"must be a whole number or None, not {item.cursor!r}")


def _check_tombstone_names(item: DropTombstones) -> None:
    names = tuple(name for tombstone in item.tombstones for name in (tombstone.table, tombstone.row_id))
    _check_texts("consumers", item.consumers, NAME_CHARACTERS_MAX)
    _check_texts("tombstones", names, ENTITY_KEY_CHARACTERS_MAX)


def _check_row_names(item: FoldRows) -> None:
    _check_texts("rows", tuple(name for row in item.rows for name in row), ENTITY_KEY_CHARACTERS_MAX)


def _check_act(item: RecordAct) -> None:
    if type(item.act) is not str or _ACT_NAME.fullmatch(item.act) is None:
        raise _FieldError(
            "act", f"must have 1 to {ACT_CHARACTERS_MAX} characters from a-z, 0-9 and '_', and start with a letter"
        )
    if type(item.key) is not bytes or len(item.key) not in (0, ACT_KEY_BYTES):
        raise _FieldError("key", f"must have {ACT_KEY_BYTES} bytes or be empty")
    try:
        is_object = item.details.startswith(b"{") and canonical_text(item.details) == item.details
    except CanonicalError:
        is_object = False
    if not is_object:
        raise _FieldError("details", "must be a JSON object in canonical form")


_LEASE_MS: Final = _integer("lease_ms", 1, LEASE_MS_MAX)
_CHECKS: Final[Mapping[type, tuple[_Check, ...]]] = {
    Claim: (
        _check_leased,
        _size("fingerprint", FINGERPRINT_BYTES_MAX),
        _LEASE_MS,
        _name("scope"),
        _name("holder"),
        _check_key,
    ),
    Renew: (_check_leased, _LEASE_MS, _name("scope"), _name("holder"), _check_key),
    Release: (_check_leased, _size("failure", FAILURE_BYTES_MAX), _name("scope"), _check_releaser, _check_key),
    OpenStream: (_name("scope"), _name("member"), _check_open_rate),
    SetMember: (_name("scope"), _name("member"), _text("actor"), _check_role),
    Acknowledge: (_name("scope"), _name("member")),
    SetCursor: (_check_cursor, _name("consumer"), _text("scope")),
    DropTombstones: (
        _integer("age_ms", 0, STORED_INTEGER_MAX),
        _count("tombstones", TOMBSTONES_MAX),
        _name("scope"),
        _text("actor"),
        _check_tombstone_names,
    ),
    FoldRows: (_count("rows", FOLDED_MAX), _count("deltas", FOLDED_MAX), _name("scope"), _check_row_names),
    Leap: (_integer("above", 1, LEAP_ABOVE_MAX),),
    RecordAct: (
        _size("details", ACT_DETAILS_BYTES_MAX),
        _check_act,
        _integer("lane", 0, STORED_INTEGER_MAX),
        _integer("time_ms", 0, STORED_INTEGER_MAX),
        _name("actor"),
        _text("scope"),
        _text("target", TARGET_CHARACTERS_MAX),
    ),
}
"""Checks for each item type except submissions, in order. A scope that may be empty (the whole log) is checked as
a string instead of a name."""


# --- submissions and requests -------------------------------------------------------------------------------


def check_request(request: Request) -> Refused | None:
    """Check the mode, and the size if the request is admitted as a whole."""
    mode: object = request.mode
    if not isinstance(mode, Mode):  # `plan` compares members by identity
        return _refuse("mode", f"must be a Mode, not {mode!r}")
    if request.is_admitted_whole and len(request.items) > WHOLE_REQUEST_ITEMS_MAX:
        limit = f"must have at most {WHOLE_REQUEST_ITEMS_MAX} entries in a request that is admitted as a whole"
        return _refuse("items", f"{limit}, not {len(request.items)}")
    return None


def _check_submission(submission: Submission) -> None:
    policy = submission.policy
    _check_names(submission)
    if submission.holder:  # not cached: each lease has a different holder
        _check_name("holder", submission.holder)
    if policy.client_sequence or submission.client_sequence:
        _check_sequence(submission, policy)
    if submission.key or not policy.client_sequence:
        _check_key(submission)
    if len(submission.fingerprint) > FINGERPRINT_BYTES_MAX:
        raise _FieldError("fingerprint", f"must have at most {FINGERPRINT_BYTES_MAX} bytes")
    if policy.order is STREAM:
        if not submission.scope:
            raise _FieldError("scope", "must be the name of a stream, not empty")
    elif submission.expected_sequence is not None:
        raise _FieldError("expected_sequence", "is only valid for streams; use expected_position")
    _check_effects(submission, policy)


_VALID_CACHE_MAX: Final = 8192
_valid_names: set[str] = {""}
_valid_partitions: set[tuple[str, ...]] = {()}
"""Caches of well-formed streams, senders and partitions, which most submissions repeat. A full set is cleared."""


def _check_names(submission: Submission) -> None:
    """Check the stream, sender and partitions, all of which may be empty."""
    scope, actor, client, partitions = submission.scope, submission.actor, submission.client, submission.partitions
    if type(partitions) is not tuple:
        raise _FieldError("partitions", f"must be a tuple of names, not {type(partitions).__name__}")
    is_text = type(scope) is type(actor) is type(client) is str  # an equal object of a different type must not pass
    if not (is_text and scope in _valid_names and actor in _valid_names and client in _valid_names):
        for field, name in (("scope", scope), ("actor", actor), ("client", client)):
            _check_text(field, name, NAME_CHARACTERS_MAX)
            _cache_valid(_valid_names, name, "")
    if partitions not in _valid_partitions:
        _check_partitions(partitions)


def _cache_valid(cache: set[T], value: T, empty: T) -> None:
    if len(cache) >= _VALID_CACHE_MAX:
        cache.clear()
        cache.add(empty)
    cache.add(value)


def _check_partitions(partitions: tuple[str, ...]) -> None:
    if len(partitions) > PARTITIONS_MAX:
        raise _FieldError("partitions", f"must have at most {PARTITIONS_MAX} entries, not {len(partitions)}")
    for name in partitions:
        if type(name) is not str:
            raise _FieldError("partitions", f"must be a string, not {type(name).__name__}")
    _check_texts("partitions", partitions, PARTITION_CHARACTERS_MAX)
    if not all(partitions) or normal_partitions(partitions) != partitions:
        # Reads and erasures use the normal form, so they would not find a different spelling.
        message = "must be in normal form (normal_partitions): NFC, sorted, without duplicates or empty names"
        raise _FieldError("partitions", message)
    if len(partitions) == 1:  # 64 long partitions in each entry would take many megabytes
        _cache_valid(_valid_partitions, partitions, ())


def _check_rate(rate: Rate, field: str) -> None:
    if type(rate) is not Rate:
        raise _FieldError(field, f"must be a Rate, not {type(rate).__name__}")
    for name, value in (("per_second", rate.per_second), ("burst", rate.burst)):
        if type(value) is not int or not 1 <= value <= RATE_MAX:
            raise _FieldError(field, f"must have a {name} from 1 to {RATE_MAX}, not {value!r}")


def _check_sequence(submission: Submission, policy: Policy) -> None:
    if not policy.client_sequence:
        raise _FieldError("client_sequence", _describe_unused_field(policy))
    if not submission.client:
        raise _FieldError("client", "must not be empty")
    if not 1 <= submission.client_sequence <= SEQUENCE_MAX:
        raise _FieldError("client_sequence", f"must be from 1 to {SEQUENCE_MAX}")


def _check_effects(submission: Submission, policy: Policy) -> None:
    operations, delta = submission.operations, submission.delta
    if policy.entities is not bool(operations):
        message = "must not be empty" if policy.entities else _describe_unused_field(policy)
        raise _FieldError("operations", message)
    if policy.rows is (delta is None):
        raise _FieldError("delta", "is missing" if policy.rows else _describe_unused_field(policy))
    if submission.fence and not policy.leased:
        raise _FieldError("fence", _describe_unused_field(policy))
    if submission.rate is not None:
        _check_rate(submission.rate, "rate")
    if submission.stream_rate is not None:
        _check_stream_rate(submission, submission.stream_rate)
    if delta is not None:
        _check_delta(submission, delta)
    if operations:
        _check_operations(operations)


def _check_stream_rate(submission: Submission, rate: Rate) -> None:
    if submission.policy.order is not STREAM:
        raise _FieldError("stream_rate", _describe_unused_field(submission.policy))
    if not submission.actor:
        # Without an actor, the actor's rate would use the stream's bucket.
        raise _FieldError("actor", "must not be empty if stream_rate is set")
    _check_rate(rate, "stream_rate")


def _check_operations(operations: tuple[Operation, ...]) -> None:
    if len(operations) > OPERATIONS_MAX:
        raise _FieldError("operations", f"must have at most {OPERATIONS_MAX} entries, not {len(operations)}")
    for operation in operations:
        if isinstance(operation, SetEntity):
            _check_set_entity(operation)
        else:
            _check_texts("operations", structs.astuple(operation), ENTITY_KEY_CHARACTERS_MAX)


def _check_set_entity(operation: SetEntity) -> None:
    _check_texts("operations", (operation.key,), ENTITY_KEY_CHARACTERS_MAX)
    if operation.expires_at_ms is not None and not 0 <= operation.expires_at_ms <= STORED_INTEGER_MAX:
        raise _FieldError("operations", f"must have an expires_at_ms from 0 to {STORED_INTEGER_MAX}")
    if operation.condition is not None and type(operation.condition.must) is not Must:
        raise _FieldError("operations", f"must have a condition with a Must, not {operation.condition.must!r}")


def _check_delta(submission: Submission, delta: RowDelta) -> None:
    if submission.policy.identity is Identity.DERIVED and submission.key != delta.delta_id:
        raise _FieldError("key", "must be the delta's id")
    if type(delta.op) is not Op:
        raise _FieldError("delta", f"must have an op of type Op, not {delta.op!r}")
    if not 0 <= delta.hlc <= HLC_MAX:
        raise _FieldError("delta", "must have an hlc of at most 64 bits")
    if len(delta.columns) > ROW_COLUMNS_MAX:
        raise _FieldError("delta", f"must have at most {ROW_COLUMNS_MAX} columns")
    names = (delta.table, delta.row_id, delta.client_id, *[name for name, _ in delta.columns])
    _check_texts("delta", names, ENTITY_KEY_CHARACTERS_MAX)


def _check_name(field: str, name: str) -> None:
    if name == "":
        raise _FieldError(field, "must not be empty")
    _check_text(field, name, NAME_CHARACTERS_MAX)


def _check_texts(field: str, texts: tuple[str, ...], characters_max: int) -> None:
    together = "".join(texts)
    if together.isascii() and len(together) <= characters_max and "\0" not in together:
        return  # all names together are shorter than the limit for one name
    for text in texts:
        _check_text(field, text, characters_max)


def _check_text(field: str, text: str, characters_max: int) -> None:
    if type(text) is not str:
        raise _FieldError(field, f"must be a string, not {type(text).__name__}")
    if len(text) > characters_max:
        raise _FieldError(field, f"must have at most {characters_max} characters, not {len(text)}")
    if not is_storable(text):
        raise _FieldError(field, "must not contain lone surrogates or U+0000")


def _describe_unused_field(policy: Policy) -> str:
    return f"is not used by the policy {policy.name!r}"


def _refuse(field: str, message: str) -> Refused:
    return Refused(Reason.MALFORMED, f"{field} {message}", field)
