"""Pages of rows: however long the rows are, in whatever order, little more is fetched than is given."""

from pathlib import Path
from typing import Final

import pytest

from databases import BOTH_STORES
from doors.deltas.delta_doors import change, opened
from doors.serving import run
from oncelog.core.merge import Row
from oncelog.stores.postgres import delta_reading as of_postgres
from oncelog.stores.side_state import row_of
from oncelog.stores.sqlite import delta_reading as of_sqlite

pytestmark = BOTH_STORES

PAGE: Final = 10_000
"""Bytes of a page."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the rows that a store has handed over."""
    lengths: list[int] = []

    def noted(state: bytes) -> Row:
        lengths.append(len(state))
        return row_of(state)

    for module in (of_sqlite, of_postgres):
        monkeypatch.setattr(module, "row_of", noted)
    return lengths


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("path", ["rows/t", "snapshot"])
@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([1000] * 60, 1000),
        ([1] * 20 + [5000] * 60, 1000),  # long ones behind short ones
        ([20_000] * 12, 1000),  # longer than a page: one, and never none
        ([1] * 60, 7),  # few are asked for
    ],
)
def test_a_page_fetches_what_it_gives_and_one_more(
    tmp_path: Path, fetched: list[int], path: str, lengths: list[int], limit: int
) -> None:
    async def main() -> None:
        async with opened(tmp_path, page_bytes_max=PAGE) as door:
            gateway = door.gateway()
            names = [f"r{number:04}" for number in range(len(lengths))]
            await gateway.pushed(*[change(1, name, a="x" * size) for name, size in zip(names, lengths, strict=True)])
            found: list[str] = []
            more, following = "page" if path == "snapshot" else "after", ""
            while following or not found:
                fetched.clear()
                given = {"limit": limit, more: following} if following else {"limit": limit}
                page = await gateway.ok("GET", path, params=given)
                rows = [row["rowId"] for row in page["rows"]]
                assert rows
                assert sum(fetched[: len(rows)]) <= PAGE or len(rows) == 1
                assert len(fetched) <= len(rows) + 1
                found += rows
                following = page["next"]
            assert found == names

    run(main())
