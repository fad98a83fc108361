"""Row deltas: their streams, JSON form and submissions.

A push is converted to canonical form once, as a whole. The columns of its deltas then remain bytes, from which the id,
the body and the row are built.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from oncelog.core.canonical import canonical_text, is_unicode, nfc
from oncelog.core.hlc import format_hlc, parse_hlc
from oncelog.core.identity import CONTROL_CHARACTER, check_length, check_text, locate_fault, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op, RowDelta
from oncelog.core.policy import DELTAS
from oncelog.core.values import Rate, Receipt, Submission
from oncelog.errors import CanonicalError

SCOPE_PREFIX: Final = "deltas"
GATEWAY_CHARACTERS_MAX: Final = 80
PUSH_DELTAS_MAX: Final = 10_000
IDENTIFIER_CHARACTERS_MAX: Final = 128
"""Maximum length of a table or column name."""
ROW_ID_CHARACTERS_MAX: Final = 512


def find_gateway_fault(name: str) -> str | None:
    """Describe the fault in a gateway's name, or return None. Servers, clients and commands share this check."""
    if not isinstance(name, str) or not 1 <= len(name) <= GATEWAY_CHARACTERS_MAX:
        found = f"{len(name)}" if isinstance(name, str) else f"{type(name).__name__}"
        return f"must have 1 to {GATEWAY_CHARACTERS_MAX} characters, not {found}"
    if CONTROL_CHARACTER.search(name):
        return "must not contain control characters (U+0000 to U+001F, U+007F to U+009F)"
    if name in (".", ".."):
        return "must not be . or .., because HTTP clients remove them from paths"
    if name.isascii():
        return None
    if not is_unicode(name):
        return "must not contain lone surrogates"
    # Grants are compared in NFC, so two spellings of a name would be two gateways with the same rights.
    return None if nfc(name) == name else "must be in NFC"


def deltas_scope(gateway: str) -> str:
    """Return the stream of a gateway's deltas: `deltas/shop`."""
    return scope_of(SCOPE_PREFIX, gateway)


# --- decoding ----------------------------------------------------------------------------------------


class ColumnJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A column in JSON. Its value is not decoded."""

    column: str
    value: Raw


class DeltaJson(Struct, frozen=True, gc=False, rename="camel"):
    """A delta in JSON, in canonical form. Other members are ignored."""

    client_id: str
    columns: Raw
    delta_id: str
    hlc: str
    op: Op
    row_id: str
    table: str

    def compute_id(self) -> bytes:
        """Compute the id from the content, whether or not `delta_id` matches it."""
        identity = _IdentityJson(self.client_id, self.columns, self.hlc, self.row_id, self.table)
        return sha256(msgspec.json.encode(identity)).digest()


class _IdentityJson(Struct, frozen=True, gc=False, rename="camel"):
    """Members of a delta that determine its id."""

    client_id: str
    columns: Raw
    hlc: str
    row_id: str
    table: str


class DecodedPush(Struct, frozen=True):
    """The deltas of a push, each with its body and the id computed from its content."""

    deltas: list[DeltaJson]
    keys: list[bytes]
    bodies: list[bytes]


class _PushJson(Struct, frozen=True, gc=False):
    deltas: list[DeltaJson]


_PUSH_DECODER: Final = msgspec.json.Decoder(_PushJson)
_DELTA_DECODER: Final = msgspec.json.Decoder(DeltaJson)
_COLUMNS_DECODER: Final = msgspec.json.Decoder(list[ColumnJson])


def decode_push(body: bytes) -> DecodedPush:
    """Decode `{"deltas": […]}`. Raises CanonicalError with the path of the fault."""
    try:
        # In canonical form no number needs rounding, no key is repeated, and −0 is 0.
        return _build_push(_PUSH_DECODER.decode(canonical_text(body)).deltas)
    except msgspec.ValidationError as error:
        raise _to_canonical_error(error, "") from error


def decode_canonical_push(body: bytes) -> DecodedPush | None:
    """Decode a push that is canonical and has correct ids, or return None if the push needs `decode_push`.

    This function does not check columns. For a stored id that is unnecessary, because the id is a hash of the columns.
    For a delta with a new id, the caller checks them with `has_canonical_columns`.
    """
    try:
        pushed = _build_push(_PUSH_DECODER.decode(body).deltas)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return pushed if encode_push(pushed.bodies) == body else None  # compares the ids too


def _build_push(deltas: list[DeltaJson]) -> DecodedPush:
    keys = [delta_json.compute_id() for delta_json in deltas]
    bodies = [
        msgspec.json.encode(replace(delta_json, delta_id=key.hex()))
        for delta_json, key in zip(deltas, keys, strict=True)
    ]
    return DecodedPush(deltas, keys, bodies)


def has_canonical_columns(deltas: Sequence[DeltaJson]) -> bool:
    """Return whether all columns are in canonical form."""
    return _is_canonical(b"[%b]" % b",".join([delta_json.columns for delta_json in deltas]))


def decode_delta(text: bytes) -> RowDelta:
    """Decode a delta with the same checks as in a push. Raises CanonicalError."""
    try:
        delta_json = _DELTA_DECODER.decode(canonical_text(text))
    except msgspec.ValidationError as error:
        raise _to_canonical_error(error, "$") from error
    identity = delta_json.compute_id()
    change = to_row_delta(delta_json, identity, "$")  # before the check of the id, as in the Deltas API
    check_delta_id(delta_json, identity, "$")
    return change


def decode_stored_delta(body: bytes) -> RowDelta:
    """Decode the delta in a record's body and compute its id. Raises CanonicalError or MsgspecError."""
    delta_json = _DELTA_DECODER.decode(body)
    return to_row_delta(delta_json, delta_json.compute_id(), "body")


def check_delta_id(delta: DeltaJson, identity: bytes, path: str) -> None:
    """Raise WrongIdError if a delta's id does not match its content (DE-3)."""
    if delta.delta_id != identity.hex():
        raise WrongIdError(f"{path}.deltaId", identity.hex())


class WrongIdError(CanonicalError):
    """The id of a delta does not match its content."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(path, f"does not match the content of the delta, whose id is {expected}")
        self.expected = expected


def to_row_delta(delta: DeltaJson, identity: bytes, path: str, value_bytes_max: int = ROW_BYTES_MAX) -> RowDelta:
    """Check a decoded delta (DE-10) and convert it. Raises CanonicalError with the path of the fault."""
    _check_identifier(delta.table, f"{path}.table")
    check_length(delta.row_id, f"{path}.rowId", ROW_ID_CHARACTERS_MAX)
    check_length(delta.client_id, f"{path}.clientId", NAME_CHARACTERS_MAX)
    try:
        hlc = parse_hlc(delta.hlc)
        columns = _COLUMNS_DECODER.decode(delta.columns)
    except CanonicalError as error:
        raise CanonicalError(f"{path}.hlc", error.reason) from error
    except msgspec.ValidationError as error:
        raise _to_canonical_error(error, f"{path}.columns") from error
    if len(columns) > ROW_COLUMNS_MAX:
        raise CanonicalError(f"{path}.columns", f"must have at most {ROW_COLUMNS_MAX} entries, not {len(columns)}")
    named = {column.column: bytes(column.value) for column in columns}
    if len(named) < len(columns) or not all(map(is_identifier, named)):
        _check_column_names([column.column for column in columns], path)
    if len(delta.columns) > value_bytes_max:
        _check_values(named.values(), value_bytes_max, path)
    return RowDelta(delta.op, delta.table, delta.row_id, delta.client_id, hlc, tuple(named.items()), identity)


def is_identifier(name: str) -> bool:
    """Return whether a name is valid for a table or column."""
    return name.isidentifier() and name.isascii() and len(name) <= IDENTIFIER_CHARACTERS_MAX


def _check_column_names(names: Sequence[str], path: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise CanonicalError(f"{path}.columns[{index}].column", f"{name!r} appears more than once")
        _check_identifier(name, f"{path}.columns[{index}].column")


def _check_values(values: Iterable[bytes], bytes_max: int, path: str) -> None:
    for index, value in enumerate(values):
        if len(value) > bytes_max:
            reason = f"must have at most {bytes_max} bytes in canonical JSON, not {len(value)}"
            raise CanonicalError(f"{path}.columns[{index}].value", reason)


def _check_identifier(name: str, path: str) -> None:
    if not is_identifier(name):
        expected = "an identifier (letters, digits and _, not starting with a digit)"
        raise CanonicalError(path, f"must be {expected} of 1 to {IDENTIFIER_CHARACTERS_MAX} characters")


def _to_canonical_error(error: msgspec.ValidationError, path: str) -> CanonicalError:
    """Convert a decoder error. `path` locates the decoded value, and is empty for a body."""
    place, reason = locate_fault(error)
    if reason.startswith("Invalid enum value"):
        reason = f"must be one of {', '.join(op.value for op in Op)}"
    place = place.removeprefix("$")
    return CanonicalError(path + place if path else place.removeprefix(".") or "body", reason)


# --- encoding ----------------------------------------------------------------------------------------


OP_FINGERPRINTS: Final = {op: op.value.encode() for op in Op}
"""Fingerprint of a delta, by op. Two deltas with the same id can differ only in the op."""


def encode_delta(delta: RowDelta) -> bytes:
    """Encode a delta in canonical JSON, as it is stored and sent. Raises CanonicalError for a clock beyond 64 bits."""
    columns = ",".join([f'{{"column":"{name}","value":{value.decode()}}}' for name, value in delta.columns])
    return msgspec.json.encode(
        DeltaJson(
            delta.client_id,
            Raw(f"[{columns}]".encode()),
            delta.delta_id.hex(),
            format_hlc(delta.hlc, "$.hlc"),
            delta.op,
            delta.row_id,
            delta.table,
        )
    )


def delta(scope: str, change: RowDelta, *, actor: str = "", rate: Rate | None = None) -> Submission[Receipt]:
    """Build a delta under the policy DELTAS. Its key is its id, and its fingerprint is its op (`OP_FINGERPRINTS`).

    Raises CanonicalError for a delta that the Deltas API refuses.
    """
    _check_texts(change)
    body = encode_delta(change)
    decode_delta(body)  # raises for an invalid delta
    return build_submission(scope, change, body, actor=actor, rate=rate)


def build_submission(
    scope: str, change: RowDelta, body: bytes, *, actor: str = "", rate: Rate | None = None
) -> Submission[Receipt]:
    """Build the submission of a delta that `to_row_delta` has checked."""
    return Submission(
        policy=DELTAS,
        scope=scope,
        key=change.delta_id,
        fingerprint=OP_FINGERPRINTS[change.op],
        body=body,
        actor=actor,
        client=change.client_id,
        delta=change,
        rate=rate,
    )


def _check_texts(change: RowDelta) -> None:
    """Raise CanonicalError for a name or value that encoding and decoding would change."""
    for name, text in (("clientId", change.client_id), ("rowId", change.row_id), ("table", change.table)):
        check_text(text, f"$.{name}")
    for index, (name, value) in enumerate(change.columns):
        _check_identifier(name, f"$.columns[{index}].column")
        if not _is_canonical(value):  # separately: two invalid values can become valid when joined
            raise CanonicalError(f"$.columns[{index}].value", "must be in canonical form")


def _is_canonical(value: bytes) -> bool:
    try:
        return canonical_text(value) == value
    except CanonicalError:
        return False


def encode_push(bodies: Sequence[bytes]) -> bytes:
    """Encode a push in canonical form from the bodies of its deltas."""
    return b'{"deltas":[%b]}' % b",".join(bodies)
