"""A client's store: a durable outbox, and one transaction for the cursor and the application's tables."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from client.events.model_server import entry_of
from deadlines import WAIT_S
from oncelog.client.events.outbox import Draft, prepare
from oncelog.client.events.store import SCHEMA, ClientStore, StoredClient
from oncelog.client.events.values import Committed, Event, Fault, OutboxEntry, Refused, SetAside, SettledEntry
from oncelog.errors import (
    CorruptError,
    NewerSchemaError,
    NotALogError,
    PartitionsChangedError,
    StoreInUseError,
    StoreUnavailableError,
)
from scripts import read_line, start_script

HERE = Path(__file__).parent
REJECTED = Refused("validation_failed", (Fault("event", "not so", 7),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "client.db"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., tuple[ClientStore, StoredClient]]]:
    """Return a function that closes the store and opens it again."""
    stores: list[ClientStore] = []

    def open_store(
        client_id: str | None = None, partitions: Sequence[str] = ("a",), reset: Any = None
    ) -> tuple[ClientStore, StoredClient]:
        for store in stores:
            store.close()
        stores.append(ClientStore(path))
        return stores[-1], stores[-1].open(client_id, partitions, reset)

    yield open_store
    for store in stores:
        store.close()


Opened = Callable[..., tuple[ClientStore, StoredClient]]


def prepare_entry(number: int, **members: Any) -> OutboxEntry:
    return prepare(Draft({"type": "t", "number": number, **members}, None, entry_of(number).id), ["a"], 10**6)


def accept(store: ClientStore, *numbers: int) -> list[OutboxEntry]:
    entries = store.assign_numbers([prepare_entry(number) for number in numbers])
    store.save_outbox(entries, [], [], 1)
    return entries


def event(number: int, kind: str = "noted") -> Event:
    return Event(entry_of(number).id, "other", ("a",), number, {"type": kind, "number": number}, 5000 + number)


def hand_over(store: ClientStore, events: Sequence[Event], apply: Any = None, failed: Sequence[SetAside] = ()) -> int:
    return store.save_delivery(events, events[-1].committed_id, "e1", apply, failed)


def rows(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def apply_events(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    """Apply events like an application, and fail for events of type `bad`."""
    connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER PRIMARY KEY)")
    for one in events:
        connection.execute("INSERT INTO made VALUES (?)", (one.committed_id,))
        if one.type == "bad":
            raise ValueError(f"no room for {one.committed_id}")


MADE = "SELECT number FROM made ORDER BY number"
CURSOR = "SELECT cursor, epoch FROM oncelog_client_state"


# --- the outbox ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-17")
def test_outbox_is_loaded_in_order(open_store: Opened) -> None:
    store, stored = open_store("laptop")
    assert stored == StoredClient("laptop", 0, "", [], 0, 0)
    entries = accept(store, 9, 3) + accept(store, 5)
    assert [one.number for one in entries] == [1, 2, 3]
    _, stored = open_store()
    assert stored.outbox == entries
    assert stored.client_id == "laptop"


def test_expected_committed_id_is_stored(open_store: Opened) -> None:
    store, _ = open_store()
    entries = store.assign_numbers([structs.replace(prepare_entry(1), expected_committed_id=0)])
    store.save_outbox(entries, [], [], 1)
    assert open_store()[1].outbox[0].expected_committed_id == 0


def test_generated_client_id_is_kept_until_one_is_given(open_store: Opened) -> None:
    _, first = open_store()
    _, again = open_store()
    assert first.client_id == again.client_id
    assert first.client_id.startswith("client-")
    assert open_store("tablet")[1].client_id == "tablet"
    assert open_store()[1].client_id == "tablet"


def test_settled_entries_leave_the_outbox_and_rejections_remain_until_forgotten(open_store: Opened) -> None:
    store, _ = open_store()
    first, second, third = accept(store, 1, 2, 3)
    store.save_outbox([], [], [SettledEntry(first, Committed(1, 2)), SettledEntry(third, REJECTED)], 77)
    store, stored = open_store()
    assert stored.outbox == [second]
    assert stored.refused == 1
    (rejection,) = store.load_refused()
    assert (rejection.id, rejection.partitions, rejection.outcome) == (third.id, ("a",), REJECTED)
    assert rejection.event == {"type": "t", "number": 3}
    assert rejection.rejected_at_ms == 77
    assert store.save_outbox([], ["00000000-0000-0000-0000-00000000ffff"], [], 1) == 0
    assert store.save_outbox([], [third.id], [], 1) == -1
    assert open_store()[1].refused == 0


def test_several_refused_events_can_be_forgotten_together(open_store: Opened) -> None:
    store, _ = open_store()
    entries = accept(store, 1, 2)
    store.save_outbox([], [], [SettledEntry(one, REJECTED) for one in entries], 1)
    assert [one.id for one in store.load_refused()] == [one.id for one in entries]
    assert store.save_outbox([], [one.id for one in entries], [], 1) == -2
    assert store.load_refused() == []


def test_outbox_numbers_are_never_reused(open_store: Opened) -> None:
    store, _ = open_store()
    entries = accept(store, 1, 2)
    store.save_outbox([], [], [SettledEntry(entries[0], Committed(1, 2)), SettledEntry(entries[1], REJECTED)], 1)
    store, _ = open_store()
    (third,) = accept(store, 3)
    assert third.number == 3
    store.save_outbox([], [], [SettledEntry(third, Committed(3, 3))], 1)
    store, _ = open_store()
    store.save_outbox([], [entries[1].id], [], 1)
    assert accept(store, 4)[0].number == 4


def test_outbox_write_is_atomic(open_store: Opened) -> None:
    store, _ = open_store()
    (first,) = accept(store, 1)
    (same,) = store.assign_numbers([prepare_entry(1)])
    with pytest.raises(sqlite3.IntegrityError):
        store.save_outbox(
            [*store.assign_numbers([prepare_entry(2)]), same], [], [SettledEntry(first, Committed(1, 1))], 1
        )
    assert open_store()[1].outbox == [first]


@pytest.mark.rule("EV-17")
def test_killed_process_keeps_all_accepted_submissions(path: Path) -> None:
    reported: list[str] = []
    for round_ in range(3):
        with start_script(HERE / "submit_worker.py", path) as process:
            reported += [read_line(process) for _ in range(20 + 15 * round_)]
            process.kill()
            assert process.stdout is not None
            rest = process.stdout.read().split("\n")
        reported += [one for one in rest[:-1] if len(one) == 36]
    store = ClientStore(path)
    stored = store.open(None, ["a"], None)
    store.close()
    ids = [one.id for one in stored.outbox]
    assert len(set(ids)) == len(ids)
    assert len(reported) >= 20 + 35 + 50
    assert [one for one in ids if one in set(reported)] == reported, "every reported submission is stored, in order"


# --- delivery ------------------------------------------------------------------------------------------


def test_cursor_and_applied_rows_are_saved_together(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    assert hand_over(store, [event(1), event(4)], apply_events) == -1
    assert rows(path, MADE) == [(1,), (4,)]
    assert rows(path, CURSOR) == [(4, "e1")]
    _, stored = open_store()
    assert (stored.cursor, stored.epoch, stored.set_aside) == (4, "e1", 0)


def test_only_the_failing_event_is_set_aside(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    assert hand_over(store, [event(1), event(2, "bad"), event(3)], apply_events) == 1
    assert rows(path, MADE) == [(1,), (3,)]
    assert rows(path, CURSOR) == [(3, "e1")]
    store, stored = open_store()
    assert stored.set_aside == 1
    assert store.load_set_aside() == [SetAside("apply", event(2, "bad"), "ValueError: no room for 2")]


def test_set_aside_event_can_be_applied_again(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    hand_over(store, [event(2, "bad")], apply_events)
    (aside,) = store.load_set_aside()
    assert store.redeliver(aside, apply_events) == "ValueError: no room for 2"
    assert store.load_set_aside() == [aside]

    def apply_fixed(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE made (number INTEGER PRIMARY KEY)")
    connection.close()
    assert store.redeliver(aside, apply_fixed) is None
    assert store.load_set_aside() == []
    assert rows(path, MADE) == [(2,)]
    assert rows(path, CURSOR) == [(2, "e1")]


def test_events_set_aside_for_handlers_are_kept_in_order(open_store: Opened) -> None:
    store, _ = open_store()
    failed = [SetAside("b", event(2), "E: x"), SetAside("a", event(2), "E: y"), SetAside("a", event(1), "E: z")]
    assert hand_over(store, [event(1), event(2)], None, failed) == 3
    assert [(one.handler, one.event.committed_id) for one in store.load_set_aside()] == [("a", 1), ("a", 2), ("b", 2)]
    assert store.redeliver(store.load_set_aside()[0], None) is None
    assert open_store()[1].set_aside == 2


def _commit(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
    connection.execute("CREATE TABLE made (number INTEGER PRIMARY KEY)")
    connection.commit()


def _roll_back(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
    connection.rollback()


def _commit_and_fail(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
    connection.execute("COMMIT")
    raise ValueError("and more")


def _begin_another(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
    connection.execute("COMMIT")
    connection.execute("BEGIN")


@pytest.mark.parametrize("apply", [_commit, _roll_back, _commit_and_fail, _begin_another])
def test_apply_must_not_end_the_transaction(open_store: Opened, path: Path, apply: Any) -> None:
    store, _ = open_store()
    with pytest.raises((RuntimeError, sqlite3.OperationalError), match=r"transaction|no such savepoint"):
        hand_over(store, [event(1)], apply)
    assert rows(path, CURSOR) == [(0, "")], "the cursor is unchanged"
    assert hand_over(store, [event(1)]) == -1, "the store is still usable"


def test_event_is_set_aside_even_if_the_error_has_no_text(open_store: Opened) -> None:
    class WordlessError(Exception):
        def __str__(self) -> str:
            raise ValueError("none")

    def fail(_connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
        raise WordlessError

    store, _ = open_store()
    assert hand_over(store, [event(1)], fail) == 1
    assert store.load_set_aside()[0].error == "WordlessError"


def test_locked_application_database_in_apply_sets_the_event_aside(open_store: Opened, path: Path) -> None:
    other = path.with_name("other.db")
    holder = sqlite3.connect(other, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    def lock_another_database(_connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
        connection = sqlite3.connect(other, timeout=0)
        try:
            connection.execute("CREATE TABLE t (x)")
        finally:
            connection.close()

    store, _ = open_store()
    assert hand_over(store, [event(1)], lock_another_database) == 1
    holder.execute("ROLLBACK")
    holder.close()
    (aside,) = store.load_set_aside()
    assert "locked" in aside.error
    assert store.redeliver(aside, lock_another_database) is None
    assert store.load_set_aside() == []


def test_erased_event_can_be_set_aside(open_store: Opened) -> None:
    erased = Event(entry_of(1).id, "other", ("a",), 1, None, 5, erased=True)
    store, _ = open_store()
    hand_over(store, [erased], None, [SetAside("h", erased, "E")])
    assert store.load_set_aside()[0].event == erased


# --- opening ---------------------------------------------------------------------------------------------------


def test_store_is_opened_by_one_client_at_a_time(open_store: Opened, path: Path, tmp_path: Path) -> None:
    open_store()
    link = tmp_path / "link.db"
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(StoreInUseError, match="another client"):
            ClientStore(name).open(None, ["a"], None)
    _, stored = open_store()
    assert stored.cursor == 0, "the store can be opened again"


def test_store_is_opened_by_one_process_at_a_time(path: Path) -> None:
    with start_script(HERE / "store_holder_worker.py", path) as process:
        assert read_line(process) == "open"
        with pytest.raises(StoreInUseError):
            ClientStore(path).open(None, ["a"], None)
    store = ClientStore(path)
    store.open(None, ["a"], None)
    store.close()


def test_stores_in_memory_are_separate() -> None:
    first, second = ClientStore(":memory:"), ClientStore(":memory:")
    first.open(None, ["a"], None)
    second.open(None, ["b"], None)
    accept(first, 1)
    first.close()
    second.close()


def test_changed_partitions_without_reset_are_refused(open_store: Opened) -> None:
    store, _ = open_store()
    hand_over(store, [event(3)])
    (entry,) = accept(store, 1)
    with pytest.raises(PartitionsChangedError, match=r"\['a'\]") as caught:
        open_store(partitions=("a", "b"))
    assert caught.value.partitions == ("a",)
    _, stored = open_store()
    assert (stored.cursor, stored.outbox) == (3, [entry]), "nothing was changed"


def test_reset_for_changed_partitions_is_one_transaction(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    hand_over(store, [event(1), event(3, "bad")], apply_events)
    (entry,) = accept(store, 1)

    def fail_reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made")
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        open_store(partitions=("b",), reset=fail_reset)
    assert rows(path, MADE) == [(1,)]
    assert rows(path, CURSOR) == [(3, "e1")]

    def reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made")

    _, stored = open_store(partitions=("b",), reset=reset)
    assert (stored.cursor, stored.epoch, stored.set_aside, stored.outbox) == (0, "", 0, [entry])
    assert rows(path, MADE) == []
    assert open_store(partitions=("b",))[1].cursor == 0, "the reset is stored"


def test_start_over_is_one_transaction(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    hand_over(store, [event(1), event(3, "bad")], apply_events)

    def fail_reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made")
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        store.start_over(("a",), 0, "e2", fail_reset)
    assert rows(path, MADE) == [(1,)]
    assert len(store.load_set_aside()) == 1
    store.start_over(("a",), 2, "e2", None)
    assert store.load_set_aside() == []
    assert rows(path, CURSOR) == [(2, "e2")]


def test_newer_schema_is_refused_and_left_unchanged(open_store: Opened, path: Path) -> None:
    store, _ = open_store("laptop")
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE oncelog_client_state SET schema_version = ?", (SCHEMA.version + 1,))
    connection.commit()
    connection.close()
    with pytest.raises(NewerSchemaError, match="newer version"):
        open_store("tablet")
    assert rows(path, "SELECT client_id FROM oncelog_client_state") == [("laptop",)]


def test_file_that_is_not_a_database_is_refused_and_left_unchanged(path: Path) -> None:
    path.write_bytes(b"a letter to my aunt, which is longer than a header of SQLite's" * 100)
    before = path.read_bytes()
    with pytest.raises(NotALogError, match="not an SQLite database"):
        ClientStore(path).open(None, ["a"], None)
    assert path.read_bytes() == before


def test_damaged_row_raises_corrupt_error(open_store: Opened, path: Path) -> None:
    store, _ = open_store()
    accept(store, 1)
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE oncelog_client_outbox SET partitions = '{}'")
    connection.commit()
    connection.close()
    with pytest.raises(CorruptError, match="damaged"):
        open_store()


def test_path_that_cannot_be_opened_raises_store_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="No such file"):
        ClientStore(tmp_path / "nowhere" / "client.db").open(None, ["a"], None)
    directory = tmp_path / "directory"
    directory.mkdir()
    with pytest.raises(StoreUnavailableError):
        ClientStore(directory).open(None, ["a"], None)


def test_closed_store_raises_store_unavailable(open_store: Opened) -> None:
    store, _ = open_store()
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.load_refused()


def test_tables_of_the_application_are_unchanged(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE todo (text TEXT)")
    connection.execute("INSERT INTO todo VALUES ('milk')")
    connection.commit()
    connection.close()
    store = ClientStore(path)
    store.open(None, ["a"], None)
    store.close()
    assert rows(path, "SELECT text FROM todo") == [("milk",)]


@pytest.mark.rule("EV-17")
def test_full_disk_is_reported_and_loses_no_accepted_submission(path: Path) -> None:
    with start_script(HERE / "full_disk_worker.py", path) as process:
        said, _ = process.communicate(timeout=WAIT_S)
    raised, taken, pending, was_reported, is_still_reported = said.split()
    assert raised == "StoreUnavailableError"
    assert int(taken) > 1
    assert int(pending) == int(taken) + 1
    assert (was_reported, is_still_reported) == ("True", "False")
    store = ClientStore(path)
    stored = store.open(None, ["a"], None)
    store.close()
    assert len(stored.outbox) == int(taken) + 1
