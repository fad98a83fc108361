"""The deltas client's store: edits, outbox, merges, ownership and transactions."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from client.deltas.deltas_clients import HERE
from client.deltas.model_gateway import id_of
from oncelog.client.deltas.codec import PushReply, SnapshotRow
from oncelog.client.deltas.edits import Edits
from oncelog.client.deltas.store import DeltasStore
from oncelog.client.deltas.values import DeltasLimits, LocalRow
from oncelog.core.canonical import parse, utf16_sort_key
from oncelog.core.deltas import decode_delta
from oncelog.core.hlc import HLC_MAX
from oncelog.core.merge import NEVER, Row, RowDelta, Stamp, extract
from oncelog.errors import (
    ClientError,
    CorruptError,
    LimitExceededError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)
from scripts import read_line, start_script

NOW_MS = 1_700_000_000_000
ALL = 10**9


def open_store(
    path: Path | str = ":memory:", client_id: str = "ann", gateway: str = "shop", **limits: int
) -> DeltasStore:
    store = DeltasStore(str(path), DeltasLimits(**limits))
    store.open(client_id, gateway)
    return store


def put(store: DeltasStore, row_id: str, now_ms: int = NOW_MS, **columns: Any) -> str | None:
    made, _ = store.transact(lambda edits: edits.put("notes", row_id, columns), now_ms)
    return made


def stamp(hlc: int, client_id: str = "bob") -> Stamp:
    return (hlc, utf16_sort_key(client_id), bytes(32))


def delta(hlc: int, row_id: str = "1", client_id: str = "bob", **columns: Any) -> RowDelta:
    made = extract(None, columns, client_id=client_id, hlc=hlc, table="notes", row_id=row_id)
    assert made is not None
    return made


def bodies(store: DeltasStore) -> list[Any]:
    return [parse(one.body) for one in store.list_pending(None, ALL, ALL)]


# --- edits


@pytest.mark.rule("DE-11")
def test_edit_adds_a_delta_to_the_outbox(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")
    first = put(store, "1", b="x", a=1.0)
    assert put(store, "1", a=1) is None
    second = put(store, "1", a=2)
    deleted, changes = store.transact(lambda edits: edits.delete("notes", "1"), NOW_MS)
    assert [(one.before, one.after, one.is_local) for one in changes] == [({"a": 2, "b": "x"}, None, True)]
    made = bodies(store)
    assert [one["deltaId"] for one in made] == [first, second, deleted] == [id_of(one) for one in made]
    assert [one["op"] for one in made] == ["INSERT", "UPDATE", "DELETE"]
    assert made[0]["columns"] == [{"column": "a", "value": 1}, {"column": "b", "value": "x"}]
    assert made[1]["columns"] == [{"column": "a", "value": 2}]
    assert [int(one["hlc"]) for one in made] == [(NOW_MS << 16) + number for number in range(3)]
    before = store.sync_state
    store.close()
    store = open_store(tmp_path / "ann.db")
    assert store.sync_state == before
    assert bodies(store) == made
    assert (before.pending, before.oldest_number, before.newest_number) == (3, 1, 3)
    assert before.pending_bytes == sum(len(one.body) for one in store.list_pending(None, ALL, ALL))
    store.close()


@pytest.mark.rule("DE-8")
def test_hybrid_clock_advances_even_if_the_wall_clock_goes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")
    put(store, "1", a=1)
    store.close()
    store = open_store(tmp_path / "ann.db")
    put(store, "1", NOW_MS - 86_400_000, a=2)
    clocks = [int(one["hlc"]) for one in bodies(store)]
    assert clocks == [NOW_MS << 16, (NOW_MS << 16) + 1]
    assert store.load_row("notes", "1") == {"a": 2}
    store.close()


@pytest.mark.rule("DE-8")
def test_hybrid_clock_advances_beyond_the_newest_seen_stamp(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")
    far = (NOW_MS + 10**9) << 16
    store.apply([delta(far, a="theirs")], 1, "e")
    store.stage([SnapshotRow("notes", "1", Row({}, NEVER, stamp(far + 5)))], is_first=True)
    store.close()
    store = open_store(tmp_path / "ann.db")
    put(store, "1", a="mine")
    assert int(bodies(store)[0]["hlc"]) == far + 6
    assert store.load_row("notes", "1") == {"a": "mine"}
    store.close()


def test_edit_after_the_last_clock_value_is_refused() -> None:
    store = open_store()
    store.apply([delta(HLC_MAX, a=1)], 1, "e")
    assert store.load_row("notes", "1") == {"a": 1}
    with pytest.raises(ClientError, match="has reached its maximum"):
        put(store, "1", a=2)


def test_edits_of_one_transaction_are_atomic() -> None:
    store = open_store()

    def edit_rows(edits: Edits) -> int:
        edits.put("notes", "1", {"a": 1})
        assert edits.row("notes", "1") == {"a": 1}
        edits.put("notes", "1", {"b": 2})
        edits.delete("notes", "2")
        edits.put("notes", "3", {})
        edits.put("notes", "4", {})
        edits.delete("notes", "4")
        return 7

    result, changes = store.transact(edit_rows, NOW_MS)
    assert result == 7
    assert [(one.row_id, one.before, one.after) for one in changes] == [("1", None, {"a": 1, "b": 2}), ("3", None, {})]
    assert store.sync_state.pending == 5
    captured: list[Edits] = []

    def edit_and_fail(edits: Edits) -> None:
        captured.append(edits)
        edits.put("notes", "1", {"a": 5})
        raise KeyError("of the application")

    before = store.sync_state
    with pytest.raises(KeyError):
        store.transact(edit_and_fail, NOW_MS)
    assert store.sync_state == before
    assert len(bodies(store)) == 5
    assert store.load_row("notes", "1") == {"a": 1, "b": 2}
    with pytest.raises(ClientError, match="the transaction has ended"):
        captured[0].put("notes", "1", {"a": 5})


def test_outbox_limits_are_enforced() -> None:
    store = open_store(outbox_deltas_max=2)
    put(store, "1", a=1)
    put(store, "2", a=1)
    with pytest.raises(LimitExceededError, match="outbox_deltas_max is 2"):
        put(store, "3", a=1)
    assert store.load_row("notes", "3") is None
    store.acknowledge(1, PushReply("e"))
    assert put(store, "3", a=1)
    small = open_store(outbox_bytes_max=500)
    put(small, "1", a=1)
    put(small, "2", a=1)
    with pytest.raises(LimitExceededError, match="outbox_bytes_max is 500"):
        put(small, "3", a=1)
    with pytest.raises(
        LimitExceededError, match=r"delta_bytes_max is 100, and the delta of the row '1' would have \d+ bytes$"
    ):
        put(open_store(delta_bytes_max=100), "1", a="x" * 100)


# --- the outbox


def test_pending_deltas_are_read_in_order_and_in_batches() -> None:
    store = open_store()
    for number in range(10):
        put(store, str(number), a=number)
    size = len(store.list_pending(None, 1, ALL)[0].body)
    assert [one.number for one in store.list_pending(None, 3, ALL)] == [1, 2, 3]
    assert [one.number for one in store.list_pending(None, ALL, 2 * size + 2)] == [1, 2]
    assert [one.number for one in store.list_pending(None, ALL, 1)] == [1]
    assert [one.number for one in store.list_pending(3, ALL, ALL)] == [1, 2]
    store.acknowledge(4, PushReply("e"))
    assert [one.number for one in store.list_pending(None, ALL, ALL)] == [5, 6, 7, 8, 9, 10]
    assert (store.sync_state.pending, store.sync_state.oldest_number) == (6, 5)
    store.acknowledge(10, PushReply("e"))
    assert (store.sync_state.pending, store.sync_state.oldest_number, store.sync_state.pending_bytes) == (0, 0, 0)
    put(store, "x")
    assert store.sync_state.newest_number == 11


def test_discarded_delta_requests_a_reset() -> None:
    store = open_store()
    made = put(store, "1", a=1)
    assert made is not None
    assert store.discard([bytes(32)]) == 0
    assert (store.sync_state.is_reset_wanted, store.sync_state.pending) == (False, 1)
    assert store.discard([bytes.fromhex(made), bytes(32)]) == 1
    assert (store.sync_state.is_reset_wanted, store.sync_state.pending) == (True, 0)
    assert store.load_row("notes", "1") == {"a": 1}


# --- from the gateway


def test_applied_deltas_are_merged_and_advance_the_cursor(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")
    put(store, "1", a="mine", b="mine")
    late = delta(1, a="late", c="late")
    changes = store.apply([late, delta((NOW_MS + 1) << 16, b="theirs"), delta(1, "2")], 3, "e")
    assert [(one.row_id, one.after, one.is_local) for one in changes] == [
        ("1", {"a": "mine", "b": "theirs", "c": "late"}, False),
        ("2", {}, False),
    ]
    assert store.apply([late], 4, "e") == []
    store.close()
    store = open_store(tmp_path / "ann.db")
    assert (store.sync_state.cursor, store.sync_state.epoch) == (4, "e")
    assert store.list_rows("notes", "", 10) == [
        LocalRow("1", {"a": "mine", "b": "theirs", "c": "late"}),
        LocalRow("2", {}),
    ]
    assert store.list_rows("notes", "1", 10) == [LocalRow("2", {})]
    assert store.list_rows("notes", "", 1)[0].row_id == "1"
    assert store.list_rows("others", "", 1) == []
    store.close()


def test_receiving_own_deltas_changes_nothing() -> None:
    store = open_store()
    put(store, "1", a=1)
    own = decode_delta(store.list_pending(None, 1, ALL)[0].body)
    assert store.apply([own], 1, "e") == []


@pytest.mark.rule("DE-12")
def test_snapshot_pages_are_merged_and_the_last_sets_the_cursor() -> None:
    store = open_store()
    put(store, "1", a="mine")
    high = (NOW_MS + 1) << 16
    theirs = Row({"a": (b'"old"', stamp(1)), "b": (b'"new"', stamp(high))}, stamp(high))
    changes = store.join([SnapshotRow("notes", "1", theirs)], None, "e")
    assert [(one.before, one.after) for one in changes] == [({"a": "mine"}, {"a": "mine", "b": "new"})]
    assert store.sync_state.cursor == 0
    gone = Row({}, stamp(1), stamp(high + 1))
    store.join([SnapshotRow("notes", "1", gone), SnapshotRow("notes", "2", gone)], 9, "e")
    assert store.load_row("notes", "1") is None
    assert store.sync_state.cursor == 9
    assert store.join([SnapshotRow("notes", "1", theirs)], 9, "e") == []
    assert store.apply([delta(high, "2", a="late")], 10, "e") == []


def test_reset_replaces_all_rows_and_applies_the_outbox() -> None:
    store = open_store()
    put(store, "1", a="pushed before")
    put(store, "5", a="of the other history")
    store.acknowledge(2, PushReply("old"))
    store.request_reset()
    put(store, "2", a="pending")
    put(store, "3", a="pushed meanwhile")
    store.acknowledge(4, PushReply("new"))
    put(store, "4", a="pending")
    theirs = Row({"a": (b'"theirs"', stamp(1)), "b": (b"1", stamp(1))}, stamp(1))
    store.stage([SnapshotRow("notes", "9", theirs)], is_first=True)
    store.stage([SnapshotRow("notes", "1", theirs), SnapshotRow("notes", "2", theirs)], is_first=True)
    store.stage([SnapshotRow("notes", "6", Row({}, NEVER, stamp(3)))], is_first=False)
    assert store.load_row("notes", "1") == {"a": "pushed before"}
    replaced = store.replace(7, "new", 10)
    assert {one.row_id: one.columns for one in store.list_rows("notes", "", 10)} == {
        "1": {"a": "theirs", "b": 1},
        "2": {"a": "pending", "b": 1},
        "3": {"a": "pushed meanwhile"},
        "4": {"a": "pending"},
    }
    assert replaced is not None
    assert sorted((one.row_id, one.after) for one in replaced if one.row_id != "2") == [
        ("1", {"a": "theirs", "b": 1}),
        ("5", None),
    ]
    standing = store.sync_state
    assert (standing.cursor, standing.epoch, standing.is_reset_wanted, standing.pending) == (7, "new", False, 1)
    rest = store._file.connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert rest == (1,)


@pytest.mark.rule("DE-8")
def test_fast_clock_is_corrected_when_its_deltas_are_discarded() -> None:
    store = open_store()
    year_ms = 365 * 24 * 3600 * 1000
    put(store, "1", NOW_MS + year_ms, a=1)
    (ahead,) = bodies(store)
    assert store.discard([bytes.fromhex(ahead["deltaId"])]) == 1
    store.stage([SnapshotRow("t", "2", Row({"a": (b"1", stamp(NOW_MS << 16))}, stamp(NOW_MS << 16)))], is_first=True)
    store.replace(1, "new", 10)
    put(store, "3", NOW_MS, a=1)
    (after,) = bodies(store)
    assert int(after["hlc"]) == (NOW_MS << 16) + 1


def test_clock_is_not_corrected_while_its_deltas_are_pending() -> None:
    store = open_store()
    put(store, "1", NOW_MS + 1000, a=1)
    store.request_reset()
    store.stage([], is_first=True)
    store.replace(0, "new", 10)
    put(store, "2", NOW_MS, a=1)
    first, second = bodies(store)
    assert int(second["hlc"]) == int(first["hlc"]) + 1


def test_reset_drops_deltas_acknowledged_in_an_earlier_history() -> None:
    store = open_store()
    store.request_reset()
    put(store, "1", a=1)
    store.acknowledge(1, PushReply("old"))
    store.stage([], is_first=True)
    assert store.replace(0, "new", 0) is None
    assert store.load_row("notes", "1") is None


def test_acknowledgement_is_accepted_in_the_known_or_a_continued_history() -> None:
    store = open_store()
    put(store, "1", a=1)
    assert store.acknowledge(1, PushReply("b", ("a",)))
    put(store, "2", a=1)
    for _ in range(3):  # unknown or earlier history
        assert not store.acknowledge(2, PushReply("a"))
        assert not store.acknowledge(2, PushReply("x", ("a",)))
    assert (store.sync_state.pending, store.sync_state.is_reset_wanted) == (1, False)
    assert store.acknowledge(2, PushReply("c", ("a", "b")))
    assert (store.sync_state.pending, store.sync_state.epoch) == (0, "b"), "the rows still belong to the known history"


# --- ownership and damage


def test_store_of_a_different_client_or_gateway_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    open_store(path).close()
    with pytest.raises(SettingsError, match="belongs to the client 'ann', not to 'bob'"):
        open_store(path, "bob")
    with pytest.raises(SettingsError, match="belongs to the gateway 'shop', not to 'store'"):
        open_store(path, gateway="store")
    open_store(path).close()


def test_store_is_opened_by_one_client_at_a_time(tmp_path: Path) -> None:
    path, link = tmp_path / "ann.db", tmp_path / "link.db"
    link.symlink_to(path)
    store = open_store(path)
    with pytest.raises(StoreInUseError, match="another deltas client"):
        open_store(link)
    store.close()
    with start_script(HERE / "deltas_lock_worker.py", path) as process:
        assert read_line(process) == "open"
        with pytest.raises(StoreInUseError):
            open_store(path)
    open_store(path).close()


def test_files_of_other_applications_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(NotALogError, match="not a deltas client file"):
        open_store(path)
    text = tmp_path / "text.db"
    text.write_text("hello" * 1000)
    with pytest.raises(NotALogError):
        open_store(text)
    with pytest.raises(StoreUnavailableError):
        open_store(tmp_path / "nowhere" / "ann.db")


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(NewerSchemaError):
        open_store(path)


def test_damaged_row_raises_corrupt_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")
    put(store, "1", a=1)
    store._file.connection.execute("UPDATE row_states SET state = x'ff'")
    with pytest.raises(CorruptError):
        store.load_row("notes", "1")
    with pytest.raises(CorruptError):
        put(store, "1", a=2)
    store.close()


def test_removed_store_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    store = open_store(path)
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="was removed or replaced"):
        put(store, "1", a=1)
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        store.load_row("notes", "1")


def test_only_changes_that_must_be_durable_are_synced(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ann.db")

    def mode() -> int:
        return int(store._file.connection.execute("PRAGMA synchronous").fetchone()[0])

    put(store, "1", a=1)
    assert mode() == 2
    store.acknowledge(1, PushReply("e"))
    assert mode() == 1
    store.request_reset()
    assert mode() == 2
    assert store._file.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()
