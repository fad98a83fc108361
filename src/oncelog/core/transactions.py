"""Ledger transactions: their scope, their id, and the canonical form of their operations.

The body of a record is the canonical JSON of its operations. A sender can therefore build the same bytes and verify
their proof without the server. The JSON APIs use the same form.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from oncelog.core.canonical import INTEGER_MAX, LONE_SURROGATE
from oncelog.core.identity import check_length, request_hash, scope_of
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, OPERATIONS_MAX
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.policy import LEDGER, Policy
from oncelog.core.values import Rate, Record, Submission, decode_place, encode_place
from oncelog.errors import CanonicalError

TX_ID_DIGITS: Final = 16
SCOPE_PREFIX: Final = "ledger"
_HEXADECIMAL: Final = frozenset("0123456789abcdef")


def ledger_scope(organization: str, vault: str = "") -> str:
    """Return the stream of an organization or of one of its vaults: `ledger/acme`, `ledger/acme/main`."""
    return scope_of(SCOPE_PREFIX, organization, vault) if vault else scope_of(SCOPE_PREFIX, organization)


def format_tx_id(lane: int, position: int) -> str:
    """Return the id of a transaction: lane and position in hexadecimal."""
    return f"{encode_place(lane, position):0{TX_ID_DIGITS}x}"


def parse_tx_id(tx_id: str) -> tuple[int, int] | None:
    """Return the lane and position that a transaction id encodes, or None for an invalid id."""
    if len(tx_id) != TX_ID_DIGITS or not _HEXADECIMAL.issuperset(tx_id):
        return None
    return decode_place(int(tx_id, 16))


def transaction(  # noqa: PLR0913 - most arguments are named
    scope: str,
    client: str,
    sequence: int,
    operations: Sequence[Operation],
    *,
    key: bytes = b"",
    actor: str = "",
    rate: Rate | None = None,
    policy: Policy = LEDGER,
) -> Submission:
    """Build a transaction under the policy LEDGER. Without a key, client and sequence identify it.

    A log with a different time to live has a different policy of this name: `log.policies["ledger"]`.

    Raises CanonicalError with the path of a fault. The caller has checked the operations (`check_operations`).
    """
    operations = tuple(operations)
    return Submission(
        policy=policy,
        scope=scope,
        key=key,
        fingerprint=request_hash(operations),
        body=encode_operations(operations),
        actor=actor,
        client=client,
        client_sequence=sequence,
        operations=operations,
        rate=rate,
    )


def check_operations(operations: Sequence[Operation], value_bytes_max: int, path: str = "operations") -> None:
    """Raise CanonicalError for the first invalid operation, with its path and the limit that it exceeds."""
    if not operations:
        raise CanonicalError(path, "must not be empty")
    check_operation_count(len(operations), path)
    for index, operation in enumerate(operations):
        operation_path = f"{path}[{index}].{_KINDS[type(operation)]}"
        if isinstance(operation, SetEntity):
            _check_set_entity(operation, value_bytes_max, operation_path)
        else:
            for name in operation.__struct_fields__:
                check_length(getattr(operation, name), f"{operation_path}.{name}", ENTITY_KEY_CHARACTERS_MAX)


def check_operation_count(count: int, path: str = "operations") -> None:
    """Raise CanonicalError if a transaction has too many operations."""
    if count > OPERATIONS_MAX:
        raise CanonicalError(path, f"must have at most {OPERATIONS_MAX} entries, not {count}")


def _check_set_entity(operation: SetEntity, value_bytes_max: int, path: str) -> None:
    check_length(operation.key, f"{path}.key", ENTITY_KEY_CHARACTERS_MAX)
    _check_value(operation.value, value_bytes_max, f"{path}.value")
    if operation.expires_at_ms is not None:
        _check_number(operation.expires_at_ms, f"{path}.expires_at_ms")
    if operation.condition is not None:
        _check_number(operation.condition.version, f"{path}.condition.version_is")
        _check_value(operation.condition.value, value_bytes_max, f"{path}.condition.value_equals")


def _check_value(value: bytes, bytes_max: int, path: str) -> None:
    if len(value) > bytes_max:
        raise CanonicalError(path, f"must have at most {bytes_max} bytes, not {len(value)}")


def _check_number(number: int, path: str) -> None:
    if not 0 <= number <= INTEGER_MAX:
        raise CanonicalError(path, f"must be from 0 to {INTEGER_MAX}, not {number}")


# --- operations as JSON ------------------------------------------------------------------------------


class ConditionJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A condition in JSON. Unknown members are errors, so that a misspelt condition is not silently ignored."""

    must_not_exist: bool | UnsetType = UNSET
    must_exist: bool | UnsetType = UNSET
    version_is: int | UnsetType = UNSET
    value_equals: bytes | UnsetType = UNSET


class SetEntityJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`SetEntity` in JSON. Values are base64."""

    key: str
    value: bytes = b""
    expires_at_ms: int | UnsetType = UNSET
    condition: ConditionJson | UnsetType = UNSET


class OperationJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An operation in JSON: exactly one of these members."""

    set_entity: SetEntityJson | UnsetType = UNSET
    delete_entity: DeleteEntity | UnsetType = UNSET
    create_relationship: Relate | UnsetType = UNSET
    delete_relationship: Unrelate | UnsetType = UNSET


class _BodyJson(Struct, frozen=True):
    operations: tuple[OperationJson, ...]


ONE_OPERATION: Final = "must have exactly one of set_entity, delete_entity, create_relationship and delete_relationship"
ONE_CONDITION: Final = "must have exactly one of must_not_exist, must_exist, version_is and value_equals"
ONLY_TRUE: Final = "must be true"
_KINDS: Final[Mapping[type[Operation], str]] = {
    SetEntity: "set_entity",
    DeleteEntity: "delete_entity",
    Relate: "create_relationship",
    Unrelate: "delete_relationship",
}
"""Members of `OperationJson` by operation."""
_MUST: Final = {
    "must_not_exist": Must.NOT_EXIST,
    "must_exist": Must.EXIST,
    "version_is": Must.HAVE_VERSION,
    "value_equals": Must.HAVE_VALUE,
}
"""Members of `ConditionJson`."""
_BODY_DECODER: Final = msgspec.json.Decoder(_BodyJson)
_encode_body: Final = msgspec.json.Encoder(order="sorted").encode
"""The output is canonical JSON, because all names are ASCII and all numbers are integers up to 2^53−1."""


def encode_operations(operations: Sequence[Operation]) -> bytes:
    """Return the canonical JSON of operations, which is the body of their record.

    Raises CanonicalError for a number beyond 2^53−1 or a lone surrogate.
    """
    try:
        return _encode_body(_BodyJson(tuple([_operation_to_json(operation) for operation in operations])))
    except UnicodeEncodeError as error:
        raise CanonicalError("$", LONE_SURROGATE) from error


def _operation_to_json(operation: Operation) -> OperationJson:
    member: Any = operation
    if isinstance(operation, SetEntity):
        expires_at_ms, condition = operation.expires_at_ms, operation.condition
        member = SetEntityJson(
            operation.key,
            operation.value,
            UNSET if expires_at_ms is None else _check_exact(expires_at_ms),
            UNSET if condition is None else _condition_to_json(condition),
        )
    return OperationJson(**{_KINDS[type(operation)]: member})


def _condition_to_json(condition: Condition) -> ConditionJson:
    match condition.must:
        case Must.NOT_EXIST:
            return ConditionJson(must_not_exist=True)
        case Must.EXIST:
            return ConditionJson(must_exist=True)
        case Must.HAVE_VERSION:
            return ConditionJson(version_is=_check_exact(condition.version))
        case Must.HAVE_VALUE:
            return ConditionJson(value_equals=condition.value)


def _check_exact(number: int) -> int:
    """Check that a double can represent the number exactly."""
    if not -INTEGER_MAX <= number <= INTEGER_MAX:
        raise CanonicalError("$", f"must be at most {INTEGER_MAX}, not {number}")
    return number


def decode_operations(record: Record) -> tuple[Operation, ...]:
    """Return the operations of a record, or none if it is erased. Raises CanonicalError for an invalid body."""
    if record.erased:
        return ()
    try:
        return decode_body(record.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CanonicalError("body", f"is not a transaction: {error}") from error


def decode_body(body: bytes) -> tuple[Operation, ...]:
    """Return the operations in a body. Raises CanonicalError, or a msgspec error for any other document."""
    return operations_from_json(_BODY_DECODER.decode(body).operations)


def operations_from_json(operations: Sequence[OperationJson], path: str = "operations") -> tuple[Operation, ...]:
    """Convert operations from JSON. Raises CanonicalError with the path of an invalid operation."""
    check_operation_count(len(operations), path)
    return tuple([_operation_from_json(operation, path, index) for index, operation in enumerate(operations)])


def _operation_from_json(operation: OperationJson, path: str, index: int) -> Operation:
    named: list[Operation | SetEntityJson] = [value for value in structs.astuple(operation) if value is not UNSET]
    if len(named) != 1:
        raise CanonicalError(f"{path}[{index}]", ONE_OPERATION)
    [found] = named
    if not isinstance(found, SetEntityJson):
        return found
    expires_at_ms = None if found.expires_at_ms is UNSET else found.expires_at_ms
    condition = None
    if found.condition is not UNSET:
        condition = _condition_from_json(found.condition, f"{path}[{index}].set_entity.condition")
    return SetEntity(found.key, found.value, expires_at_ms, condition)


def _condition_from_json(condition: ConditionJson, path: str) -> Condition:
    named = [(name, value) for name, value in structs.asdict(condition).items() if value is not UNSET]
    if len(named) != 1:
        raise CanonicalError(path, ONE_CONDITION)
    [(name, value)] = named
    if value is False:
        raise CanonicalError(f"{path}.{name}", ONLY_TRUE)
    must = _MUST[name]
    if must is Must.HAVE_VERSION:
        return Condition(must, version=value)
    return Condition(must, value=value) if must is Must.HAVE_VALUE else Condition(must)
