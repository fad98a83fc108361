"""Rows joined with rows, as snapshots bring them; and the highest clock in them."""

from collections.abc import Iterable

from oncelog.core.merge import NEVER, Row, Stamp


def join_rows(first: Row, second: Row) -> Row:
    """What both together have seen. The same row, if the other one adds nothing.

    Every part is a maximum, as in `merge`: so it does not matter how often, and in which order, rows are joined.
    """
    deleted = max(first.deleted, second.deleted)
    columns = dict(first.columns)
    for name, column in second.columns.items():
        if name not in columns or column[1] > columns[name][1]:
            columns[name] = column
    columns = {name: column for name, column in columns.items() if column[1] > deleted}
    row = Row(columns, max(first.written, second.written), deleted)
    return first if row == first else row


def get_newest_hlc(row: Row) -> int:
    """The highest clock of a row; below 0 for an empty one."""
    stamps: Iterable[Stamp] = (row.written, row.deleted, *(stamp for _, stamp in row.columns.values()))
    return max(stamps, default=NEVER)[0]
