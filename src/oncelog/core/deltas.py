"""Deltas of rows: the stream they go to, how they come in JSON, and the submission that each becomes.

A push is read in canonical form as a whole. Then the columns of each delta are bytes that need no second look: they go
into its id, its body and its row as they stand.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.core.canonical import canonical_text, is_unicode, nfc
from oncelog.core.hlc import format_hlc, parse_hlc
from oncelog.core.identity import CONTROL_CHARACTER, check_length, check_text, scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op, RowDelta
from oncelog.core.policy import DELTAS
from oncelog.core.values import Rate, Submission
from oncelog.errors import CanonicalError

SCOPE_PREFIX: Final = "deltas"
GATEWAY_CHARACTERS_MAX: Final = 80
PUSH_DELTAS_MAX: Final = 10_000
IDENTIFIER_CHARACTERS_MAX: Final = 128
"""Of the names of tables and columns."""
ROW_ID_CHARACTERS_MAX: Final = 512
_MISSING_FIELD: Final = re.compile("Object missing required field `(.+)`")


def find_gateway_fault(name: str) -> str | None:
    """Return the fault of a gateway's name, or None. Servers, clients and commands use this one check."""
    if not isinstance(name, str) or not 1 <= len(name) <= GATEWAY_CHARACTERS_MAX:
        found = f"{len(name)}" if isinstance(name, str) else f"{type(name).__name__}"
        return f"must have 1 to {GATEWAY_CHARACTERS_MAX} characters, not {found}"
    if CONTROL_CHARACTER.search(name):
        return "must not have control characters (U+0000 to U+001F, U+007F to U+009F)"
    if name in (".", ".."):
        return "must not be . or .., which HTTP clients remove from a path"
    if name.isascii():
        return None
    if not is_unicode(name):
        return "must not have lone surrogates"
    # Grants are compared in NFC: two spellings of a name would be two gateways with the same rights.
    return None if nfc(name) == name else "must be in NFC"


def deltas_scope(gateway: str) -> str:
    """The stream of a gateway's deltas: `deltas/shop`."""
    return scope_of(SCOPE_PREFIX, gateway)


# --- as they come ------------------------------------------------------------------------------------


class ColumnJson(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A column as a wire of JSON has it. Its value is not looked into."""

    column: str
    value: Raw


class DeltaJson(Struct, frozen=True, gc=False, rename="camel"):
    """A delta as a wire of JSON has it, in canonical form. Other members have no part in it."""

    client_id: str
    columns: Raw
    delta_id: str
    hlc: str
    op: Op
    row_id: str
    table: str

    def compute_id(self) -> bytes:
        """The id that its content has, whatever it says itself."""
        return self.compute_id_and_body()[0]

    def compute_id_and_body(self) -> tuple[bytes, bytes]:
        """That id, and the delta as it is kept (`encode_delta`): in canonical form, if its columns are."""
        client, hlc, row, table = (
            _quote(self.client_id),
            self.hlc.encode(),
            orjson.dumps(self.row_id),
            _quote(self.table),
        )
        # The clock as it is: one with a quote or a backslash is no clock, and passes neither `to_row_delta` nor the
        # comparison of `decode_canonical_push`.
        parts = (client, self.columns, hlc, row, table)
        identity = sha256(b'{"clientId":%b,"columns":%b,"hlc":"%b","rowId":%b,"table":%b}' % parts).digest()
        return identity, _BODY_TEMPLATE % (
            client,
            self.columns,
            identity.hex().encode(),
            hlc,
            _ENCODED_OPS[self.op],
            row,
            table,
        )


class DecodedPush(Struct, frozen=True):
    """The deltas of a push, and of each the id that its content has, and how it would be kept."""

    deltas: list[DeltaJson]
    keys: list[bytes]
    bodies: list[bytes]


class _PushJson(Struct, frozen=True, gc=False):
    deltas: list[DeltaJson]


_PUSH_DECODER: Final = msgspec.json.Decoder(_PushJson)
_DELTA_DECODER: Final = msgspec.json.Decoder(DeltaJson)
_COLUMNS_DECODER: Final = msgspec.json.Decoder(list[ColumnJson])


def decode_push(body: bytes) -> DecodedPush:
    """The deltas of `{"deltas": […]}`. Raises CanonicalError with the path of what is none."""
    try:
        # Canonical: nothing is rounded, no key is there twice, and −0 is 0.
        return _build_push(_PUSH_DECODER.decode(canonical_text(body)).deltas)
    except msgspec.ValidationError as error:
        raise _to_canonical_error(error, "") from error


def decode_canonical_push(body: bytes) -> DecodedPush | None:
    """The same of a push in canonical form, whose deltas have their ids; None where only `decode_push` can tell.

    The columns have not been looked into. An id that is known proves them, since it is their hash; of one that is new
    they are to be checked (`has_canonical_columns`).
    """
    try:
        pushed = _build_push(_PUSH_DECODER.decode(body).deltas)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return pushed if encode_push(pushed.bodies) == body else None  # with the ids that were made here


def _build_push(deltas: list[DeltaJson]) -> DecodedPush:
    identified = [delta_json.compute_id_and_body() for delta_json in deltas]
    return DecodedPush(deltas, [key for key, _ in identified], [body for _, body in identified])


def has_canonical_columns(deltas: Sequence[DeltaJson]) -> bool:
    """Whether all columns are in canonical form."""
    return _is_canonical(b"[%b]" % b",".join([delta_json.columns for delta_json in deltas]))


def decode_delta(text: bytes, path: str = "$") -> RowDelta:
    """A delta in JSON, checked as one that is pushed. Raises CanonicalError."""
    try:
        delta_json = _DELTA_DECODER.decode(canonical_text(text))
    except msgspec.ValidationError as error:
        raise _to_canonical_error(error, path) from error
    identity = delta_json.compute_id()
    change = to_row_delta(delta_json, identity, path)  # reports a malformed delta first, as the Deltas API does
    check_delta_id(delta_json, identity, path)
    return change


def decode_stored_delta(body: bytes) -> RowDelta:
    """Return the delta of a record's body, with the id of its content. Raises CanonicalError or MsgspecError."""
    delta_json = _DELTA_DECODER.decode(body)
    return to_row_delta(delta_json, delta_json.compute_id(), "body")


def check_delta_id(delta: DeltaJson, identity: bytes, path: str) -> None:
    """Raises WrongIdError for a delta that says another id than its own (DE-3)."""
    if delta.delta_id != identity.hex():
        raise WrongIdError(f"{path}.deltaId", identity.hex())


class WrongIdError(CanonicalError):
    """A delta with an id that is not that of its content."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(path, f"is not that of the delta, which is {expected}")
        self.expected = expected


def to_row_delta(delta: DeltaJson, identity: bytes, path: str, value_bytes_max: int = ROW_BYTES_MAX) -> RowDelta:
    """What it says, checked (DE-10). Raises CanonicalError with the path of what cannot be."""
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
        raise CanonicalError(f"{path}.columns", f"must be at most {ROW_COLUMNS_MAX}, not {len(columns)}")
    named = {column.column: bytes(column.value) for column in columns}
    if len(named) < len(columns) or not all(map(is_identifier, named)):
        _check_column_names([column.column for column in columns], path)
    if len(delta.columns) > value_bytes_max:
        _check_values(named.values(), value_bytes_max, path)
    return RowDelta(delta.op, delta.table, delta.row_id, delta.client_id, hlc, tuple(named.items()), identity)


def is_identifier(name: str) -> bool:
    """Whether a table or column can be called so."""
    return name.isidentifier() and name.isascii() and len(name) <= IDENTIFIER_CHARACTERS_MAX


def _check_column_names(names: Sequence[str], path: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise CanonicalError(f"{path}.columns[{index}].column", f"{name!r} is named twice")
        _check_identifier(name, f"{path}.columns[{index}].column")


def _check_values(values: Iterable[bytes], bytes_max: int, path: str) -> None:
    for index, value in enumerate(values):
        if len(value) > bytes_max:
            reason = f"must have at most {bytes_max} bytes in canonical JSON, not {len(value)}"
            raise CanonicalError(f"{path}.columns[{index}].value", reason)


def _check_identifier(name: str, path: str) -> None:
    if not is_identifier(name):
        expected = "an identifier (letters, digits and _, no digit first)"
        raise CanonicalError(path, f"must be {expected} of 1 to {IDENTIFIER_CHARACTERS_MAX} characters")


# --- what is wrong with them, and where ----------------------------------------------------------------


def _to_canonical_error(error: msgspec.ValidationError, path: str) -> CanonicalError:
    """Convert an error of the decoder. `path` is that of the decoded value; empty for a body."""
    reason, _, where = str(error).partition(" - at `")
    is_body = not path
    path += where.rstrip("`").removeprefix("$")
    missing = _MISSING_FIELD.fullmatch(reason)
    if missing is not None:
        path, reason = f"{path}.{missing[1]}", "is missing"
    if reason.startswith("Invalid enum value"):
        reason = f"must be one of {', '.join(op.value for op in Op)}"
    return CanonicalError((path.removeprefix(".") or "body") if is_body else path, reason)


# --- as they are kept --------------------------------------------------------------------------------


_BODY_TEMPLATE: Final = b'{"clientId":%b,"columns":%b,"deltaId":"%b","hlc":"%b","op":"%b","rowId":%b,"table":%b}'
_ENCODED_OPS: Final = {op: op.value.encode() for op in Op}


def encode_op(op: Op) -> bytes:
    """What of a delta its fingerprint is: two deltas of one id can differ in nothing else."""
    return _ENCODED_OPS[op]


def _quote(text: str) -> bytes:
    """The same clients and tables come again and again; what is too long to be one is not kept."""
    return _quote_cached(text) if len(text) <= NAME_CHARACTERS_MAX else orjson.dumps(text)


@lru_cache(maxsize=4096)
def _quote_cached(text: str) -> bytes:
    return b"%b" % orjson.dumps(text)  # as `canonical` says: it would keep 4 KiB


def encode_delta(delta: RowDelta) -> bytes:
    """A delta in canonical JSON: how it is kept, and how whoever reads it gets it."""
    columns = ",".join([f'{{"column":"{name}","value":{value.decode()}}}' for name, value in delta.columns])
    return _BODY_TEMPLATE % (
        _quote(delta.client_id),
        f"[{columns}]".encode(),
        delta.delta_id.hex().encode(),
        str(delta.hlc).encode(),
        _ENCODED_OPS[delta.op],
        orjson.dumps(delta.row_id),
        _quote(delta.table),
    )


def delta(scope: str, change: RowDelta, *, actor: str = "", rate: Rate | None = None) -> Submission:
    """A delta under the policy DELTAS. Its id is its key; its op is all that two deltas of one id can differ in.

    Raises CanonicalError for a delta that the Deltas API would refuse.
    """
    check_delta(change)
    return build_submission(scope, change, encode_delta(change), actor=actor, rate=rate)


def build_submission(
    scope: str, change: RowDelta, body: bytes, *, actor: str = "", rate: Rate | None = None
) -> Submission:
    """The same of a delta that has been checked (`to_row_delta`), and its body."""
    return Submission(
        policy=DELTAS,
        scope=scope,
        key=change.delta_id,
        fingerprint=_ENCODED_OPS[change.op],
        body=body,
        actor=actor,
        client=change.client_id,
        delta=change,
        rate=rate,
    )


def check_delta(change: RowDelta, path: str = "$") -> None:
    """Raises CanonicalError for a delta that could not be pushed."""
    for name, text in (("clientId", change.client_id), ("rowId", change.row_id), ("table", change.table)):
        check_text(text, f"{path}.{name}")
    for index, (name, value) in enumerate(change.columns):
        _check_identifier(name, f"{path}.columns[{index}].column")
        if not _is_canonical(value):  # one by one: joined, two that are no values could come to one that is
            raise CanonicalError(f"{path}.columns[{index}].value", "must be in canonical form")
    columns = msgspec.json.encode([{"column": name, "value": Raw(value)} for name, value in change.columns])
    delta_json = DeltaJson(
        change.client_id,
        Raw(columns),
        change.delta_id.hex(),
        format_hlc(change.hlc, f"{path}.hlc"),
        change.op,
        change.row_id,
        change.table,
    )
    identity = delta_json.compute_id()
    to_row_delta(delta_json, identity, path)
    check_delta_id(delta_json, identity, path)


def _is_canonical(value: bytes) -> bool:
    try:
        return canonical_text(value) == value
    except CanonicalError:
        return False


def encode_push(bodies: Sequence[bytes]) -> bytes:
    """A push of deltas in canonical form."""
    return b'{"deltas":[%b]}' % b",".join(bodies)
