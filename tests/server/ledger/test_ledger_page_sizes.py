"""Pages of entities have a byte limit, and the store fetches at most one entity more than a page holds."""

from typing import Any, Final

import pytest

from databases import BOTH_STORES
from oncelog.core.operations import Entity
from oncelog.storage.queries import sql_store
from oncelog.storage.side_state import decode_entity
from server.ledger.ledger_servers import SharedServer, server_pool_with
from server.ledger.ledger_transports import GRPC, code, put

pytestmark = BOTH_STORES

PAGE: Final = 10_000
"""Maximum page size in bytes."""


server_pool = server_pool_with(page_bytes_max=PAGE)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the values that the store has fetched."""
    lengths: list[int] = []

    def noted(row: Any) -> Entity:
        entity = decode_entity(row)
        lengths.append(len(entity.value))
        return entity

    monkeypatch.setattr(sql_store, "decode_entity", noted)
    return lengths


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("wire", [GRPC], indirect=True)
@pytest.mark.parametrize(
    ("lengths", "page_size", "given"),
    [
        ([1000] * 300, 1000, 10),  # as many as fit
        ([1] * 20 + [5000] * 300, 1000, 21),  # long values after many short ones
        ([5000] + [1] * 300 + [5000] * 50, 1000, 301),
        ([20_000] * 20, 1000, 1),  # longer than a page: one entity per page
        ([0] * 300, 1000, 300),
        ([1] * 300, 7, 7),  # limited by the page size
    ],
)
async def test_page_fetches_at_most_one_entity_more_than_it_returns(
    shared_server: SharedServer, fetched: list[int], lengths: list[int], page_size: int, given: int
) -> None:
    ledger = shared_server.ledger()
    entities = [put(f"{number:04}", bytes(length)) for number, length in enumerate(lengths)]
    assert code(await ledger.write(1, *entities)) == "OK"
    found: list[str] = []
    token, pages = "", 0
    while token or not pages:
        fetched.clear()
        page = await ledger.list_entities(page_size=page_size, page_token=token)
        keys = [one["key"] for one in page["entities"]]
        assert len(keys) == given or pages
        assert sum(fetched[: len(keys)]) <= PAGE or len(keys) == 1
        assert len(fetched) <= len(keys) + 1
        found += keys
        token, pages = page["next_page_token"], pages + 1
    assert found == [f"{number:04}" for number in range(len(lengths))]


async def test_page_of_long_values_ends_early_and_the_next_page_continues(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    await ledger.write(1, *[put(f"{n}", bytes(PAGE * 2 // 5)) for n in range(5)], put("9", bytes(5 * PAGE)))
    pages: list[list[str]] = []
    token = ""
    while token or not pages:
        page = await ledger.list_entities(page_size=100, page_token=token)
        pages.append([one["key"] for one in page["entities"]])
        token = page["next_page_token"]
    assert pages == [["0", "1"], ["2", "3"], ["4"], ["9"]]
