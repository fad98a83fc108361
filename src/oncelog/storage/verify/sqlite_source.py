"""An SQLite file as the source of a verification."""

from collections.abc import Iterator
from typing import Any, TypeVar

from oncelog.core.values import LaneHead
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.records import load_heads
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.verify.findings import StepProgress
from oncelog.storage.verify.source import RowTuple
from oncelog.storage.verify.sqlite_key_index import SegmentKeyVerifier
from oncelog.storage.verify.sqlite_schema import check_indexes, check_schema, check_structure

T = TypeVar("T")


class FileSource:
    """On a connection inside a transaction. See `Source` for what each method promises."""

    def __init__(self, connection: Any, metadata: LogMetadata) -> None:
        self._connection = connection
        self.metadata = metadata
        self.keys = SegmentKeyVerifier(connection, metadata.index_secret)
        connection.text_factory = _decode_text

    def check_structure(self) -> Iterator[StepProgress]:
        """As `Source` says."""
        check_structure(self._connection)
        check_schema(self._connection)
        yield from check_indexes(self._connection)

    def load_heads(self) -> dict[int, LaneHead]:
        """As `Source` says."""
        return self.run_query(load_heads)

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """As `Source` says."""
        return run_query(self._connection, query, *arguments)

    def iterate_rows(self, statement: str) -> Iterator[RowTuple]:
        """As `Source` says."""
        return iter(self._connection.execute(SQL[statement]))

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """As `Source` says."""
        columns = ", ".join(table.columns)
        statement = f"SELECT {columns} FROM oncelog_{table.name} ORDER BY lane, {', '.join(table.keys)}"  # noqa: S608
        return iter(self._connection.execute(statement))

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """As `Source` says."""
        return self.iterate_rows("all_evidence")

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """As `Source` says."""
        row: RowTuple | None = self._connection.execute(SQL[statement], parameters).fetchone()
        return row


def _decode_text(data: bytes) -> str:
    """Damaged text is still shown, and never equal to text that a log has written."""
    return data.decode("utf-8", "surrogateescape")
