"""Identities and fingerprints of writes.

There are two kinds of hash input. Where a rule specifies JSON, the input is canonical JSON. Where a rule specifies
fields, each field is framed as label, length and value. Because the length precedes the value, different fields never
have equal frames: neither moving a boundary between two fields nor a value that resembles a frame makes two inputs
equal.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

import msgspec
import orjson

from oncelog.core.canonical import (
    LONE_SURROGATE,
    JsonValue,
    UnreadableValue,
    canonical,
    canonical_args,
    canonical_at,
    format_path,
    is_unicode,
    nfc,
    utf16_sort_key,
)
from oncelog.core.hlc import parse_hlc
from oncelog.core.limits import PARTITION_CHARACTERS_MAX
from oncelog.core.operations import Condition, DeleteEntity, Operation, Relate, SetEntity, Unrelate
from oncelog.errors import CanonicalError

RUN_KEY_BYTES: Final = 16
DECOMPOSED_CHARACTERS_MAX: Final = 4
"""Maximum length of a decomposed character, so a string is at most four times as long as its normal form."""


def frame(label: bytes, value: bytes) -> bytes:
    """Frame a field for hashing: the label, the value's length in four bytes (big-endian), the value."""
    return label + len(value).to_bytes(4, "big") + value


# --- events ------------------------------------------------------------------------------------------


def normal_partitions(partitions: Sequence[str], path: str = "$.partitions") -> tuple[str, ...]:
    """Return partitions in the normal form in which they are compared, stored, granted and read.

    The normal form is in NFC, without duplicates, and sorted by UTF-16 code units.
    """
    if isinstance(partitions, str):
        raise CanonicalError(path, "must be an array, not a string")
    if len(partitions) == 1 and type(partitions[0]) is str and partitions[0].isascii():
        return (partitions[0],)
    normal = {_normalize_partition(partition, f"{path}[{index}]") for index, partition in enumerate(partitions)}
    return tuple(sorted(normal, key=utf16_sort_key))


def _normalize_partition(partition: str, path: str) -> str:
    """Return a partition in NFC. A string that would be too long in any form is refused before the costly
    normalisation."""
    text = check_text(partition, path)
    if len(text) > DECOMPOSED_CHARACTERS_MAX * PARTITION_CHARACTERS_MAX:
        raise CanonicalError(path, f"must have 1 to {PARTITION_CHARACTERS_MAX} characters, not {len(text)}")
    return nfc(text)


def fingerprint(partitions: Sequence[str], event: bytes) -> bytes:
    """Return the fingerprint of an event: the SHA-256 of the canonical `{partitions, event}`.

    `partitions` may have any form. `event` must be canonical.
    """
    # The native encoder writes an array of strings as JCS does.
    return sha256(b'{"event":%b,"partitions":%b}' % (event, orjson.dumps(normal_partitions(partitions)))).digest()


def fingerprint_from_json(value: JsonValue) -> bytes:
    """Return the fingerprint of an event given as a JSON value `{partitions, event}`."""
    members = check_object(value, "$")
    partitions = get_required(members, "partitions")
    if type(partitions) is not list:
        raise CanonicalError("$.partitions", f"must be an array, not {_json_type_name(partitions)}")
    return fingerprint(partitions, canonical_at(get_required(members, "event"), "$.event"))


# --- deltas ------------------------------------------------------------------------------------------

DELTA_FIELDS: Final = ("clientId", "hlc", "table", "rowId", "columns")


def delta_id(client_id: str, hlc: str, table: str, row_id: str, columns: Sequence[JsonValue]) -> bytes:
    """Return the id of a delta: the SHA-256 of the canonical form of its five identifying fields.

    This function does not check lengths, because a client also needs the ids of refused deltas. A push checks them.
    """
    identity = {"clientId": client_id, "hlc": hlc, "table": table, "rowId": row_id}
    for name, value in identity.items():
        check_text(value, f"$.{name}")
    parse_hlc(hlc)
    return sha256(canonical({**identity, "columns": list(columns)})).digest()


def delta_id_from_json(value: JsonValue) -> bytes:
    """Return the id of a delta given as a JSON object. `op` and other members are ignored."""
    members = check_object(value, "$")
    client_id, hlc, table, row_id, columns = (get_required(members, name) for name in DELTA_FIELDS)
    if type(columns) is not list:
        raise CanonicalError("$.columns", f"must be an array, not {_json_type_name(columns)}")
    return delta_id(client_id, hlc, table, row_id, columns)


# --- runs --------------------------------------------------------------------------------------------


def run_key(
    plan_id: str | None,
    campaign_id: int,
    event_type: str,
    tool_name: str | None,
    ruleset_version: str | None,
    args: JsonValue,
) -> bytes:
    """Return the key (v2) of a run, which depends only on these six fields."""
    return _hash_fields(
        (b"plan_id", _encode_nullable_text(plan_id, "$.plan_id")),
        (b"campaign_id", _encode_decimal(campaign_id, "$.campaign_id")),
        (b"event_type", check_text(event_type, "$.event_type").encode()),
        (b"tool_name", _encode_nullable_text(tool_name, "$.tool_name")),
        (b"ruleset_version", _encode_nullable_text(ruleset_version, "$.ruleset_version")),
        (b"args_json", canonical_at(args, "$.args_json", canonical_args)),
    )


def run_key_v1(
    plan_id: str | None,
    campaign_id: int,
    event_type: str,
    execution_request_id: str | None,
    replay_ordinal: int,
    payload: JsonValue,
) -> bytes:
    """Return the key (v1) that the original system gave a run, for migrations that compare both keys.

    It is framed like v2, but has different fields in a different order. A payload of None means the empty object.
    """
    return _hash_fields(
        (b"campaign_id", _encode_decimal(campaign_id, "$.campaign_id")),
        (b"event_type", check_text(event_type, "$.event_type").encode()),
        (b"execution_request_id", _encode_nullable_text(execution_request_id, "$.execution_request_id")),
        (b"plan_id", _encode_nullable_text(plan_id, "$.plan_id")),
        (b"replay_ordinal", _encode_decimal(replay_ordinal, "$.replay_ordinal")),
        (b"payload", canonical_at(payload, "$.payload", canonical_args)),
    )


def run_key_from_json(value: JsonValue) -> bytes:
    """Return the key (v2) of a run given as a JSON object."""
    members = check_object(value, "$")
    return run_key(
        members.get("plan_id"),
        get_required(members, "campaign_id"),
        get_required(members, "event_type"),
        members.get("tool_name"),
        members.get("ruleset_version"),
        members.get("args_json"),
    )


def _hash_fields(*fields: tuple[bytes, bytes]) -> bytes:
    return sha256(b"".join(frame(label, value) for label, value in fields)).digest()[:RUN_KEY_BYTES]


def _encode_nullable_text(value: JsonValue, path: str) -> bytes:
    return b"" if value is None else check_text(value, path).encode()


def _encode_decimal(value: JsonValue, path: str) -> bytes:
    if type(value) is not int:
        raise CanonicalError(path, f"must be an integer, not {_json_type_name(value)}")
    try:
        return str(value).encode()
    except ValueError as error:
        raise CanonicalError(path, "integer with too many digits") from error


# --- the ledger --------------------------------------------------------------------------------------


_SET_PREFIX: Final = frame(b"kind", b"set") + b"key"
_ENCODED_KINDS: Final[Mapping[type[Operation], bytes]] = {
    DeleteEntity: frame(b"kind", b"delete"),
    Relate: frame(b"kind", b"relate"),
    Unrelate: frame(b"kind", b"unrelate"),
}
_NO_EXPIRY: Final = frame(b"expires_at_ms", b"")
_NO_CONDITION: Final = frame(b"condition", b"")


def request_hash(operations: Sequence[Operation]) -> bytes:
    """Return the fingerprint of a ledger transaction: the SHA-256 of its framed operations and conditions."""
    return sha256(
        b"".join(
            [frame(b"operation", _encode_operation(operation, index)) for index, operation in enumerate(operations)]
        )
    ).digest()


def _encode_operation(operation: Operation, index: int) -> bytes:
    if not isinstance(operation, SetEntity):
        return _ENCODED_KINDS[type(operation)] + b"".join(
            [
                frame(name.encode(), _encode_utf8(getattr(operation, name), index, name))
                for name in operation.__struct_fields__
            ]
        )
    named = _encode_utf8(operation.key, index, "key")
    expires_at_ms, condition = operation.expires_at_ms, operation.condition
    return b"".join(
        (
            _SET_PREFIX,
            len(named).to_bytes(4, "big"),
            named,
            frame(b"value", operation.value),
            _NO_EXPIRY if expires_at_ms is None else frame(b"expires_at_ms", str(expires_at_ms).encode()),
            _NO_CONDITION if condition is None else frame(b"condition", _encode_condition(condition)),
        )
    )


def _encode_condition(condition: Condition) -> bytes:
    return (
        frame(b"must", condition.must.value.encode())
        + frame(b"version", str(condition.version).encode())
        + frame(b"value", condition.value)
    )


def _encode_utf8(text: str, index: int, name: str) -> bytes:
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError):
        return check_text(text, f"$.operations[{index}].{name}").encode()  # raises with the reason


# --- scopes and lanes -------------------------------------------------------------------------------------------


def scope_of(*parts: str | int) -> str:
    """Build the name of a scope. Slashes within parts are escaped: `scope_of("org", "a/b")` is `org/a%2Fb`."""
    return "/".join(str(part).replace("%", "%25").replace("/", "%2F") for part in parts)


@lru_cache(maxsize=8192)  # most writes go to recently used streams
def compute_lane(stream: str, lanes: int) -> int:
    """Return the lane (1 to `lanes`) of a stream. This mapping must never change: a stream that moved would lose its
    order."""
    return 1 + int.from_bytes(sha256(stream.encode()).digest()[:8], "big") % lanes


# --- fields of JSON values ---------------------------------------------------------------------------


def check_object(value: JsonValue, path: str) -> Mapping[str, JsonValue]:
    """Return the value if it is an object. Raises CanonicalError with the path."""
    if type(value) is not dict:
        if type(value) is UnreadableValue:
            raise CanonicalError(path + format_path(value.steps).removeprefix("$"), value.reason)
        raise CanonicalError(path, f"must be an object, not {_json_type_name(value)}")
    return value


CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""C0, DEL and C1. In a name they would break the lines of logs and terminals or hide parts of the name."""


def check_text(value: JsonValue, path: str) -> str:
    """Return the value if it is a string without lone surrogates. Raises CanonicalError with the path."""
    if type(value) is not str:
        raise CanonicalError(path, f"must be a string, not {_json_type_name(value)}")
    if not is_unicode(value):
        raise CanonicalError(path, LONE_SURROGATE)
    return value


def check_length(text: str, path: str, characters_max: int) -> None:
    """Check that a name is not too long and has no U+0000. Raises CanonicalError with the path."""
    if not 1 <= len(text) <= characters_max:
        raise CanonicalError(path, f"must have 1 to {characters_max} characters, not {len(text)}")
    if "\0" in text:
        raise CanonicalError(path, "must not contain U+0000")


def get_required(members: Mapping[str, JsonValue], name: str, path: str = "$") -> JsonValue:
    """Return a member of the object at `path`. Raises CanonicalError with the path if it is missing."""
    if name not in members:
        raise CanonicalError(f"{path}.{name}", "is missing")
    return members[name]


_MISSING_FIELD: Final = re.compile("Object missing required field `(.+)`")


def locate_fault(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the path of the value that a msgspec decoder refused, and the reason."""
    reason, _, path = str(error).partition(" - at `")
    path = path.rstrip("`") or "$"
    missing = _MISSING_FIELD.fullmatch(reason)
    return (path, reason) if missing is None else (f"{path}.{missing[1]}", "is missing")


_JSON_NAMES: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "a boolean",
    type(None): "null",
    UnreadableValue: "an invalid value",
}


def _json_type_name(value: object) -> str:
    return _JSON_NAMES.get(type(value), type(value).__name__)
