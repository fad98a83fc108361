"""An SQLite file as the source of a verification."""

from collections.abc import Iterator
from typing import Any

from oncelog.core.values import LaneHead
from oncelog.storage.leaps import LaneGaps
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.sqlite.record_queries import list_consumers, load_gaps, load_heads, load_leaps
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import Consumer
from oncelog.storage.verify.findings import StepProgress
from oncelog.storage.verify.source import RowTuple
from oncelog.storage.verify.sqlite_key_index import SegmentKeyVerifier
from oncelog.storage.verify.sqlite_schema import check_indexes, check_schema, check_structure


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
        return load_heads(self._connection)

    def load_leaps(self) -> tuple[int, ...]:
        """As `Source` says."""
        return load_leaps(self._connection)

    def load_gaps(self) -> dict[int, LaneGaps]:
        """As `Source` says."""
        return load_gaps(self._connection)

    def iterate_rows(self, statement: str) -> Iterator[RowTuple]:
        """As `Source` says."""
        return iter(self._connection.execute(SQL[statement]))

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """As `Source` says."""
        columns = ", ".join(("lane", *table.keys, *table.values))
        statement = f"SELECT {columns} FROM oncelog_{table.name} ORDER BY lane, {', '.join(table.keys)}"  # noqa: S608
        return iter(self._connection.execute(statement))

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """As `Source` says."""
        return self.iterate_rows("all_evidence")

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """As `Source` says."""
        row: RowTuple | None = self._connection.execute(SQL[statement], parameters).fetchone()
        return row

    def list_consumers(self) -> list[Consumer]:
        """As `Source` says."""
        return list_consumers(self._connection, self.metadata.settings.lanes)


def _decode_text(data: bytes) -> str:
    """Damaged text is still shown, and never equal to text that a log has written."""
    return data.decode("utf-8", "surrogateescape")
