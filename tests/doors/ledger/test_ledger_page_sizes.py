"""Pages of entities: however long the values are, in whatever order, little more is fetched than is given."""

from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from doors.ledger.ledger_doors import opened
from doors.ledger.wires import GRPC, code, put
from doors.serving import run
from oncelog.core.operations import Entity
from oncelog.stores.postgres import ledger_reading as of_postgres
from oncelog.stores.sqlite import ledger_reading as of_sqlite

pytestmark = BOTH_STORES

PAGE: Final = 10_000
"""Bytes of a page."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the values that a store has handed over."""
    lengths: list[int] = []

    def noted(value: bytes, *others: Any) -> Entity:
        lengths.append(len(value))
        return Entity(value, *others)

    for module in (of_sqlite, of_postgres):
        monkeypatch.setattr(module, "Entity", noted)
    return lengths


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize(
    ("lengths", "page_size", "given"),
    [
        ([1000] * 300, 1000, 10),  # of one length: as many as fit
        ([1] * 20 + [5000] * 300, 1000, 21),  # long ones behind many short ones
        ([5000] + [1] * 300 + [5000] * 50, 1000, 301),
        ([20_000] * 20, 1000, 1),  # longer than a page: one, and never none
        ([0] * 300, 1000, 300),
        ([1] * 300, 7, 7),  # few are asked for
    ],
)
def test_a_page_fetches_what_it_gives_and_one_more(
    tmp_path: Path, fetched: list[int], lengths: list[int], page_size: int, given: int
) -> None:
    async def main() -> None:
        async with opened(tmp_path, GRPC, page_bytes_max=PAGE) as door:
            ledger = door.ledger(client_id="app")
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

    run(main())
