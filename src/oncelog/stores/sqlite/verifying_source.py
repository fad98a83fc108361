"""A file as a verification reads it."""

from collections.abc import Iterator
from typing import Any

from oncelog.core.values import LaneHead
from oncelog.stores.about import About
from oncelog.stores.leaps import LaneGaps
from oncelog.stores.protocol import Consumer
from oncelog.stores.side_state import Table
from oncelog.stores.sqlite.reading import consumers, gaps, heads, leaps
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.verifying_keys import SegmentedKeys
from oncelog.stores.sqlite.verifying_structure import check_indexes, check_schema, check_structure
from oncelog.stores.verifying.findings import Progress
from oncelog.stores.verifying.source import Row


class FileSource:
    """On a connection inside a transaction. See `Source` for what each method promises."""

    def __init__(self, connection: Any, about: About) -> None:
        self._connection = connection
        self.about = about
        self.keys = SegmentedKeys(connection, about.index_secret)
        connection.text_factory = _text

    def check_structure(self) -> Iterator[Progress]:
        """As `Source` says."""
        check_structure(self._connection)
        check_schema(self._connection)
        yield from check_indexes(self._connection)

    def heads(self) -> dict[int, LaneHead]:
        """As `Source` says."""
        return heads(self._connection)

    def leaps(self) -> tuple[int, ...]:
        """As `Source` says."""
        return leaps(self._connection)

    def gaps(self) -> dict[int, LaneGaps]:
        """As `Source` says."""
        return gaps(self._connection)

    def rows(self, statement: str) -> Iterator[Row]:
        """As `Source` says."""
        return iter(self._connection.execute(SQL[statement]))

    def rows_of(self, table: Table) -> Iterator[Row]:
        """As `Source` says."""
        columns = ", ".join(("lane", *table.keys, *table.values))
        statement = f"SELECT {columns} FROM oncelog_{table.name} ORDER BY lane, {', '.join(table.keys)}"  # noqa: S608
        return iter(self._connection.execute(statement))

    def evidence(self) -> Iterator[Row]:
        """As `Source` says."""
        return self.rows("all_evidence")

    def first(self, statement: str, *parameters: Any) -> Row | None:
        """As `Source` says."""
        row: Row | None = self._connection.execute(SQL[statement], parameters).fetchone()
        return row

    def consumers(self) -> list[Consumer]:
        """As `Source` says."""
        return consumers(self._connection, self.about.settings.lanes)


def _text(data: bytes) -> str:
    """Damaged text is still shown, and never equal to text that a log has written."""
    return data.decode("utf-8", "surrogateescape")
