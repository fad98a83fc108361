"""Table schemas: the tables of each gateway, with their columns and types.

The plan validates only new deltas, so a retry of a committed delta is acknowledged even if the schema has changed.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.canonical import canonical_text
from oncelog.core.deltas import is_identifier
from oncelog.core.plan import Validate
from oncelog.core.policy import DELTAS
from oncelog.core.values import Submission
from oncelog.errors import CanonicalError, SettingsError
from oncelog.server.auth.secret_files import read_file
from oncelog.server.deltas.service import parse_gateway
from oncelog.server.errors import ApiError
from oncelog.server.limits import SCHEMAS_FILE_BYTES_MAX

ANY_GATEWAY: Final = "*"
_COLUMN_TYPES: Final = ("text", "integer", "number", "boolean", "json")
_NUMBER_STARTS: Final = frozenset(b"-0123456789")
_FRACTION_BYTES: Final = frozenset(b".eE")


class Column(Struct, frozen=True):
    """The type of a column."""

    type: str
    nullable: bool

    def find_problem(self, value: bytes) -> str | None:
        """Return why a canonical value is invalid, or None if it is valid."""
        kind = _get_type(value)
        if kind == "null":
            return None if self.nullable or self.type == "json" else f"must be of type {self.type}, not null"
        if self.type in ("json", kind) or (self.type == "number" and kind == "integer"):
            return None
        return f"must be of type {self.type}, not {kind}"


Tables = Mapping[str, Mapping[str, Column]]


class TableSchemas:
    """The schemas in a file, which `reload` loads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_scope: Mapping[str, Tables] = {}

    def reload(self) -> None:
        """Load the file. If it is invalid, raises SettingsError and keeps the current schemas."""
        try:
            text = canonical_text(read_file(self._path, SCHEMAS_FILE_BYTES_MAX).data)  # refuses repeated tables
        except SettingsError as error:
            raise SettingsError(f"deltas_schemas: {error}") from error
        except CanonicalError as error:
            raise SettingsError(f"deltas_schemas: {self._path}: {error}") from error
        self._by_scope = decode_schemas(text, f"deltas_schemas: {self._path}")

    def validate(self, submission: Submission) -> str | None:
        """See `Validate`. Writes under other policies pass."""
        delta = submission.delta
        if delta is None or submission.policy.name != DELTAS.name:
            return None
        tables = self._by_scope.get(submission.scope, self._by_scope.get(ANY_GATEWAY))
        if tables is None:
            return None  # the gateway has no entry in the file; an entry without tables refuses every delta
        columns = tables.get(delta.table)
        if columns is None:
            return f"table: {delta.table!r} is not a table of the gateway"
        for index, (name, value) in enumerate(delta.columns):
            column = columns.get(name)
            if column is None:
                return f"columns[{index}].column: {name!r} is not a column of table {delta.table!r}"
            wrong = column.find_problem(value)
            if wrong is not None:
                return f"columns[{index}].value: column {name!r} of table {delta.table!r} {wrong}"
        return None


def decode_schemas(text: bytes, source: str) -> dict[str, Tables]:
    """Decode the tables of each gateway, by stream. Raises SettingsError if they are invalid."""
    try:
        gateways = msgspec.json.decode(text, type=dict[str, dict[str, dict[str, str]]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{source}: must be JSON of the form {{gateway: {{table: {{column: type}}}}}}: {error}"
        ) from error
    return {
        gateway if gateway == ANY_GATEWAY else _parse_scope(gateway, source): {
            _check_name(table, f"{source}: {gateway}"): {
                _check_name(column, f"{source}: {gateway}.{table}"): _parse_column(
                    kind, f"{source}: {gateway}.{table}.{column}"
                )
                for column, kind in columns.items()
            }
            for table, columns in tables.items()
        }
        for gateway, tables in gateways.items()
    }


def combine_validators(first: Validate | None, second: Validate | None) -> Validate | None:
    """Return a validator that runs both validators and returns the first objection."""
    if first is None or second is None:
        return first or second
    return lambda submission: first(submission) or second(submission)


def _parse_scope(gateway: str, source: str) -> str:
    try:
        return parse_gateway(gateway)
    except ApiError as error:  # the server would refuse every push to this gateway
        raise SettingsError(f"{source}: {gateway!r} is not a valid gateway name: {error.message}") from error


def _check_name(name: str, location: str) -> str:
    if not is_identifier(name):
        raise SettingsError(f"{location}: {name!r} is not a valid table or column name")
    return name


def _parse_column(kind: str, location: str) -> Column:
    name = kind.removesuffix("?")
    if name not in _COLUMN_TYPES:
        raise SettingsError(
            f"{location}: must be one of {', '.join(_COLUMN_TYPES)}, with ? where null is allowed, not {kind!r}"
        )
    return Column(name, nullable=kind.endswith("?"))


def _get_type(value: bytes) -> str:
    """Return the type of a canonical value, judging by its first byte."""
    first = value[0]
    if first in _NUMBER_STARTS:
        return "number" if _FRACTION_BYTES.intersection(value) else "integer"
    return {ord('"'): "text", ord("t"): "boolean", ord("f"): "boolean", ord("n"): "null"}.get(first, "json")
