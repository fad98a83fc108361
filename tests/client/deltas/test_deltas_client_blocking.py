"""The blocking deltas client, used from threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.server_process import DEVELOPMENT, serving
from client.deltas.deltas_clients import LIMITS, UNREACHABLE_URL
from databases import BOTH_STORES
from deadlines import WAIT_S
from oncelog.client.deltas import DELETE, BlockingDeltasClient, ConnectionState, Edits
from oncelog.errors import ClientError, ClosedError, StoreInUseError


def blocking_of(url: str, path: Path | str = ":memory:", client_id: str = "ann") -> BlockingDeltasClient:
    return BlockingDeltasClient(url, "shop", path=path, client_id=client_id, limits=LIMITS)


@BOTH_STORES
def test_threads_share_one_client(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        path = tmp_path / "ann.db"
        with (
            blocking_of(server.url, path) as ann,
            blocking_of(server.url, client_id="bob") as bob,
            ThreadPoolExecutor(8) as threads,
        ):
            changes = bob.changes("products")
            made = list(threads.map(lambda one: ann.put("products", f"{one:02}", {"number": one}), range(40)))
            assert len(set(made)) == 40
            with pytest.raises(StoreInUseError):
                blocking_of(server.url, path).__enter__()
            ann.synced(timeout_s=WAIT_S)
            bob.synced(timeout_s=WAIT_S)
            assert sorted(next(changes).row_id for _ in range(40)) == [f"{one:02}" for one in range(40)]
            assert [row.row_id for row in bob.each_row("products")] == [f"{one:02}" for one in range(40)]
            assert bob.row("products", "07") == {"number": 7}
            assert bob.rows("products", after="37", limit=1)[0].row_id == "38"
            assert ann.edit("products", "07", lambda row: {"number": (row or {})["number"] + 1})
            assert ann.delete("products", "08")

            def both(edits: Edits) -> str:
                edits.put("products", "a", {})
                edits.put("products", "b", {})
                return "done"

            assert ann.transact(both) == "done"
            ann.until_status(lambda status: status.pending == 0 and status.state is ConnectionState.LIVE)
            assert ann.pending() == []
            ann.reconnect_now()
            with pytest.raises(ClientError):
                ann.withdraw("00" * 32)
            with pytest.warns(DeprecationWarning, match="discard"), pytest.raises(ClientError):
                ann.discard("00" * 32)
            with pytest.warns(DeprecationWarning, match="retry"):
                ann.retry()
            ann.until_live(WAIT_S)
            ann.until_settled(WAIT_S)
            assert ann.refused() == []
            assert ann.status().cursor <= 44
        with pytest.raises(ClosedError):
            ann.put("products", "1", {})
        ann.close()


def test_edit_remains_pending_if_synced_times_out(tmp_path: Path) -> None:
    with blocking_of(UNREACHABLE_URL, tmp_path / "ann.db") as ann:
        made = ann.put("products", "1", {"a": 1})
        with pytest.raises(TimeoutError):
            ann.synced(timeout_s=0.01)
        assert [one.delta_id for one in ann.pending()] == [made]
        assert b'"rowId":"1"' in ann.pending()[0].body
        assert next(iter(ann.each_row("products"))).columns == {"a": 1}


def test_edit_function_that_uses_the_client_gets_an_error() -> None:
    with blocking_of(UNREACHABLE_URL) as ann:
        ann.put("products", "1", {"a": 1})
        with pytest.raises(ClientError, match="must not use the client"):
            ann.edit("products", "1", lambda _: ann.row("products", "1") or {})
        with pytest.raises(ClientError, match="must not use the client"):
            ann.transact(lambda edits: (edits.put("products", "2", {}), ann.put("products", "3", {})))
        assert [row.row_id for row in ann.each_row("products")] == ["1"]
        assert ann.edit("products", "1", lambda row: {"a": (row or {})["a"] + 1})
        assert ann.row("products", "1") == {"a": 2}


def test_edit_function_without_a_return_value_changes_nothing() -> None:
    with blocking_of(UNREACHABLE_URL) as ann:
        ann.put("products", "1", {"a": 1})
        with pytest.raises(ClientError, match=r"return the columns to set, or oncelog\.client\.deltas\.DELETE"):
            ann.edit("products", "1", lambda _: None)  # type: ignore[arg-type,return-value]
        assert ann.row("products", "1") == {"a": 1}
        assert ann.edit("products", "1", lambda _: DELETE)
        assert ann.row("products", "1") is None


def test_refusals_are_reported(tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text('{"shop": {"products": {"price": "number"}}}')
    with (
        serving(tmp_path, *DEVELOPMENT, f"--set=deltas_schemas={schemas}") as server,
        blocking_of(server.url, tmp_path / "ann.db") as ann,
    ):
        made = ann.put("products", "1", {"price": "much"})
        assert next(ann.refusals()).delta_id == made
        assert made is not None
        ann.withdraw(made)
        ann.until_status(lambda status: not status.is_resetting)
        assert ann.row("products", "1") is None
