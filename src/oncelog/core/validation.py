"""Validation of an item against its policy and the named limits.

The APIs check their messages; the core and the stores rely on the checks of this module. An item that passes cannot
make a later step fail, so that a bad submission does not affect the other submissions of its group commit.
"""

import re
from typing import Final, TypeVar

from oncelog.core.canonical import canonical_text
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
from oncelog.core.operations import Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.policy import Identity, Order, Policy
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

_STREAM: Final = Order.STREAM  # as in `batch_state`: asked for every item
_ACT_NAME: Final = re.compile(rf"[a-z][a-z0-9_]{{0,{ACT_CHARACTERS_MAX - 1}}}")
T = TypeVar("T")


def check_item(item: Item) -> Refused | None:
    """None if the item can be decided; else the field at fault."""
    if isinstance(item, Submission):
        return _check_submission(item)
    match item:
        case Claim() | Renew():
            return _check_lease(item, item.lease_ms)
        case Release():
            return _check_lease(item, LEASE_MS_MAX)
        case OpenStream():
            refused = _check_name("scope", item.scope) or _check_name("member", item.member)
            return refused or (None if item.rate is None else _check_rate(item.rate))
        case Acknowledge():
            return _check_name("scope", item.scope) or _check_name("member", item.member)
        case SetMember():
            return _check_set_member(item)
        case SetCursor():
            return _check_cursor(item)
        case _:
            return _check_maintenance(item)


def _check_maintenance(item: DropTombstones | FoldRows | Leap | RecordAct) -> Refused | None:
    match item:
        case DropTombstones():
            return _check_tombstones(item)
        case FoldRows():
            return _check_fold(item)
        case Leap():
            return _check_leap(item)
        case RecordAct():
            return _check_act(item)


def _check_leap(item: Leap) -> Refused | None:
    if type(item.above) is not int or not 1 <= item.above <= LEAP_ABOVE_MAX:
        return _refuse("above", f"must be a whole number from 1 to {LEAP_ABOVE_MAX}, not {item.above!r}")
    return None


def _check_act(item: RecordAct) -> Refused | None:
    if type(item.act) is not str or _ACT_NAME.fullmatch(item.act) is None:
        return _refuse("act", f"must be 1 to {ACT_CHARACTERS_MAX} of a-z, 0-9 and '_', from a letter on")
    for field, number in (("lane", item.lane), ("time_ms", item.time_ms)):
        if type(number) is not int or not 0 <= number <= STORED_INTEGER_MAX:
            return _refuse(field, f"must be a whole number from 0 to {STORED_INTEGER_MAX}, not {number!r}")
    if type(item.key) is not bytes or len(item.key) not in (0, ACT_KEY_BYTES):
        return _refuse("key", f"must have {ACT_KEY_BYTES} bytes, or none")
    return (
        _check_name("actor", item.actor)
        or _check_text("scope", item.scope, NAME_CHARACTERS_MAX)
        or _check_text("target", item.target, TARGET_CHARACTERS_MAX)
        or _check_details(item.details)
    )


def _check_details(details: bytes) -> Refused | None:
    if len(details) > ACT_DETAILS_BYTES_MAX:
        return _refuse_too_long("details", ACT_DETAILS_BYTES_MAX)
    try:
        is_object = details.startswith(b"{") and canonical_text(details) == details
    except CanonicalError:
        is_object = False
    return None if is_object else _refuse("details", "must be a JSON object in canonical form")


def _check_set_member(item: SetMember) -> Refused | None:
    # Without an actor the application itself asks.
    refused = _check_name("actor", item.actor) if item.actor != "" else None
    refused = _check_name("scope", item.scope) or _check_name("member", item.member) or refused
    role: object = item.role
    if refused is None and role is not None:
        if not isinstance(role, Role):  # a str must not equal a Role by chance
            return _refuse("role", f"must be a Role or None, not {role!r}")
        if not item.present:
            return _refuse("role", "must be None where a member is removed")
    return refused


def check_request(request: Request) -> Refused | None:
    """Check the mode, and the size of a request that is admitted as a whole."""
    mode: object = request.mode
    if not isinstance(mode, Mode):  # a str must not equal a Mode by chance
        return _refuse("mode", f"must be a Mode, not {mode!r}")
    if request.is_admitted_whole and len(request.items) > WHOLE_REQUEST_ITEMS_MAX:
        limit = f"must be at most {WHOLE_REQUEST_ITEMS_MAX} in a request that is admitted as a whole"
        return _refuse("items", f"{limit}, not {len(request.items)}")
    return None


def _check_submission(submission: Submission) -> Refused | None:
    policy, key = submission.policy, submission.key
    refused = _check_names(submission)
    if refused is None and submission.holder:  # apart: there is another one for every lease
        refused = _check_name("holder", submission.holder)
    if refused is None and (policy.client_sequence or submission.client_sequence):
        refused = _check_sequence(submission, policy)
    if refused is None and (key or not policy.client_sequence):
        refused = _check_key(key, policy)
    if refused is not None:
        return refused
    if len(submission.fingerprint) > FINGERPRINT_BYTES_MAX:
        return _refuse_too_long("fingerprint", FINGERPRINT_BYTES_MAX)
    if policy.order is _STREAM:
        if not submission.scope:
            return _refuse("scope", "must name the stream")
    elif submission.expected_sequence is not None:
        return _refuse("expected_sequence", "has no meaning outside of streams; expect a position")
    return _check_effects(submission, policy)


_VALID_CACHE_MAX: Final = 8192
_valid_names: set[str] = {""}
_valid_partitions: set[tuple[str, ...]] = {()}
"""The same streams, senders and partitions come again and again. These have been found well formed; when they are too
many they are looked at again."""


def _check_names(submission: Submission) -> Refused | None:
    """Of stream, sender and partitions, each of which may be missing here."""
    scope, actor, client, partitions = submission.scope, submission.actor, submission.client, submission.partitions
    if type(partitions) is not tuple:
        return _refuse("partitions", f"must be a tuple of names, not {type(partitions).__name__}")
    is_text = type(scope) is type(actor) is type(client) is str  # and nothing that only equals one
    if not (is_text and scope in _valid_names and actor in _valid_names and client in _valid_names):
        for field, name in (("scope", scope), ("actor", actor), ("client", client)):
            if type(name) is not str:
                return _refuse(field, f"must be a text, not {type(name).__name__}")
            refused = _check_text(field, name, NAME_CHARACTERS_MAX)
            if refused is not None:
                return refused
            _cache_valid(_valid_names, name, "")
    return None if partitions in _valid_partitions else _check_partitions(partitions)


def _cache_valid(cache: set[T], value: T, empty: T) -> None:
    if len(cache) >= _VALID_CACHE_MAX:
        cache.clear()
        cache.add(empty)
    cache.add(value)


def _check_partitions(partitions: tuple[str, ...]) -> Refused | None:
    refused = _check_each_partition(partitions)
    if refused is None and len(partitions) == 1:  # as most have: 64 long ones each would be many megabytes
        _cache_valid(_valid_partitions, partitions, ())
    return refused


def _check_each_partition(partitions: tuple[str, ...]) -> Refused | None:
    if len(partitions) > PARTITIONS_MAX:
        return _refuse("partitions", f"must be at most {PARTITIONS_MAX}, not {len(partitions)}")
    for name in partitions:
        if type(name) is not str:
            return _refuse("partitions", f"must be a text, not {type(name).__name__}")
    refused = _check_texts("partitions", partitions, PARTITION_CHARACTERS_MAX)
    if refused is None and partitions and (not all(partitions) or normal_partitions(partitions) != partitions):
        # In another form nobody would find them again: readers and erasures ask for the normal one.
        return _refuse("partitions", "must be in normal form (normal_partitions): NFC, each once, sorted, none empty")
    return refused


def _check_rate(rate: Rate, field: str = "rate") -> Refused | None:
    if type(rate) is not Rate:
        return _refuse(field, f"must be a Rate, not {type(rate).__name__}")
    for name, value in (("per_second", rate.per_second), ("burst", rate.burst)):
        if type(value) is not int or not 1 <= value <= RATE_MAX:
            return _refuse(field, f"must have a {name} from 1 to {RATE_MAX}, not {value!r}")
    return None


def _check_stream_rate(submission: Submission, rate: Rate) -> Refused | None:
    if submission.policy.order is not _STREAM:
        return _refuse("stream_rate", _describe_unused_field(submission.policy))
    if not submission.actor:
        # Its own rate and that of all would be counted as one.
        return _refuse("actor", "must be named where there is a stream_rate")
    return _check_rate(rate, "stream_rate")


def _check_sequence(submission: Submission, policy: Policy) -> Refused | None:
    if not policy.client_sequence:
        return _refuse("client_sequence", _describe_unused_field(policy))
    if not submission.client:
        return _refuse("client", "must be named")
    if not 1 <= submission.client_sequence <= SEQUENCE_MAX:
        return _refuse("client_sequence", f"must be from 1 to {SEQUENCE_MAX}")
    return None


def _check_effects(submission: Submission, policy: Policy) -> Refused | None:
    operations, delta = submission.operations, submission.delta
    if policy.entities is not bool(operations):
        return _refuse("operations", "must hold at least one" if policy.entities else _describe_unused_field(policy))
    if policy.rows is (delta is None):
        return _refuse("delta", "is missing" if policy.rows else _describe_unused_field(policy))
    if submission.fence and not policy.leased:
        return _refuse("fence", _describe_unused_field(policy))
    refused: Refused | None = None
    if submission.rate is not None:
        refused = _check_rate(submission.rate)
    if refused is None and submission.stream_rate is not None:
        refused = _check_stream_rate(submission, submission.stream_rate)
    if refused is None and delta is not None:
        refused = _check_delta(submission, delta)
    if refused is None and operations:
        refused = _check_operations(operations)
    return refused


def _check_operations(operations: tuple[Operation, ...]) -> Refused | None:
    if len(operations) > OPERATIONS_MAX:
        return _refuse("operations", f"must be at most {OPERATIONS_MAX}, not {len(operations)}")
    for operation in operations:
        refused = _check_texts("operations", _list_texts(operation), ENTITY_KEY_CHARACTERS_MAX)
        if refused is not None:
            return refused
        refused = _check_set_entity(operation) if isinstance(operation, SetEntity) else None
        if refused is not None:
            return refused
    return None


def _check_set_entity(operation: SetEntity) -> Refused | None:
    if operation.expires_at_ms is not None and not 0 <= operation.expires_at_ms <= STORED_INTEGER_MAX:
        return _refuse("operations", f"have an expiry that is not from 0 to {STORED_INTEGER_MAX} ms")
    if operation.condition is not None and type(operation.condition.must) is not Must:
        return _refuse("operations", f"have a condition that is no Must: {operation.condition.must!r}")
    return None


def _list_texts(operation: Operation) -> tuple[str, ...]:
    if isinstance(operation, Relate | Unrelate):
        return (operation.resource, operation.relation, operation.subject)
    return (operation.key,)


def _check_delta(submission: Submission, delta: RowDelta) -> Refused | None:
    if submission.policy.identity is Identity.DERIVED and submission.key != delta.delta_id:
        return _refuse("key", "must be the delta's id")
    if type(delta.op) is not Op:
        return _refuse("delta", f"has an op that is no Op: {delta.op!r}")
    if not 0 <= delta.hlc <= HLC_MAX:
        return _refuse("delta", "has a clock beyond 64 bits")
    if len(delta.columns) > ROW_COLUMNS_MAX:
        return _refuse("delta", f"has more than {ROW_COLUMNS_MAX} columns")
    names = (delta.table, delta.row_id, delta.client_id, *[name for name, _ in delta.columns])
    return _check_texts("delta", names, ENTITY_KEY_CHARACTERS_MAX)


def _check_lease(item: Claim | Renew | Release, lease_ms: int) -> Refused | None:
    policy = item.policy
    if not policy.leased:
        return _refuse("policy", f"{policy.name!r} has no leases")
    if isinstance(item, Claim) and len(item.fingerprint) > FINGERPRINT_BYTES_MAX:
        return _refuse_too_long("fingerprint", FINGERPRINT_BYTES_MAX)
    if isinstance(item, Release) and len(item.failure or b"") > FAILURE_BYTES_MAX:
        return _refuse_too_long("failure", FAILURE_BYTES_MAX)
    if not 1 <= lease_ms <= LEASE_MS_MAX:
        return _refuse("lease_ms", f"must be from 1 to {LEASE_MS_MAX}, not {lease_ms}")
    return _check_name("scope", item.scope) or _check_holder(item) or _check_key(item.key, policy)


def _check_holder(item: Claim | Renew | Release) -> Refused | None:
    if isinstance(item, Release) and item.actor != "":
        return _check_name("actor", item.actor)  # an operator does not know the holder
    return _check_name("holder", item.holder)


def _check_cursor(item: SetCursor) -> Refused | None:
    if item.cursor is not None and type(item.cursor) is not int:
        return _refuse("cursor", f"must be a whole number or None, not {item.cursor!r}")
    # An empty scope is lane 0.
    return _check_name("consumer", item.consumer) or _check_text("scope", item.scope, NAME_CHARACTERS_MAX)


def _check_tombstones(item: DropTombstones) -> Refused | None:
    if type(item.age_ms) is not int or not 0 <= item.age_ms <= STORED_INTEGER_MAX:
        return _refuse("age_ms", f"must be a whole number from 0 to {STORED_INTEGER_MAX}, not {item.age_ms!r}")
    if len(item.tombstones) > TOMBSTONES_MAX:
        return _refuse("tombstones", f"must be at most {TOMBSTONES_MAX}, not {len(item.tombstones)}")
    names = tuple(name for tombstone in item.tombstones for name in (tombstone.table, tombstone.row_id))
    return (
        _check_name("scope", item.scope)
        or _check_text("actor", item.actor, NAME_CHARACTERS_MAX)
        or _check_texts("consumers", item.consumers, NAME_CHARACTERS_MAX)
        or _check_texts("tombstones", names, ENTITY_KEY_CHARACTERS_MAX)
    )


def _check_fold(item: FoldRows) -> Refused | None:
    for field in ("rows", "deltas"):
        count = len(getattr(item, field))
        if count > FOLDED_MAX:
            return _refuse(field, f"must be at most {FOLDED_MAX}, not {count}")
    names = tuple(name for row in item.rows for name in row)
    return _check_name("scope", item.scope) or _check_texts("rows", names, ENTITY_KEY_CHARACTERS_MAX)


def _check_key(key: bytes, policy: Policy) -> Refused | None:
    shortest, longest = policy.key_bytes
    if not shortest <= len(key) <= longest:
        length = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        return _refuse("key", f"must have {length} bytes, not {len(key)}")
    if not policy.zero_key and not any(key):
        return _refuse("key", "must not be all zero")
    return None


def _check_name(field: str, name: str) -> Refused | None:
    if type(name) is not str:
        return _refuse(field, f"must be a text, not {type(name).__name__}")
    return _check_text(field, name, NAME_CHARACTERS_MAX) if name else _refuse(field, "must be named")


def _check_texts(field: str, texts: tuple[str, ...], characters_max: int) -> Refused | None:
    if _are_short_ascii(texts, characters_max):
        return None
    return next(filter(None, (_check_text(field, text, characters_max) for text in texts)), None)


def _are_short_ascii(texts: tuple[str, ...], characters_max: int) -> bool:
    """True if all of them together are plain ASCII within the limit of one: then there is nothing more to look at."""
    together = "".join(texts)
    return together.isascii() and len(together) <= characters_max and "\0" not in together


def _check_text(field: str, text: str, characters_max: int) -> Refused | None:
    if len(text) > characters_max:
        return _refuse(field, f"must have at most {characters_max} characters, not {len(text)}")
    return None if _is_storable(text) else _refuse(field, "must not have lone surrogates or U+0000")


def _is_storable(text: str) -> bool:
    """Every store can hold it: no half characters, and no zero, which PostgreSQL refuses in text."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_too_long(field: str, bytes_max: int) -> Refused:
    return _refuse(field, f"must have at most {bytes_max} bytes")


def _describe_unused_field(policy: Policy) -> str:
    return f"has no meaning under the policy {policy.name!r}"


def _refuse(field: str, message: str) -> Refused:
    return Refused(Reason.MALFORMED, f"{field} {message}", field)
