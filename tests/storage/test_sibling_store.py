"""A sibling store on the same log, which a thread opens while the first store's event loop is blocked."""

from pathlib import Path

import pytest

from oncelog.core.values import Committed, Replayed, Request
from oncelog.errors import StoreUnavailableError
from oncelog.storage.sqlite import transaction
from oncelog.storage.sqlite.database_file import MemoryDriver
from oncelog.storage.sqlite.store import SqliteStore
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import event


@pytest.mark.parametrize("replaced", [False, True])
async def test_sibling_of_a_file_that_was_removed_or_replaced_is_not_opened(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "app.db"
    store = SqliteStore(path, clock=ManualClock())
    await store.open()
    sibling = store.create_sibling()
    assert sibling is not None
    path.rename(tmp_path / "moved.db")
    if replaced:
        path.write_bytes((tmp_path / "moved.db").read_bytes())
    with pytest.raises(StoreUnavailableError, match="removed or replaced"):
        await sibling.open()
    assert path.exists() is replaced
    await store.close()


def test_log_in_memory_has_no_sibling() -> None:
    store: Store = SqliteStore(":memory:", driver=MemoryDriver())
    assert store.create_sibling() is None


async def test_sibling_of_a_large_log_finds_keys_without_filling_a_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "IMMEDIATE_FILL_KEYS_MAX", -1)
    store = SqliteStore(tmp_path / "app.db", clock=ManualClock(), seal_keys=4)
    await store.open()
    await store.commit([Request(tuple(event(number) for number in range(1, 21)))])
    sibling = store.create_sibling()
    assert sibling is not None
    await sibling.open()
    decided = await sibling.commit([Request((event(1), event(21)))])
    assert [type(verdict) for verdict in decided.verdicts[0]] == [Replayed, Committed]
    assert sibling._fill_task is None
    await sibling.close()
    await store.close()
