"""Pages of rows have a byte limit, and the store fetches at most one row more than a page holds."""

from typing import Final

import pytest

from databases import BOTH_STORES
from oncelog.core.merge import Row, decode_row
from oncelog.storage.queries import sql_store
from server.deltas.delta_servers import SharedServer, change, server_pool_with

pytestmark = BOTH_STORES

PAGE: Final = 10_000
"""Maximum page size in bytes."""


server_pool = server_pool_with(page_bytes_max=PAGE)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the rows that the store has fetched."""
    lengths: list[int] = []

    def record_length(state: bytes) -> Row:
        lengths.append(len(state))
        return decode_row(state)

    monkeypatch.setattr(sql_store, "decode_row", record_length)
    return lengths


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("path", ["rows/t", "snapshot"])
@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([1000] * 60, 1000),
        ([1] * 20 + [5000] * 60, 1000),  # long rows after short ones
        ([20_000] * 12, 1000),  # longer than a page: one row per page
        ([1] * 60, 7),  # the request's limit
    ],
)
async def test_page_fetches_at_most_one_row_more_than_it_returns(
    shared_server: SharedServer, fetched: list[int], path: str, lengths: list[int], limit: int
) -> None:
    gateway = shared_server.gateway()
    names = [f"r{number:04}" for number in range(len(lengths))]
    await gateway.push_accepted(*[change(1, name, a="x" * size) for name, size in zip(names, lengths, strict=True)])
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
