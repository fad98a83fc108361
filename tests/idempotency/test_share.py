"""A function's rows and its stored result commit in one SQLite transaction."""

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

import oncelog
from cli import server_process as processes
from oncelog import (
    FOREVER,
    ConflictError,
    InFlightError,
    NotALogError,
    PolicyError,
    ResultErasedError,
    ResultError,
    SettingsError,
    StoreUnavailableError,
    TransactionError,
    once,
    share,
    work_of,
)
from oncelog.storage.sqlite import transaction
from oncelog.storage.sqlite.borrowed_transaction import BorrowedTransaction
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION
from oncelog.testing.clock import ManualClock
from storage.sqlite.writers import make_older

DAY_MS: Final = 86_400_000


class OverdrawnError(Exception):
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with oncelog.open_blocking(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER)")
        connection.execute("INSERT INTO accounts VALUES ('ada', 100), ('bob', 0)")
        connection.commit()
    return path


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection


def transfer_on(connection: sqlite3.Connection, **options: Any) -> Callable[[str, int], int]:
    """Return a function that transfers money once per key."""
    log = share(connection, **({"clock": options.pop("clock")} if "clock" in options else {}))

    @once(log, key=lambda key, _: key, name="transfer", remember=[OverdrawnError], **options)
    def transfer(key: str, cents: int) -> int:
        connection.execute("UPDATE accounts SET cents = cents + ? WHERE name = 'bob'", (cents,))
        connection.execute("UPDATE accounts SET cents = cents - ? WHERE name = 'ada'", (cents,))
        (left,) = connection.execute("SELECT cents FROM accounts WHERE name = 'ada'").fetchone()
        if left < 0:
            raise OverdrawnError(key)
        if cents == 13:
            raise KeyError(key)
        return int(left)

    return transfer


def balances(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT name, cents FROM accounts"))


@pytest.mark.rule("RU-12")
class TestOneTransaction:
    def test_repeated_call_changes_nothing_and_returns_the_same_result(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        transfer = transfer_on(connection)
        assert [transfer("a", 30), transfer("a", 30), transfer("b", 30)] == [70, 70, 40]
        assert balances(path) == {"ada": 40, "bob": 60}
        with closing(sqlite3.connect(path)) as other:
            assert transfer_on(other)("a", 30) == 70
        assert not connection.in_transaction

    def test_exception_rolls_back_rows_and_result(self, path: Path, connection: sqlite3.Connection) -> None:
        transfer = transfer_on(connection)
        for _ in range(2):
            with pytest.raises(KeyError):
                transfer("a", 13)
        assert balances(path) == {"ada": 100, "bob": 0}
        assert not connection.in_transaction

    def test_listed_exception_is_stored_and_its_rows_are_rolled_back(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        transfer = transfer_on(connection)
        with pytest.raises(OverdrawnError):
            transfer("a", 1000)
        connection.execute("UPDATE accounts SET cents = 5000 WHERE name = 'ada'")
        connection.commit()
        with pytest.raises(OverdrawnError):
            transfer("a", 1000)  # raises the stored error, although the balance is now sufficient
        assert balances(path) == {"ada": 5000, "bob": 0}

    def test_invalid_result_rolls_back_the_rows(self, path: Path, connection: sqlite3.Connection) -> None:
        @once(share(connection), name="odd", result=int)
        def return_wrong_type() -> Any:
            connection.execute("DELETE FROM accounts")
            return "text"

        with pytest.raises(ResultError):
            return_wrong_type()
        assert balances(path) == {"ada": 100, "bob": 0}

    @pytest.mark.parametrize("how", ["commit", "with", "COMMIT", "ROLLBACK", "swallowed", "script"])
    def test_function_cannot_end_the_transaction(self, path: Path, connection: sqlite3.Connection, how: str) -> None:
        connection.execute(
            "COMMIT" if connection.in_transaction else "SELECT 1"
        )  # adds the statement to the cache of the connection

        def end() -> None:
            if how == "commit":
                connection.commit()
            elif how == "with":
                with connection:
                    connection.execute("UPDATE accounts SET cents = 0")
            elif how == "script":
                connection.executescript("UPDATE accounts SET cents = 1")
            elif how == "swallowed":
                with pytest.raises(sqlite3.DatabaseError):
                    connection.commit()
            else:
                connection.execute(how)

        @once(share(connection), name="ending")
        def end_transaction() -> int:
            connection.execute("DELETE FROM accounts")
            end()
            return 1

        with pytest.raises(TransactionError, match="must not end"):
            end_transaction()
        assert not connection.in_transaction
        assert balances(path) == {"ada": 100, "bob": 0}
        connection.execute("UPDATE accounts SET cents = 7")
        connection.commit()  # The connection works normally again.
        assert balances(path) == {"ada": 7, "bob": 7}

    @pytest.mark.parametrize("isolation_level", [None, ""])
    @pytest.mark.parametrize("goes_on", [False, True])
    def test_automatic_rollback_of_sqlite_stores_nothing(self, path: Path, isolation_level: Any, goes_on: bool) -> None:
        """The authorizer does not observe this rollback, because no ROLLBACK statement runs."""
        with closing(sqlite3.connect(path, isolation_level=isolation_level)) as connection:

            @once(share(connection), name="rolling", remember=[sqlite3.IntegrityError])
            def roll_back() -> int:
                connection.execute("UPDATE accounts SET cents = 1")
                try:
                    connection.execute("INSERT OR ROLLBACK INTO accounts VALUES ('ada', 1)")
                except sqlite3.IntegrityError:
                    if not goes_on:
                        raise
                connection.execute("INSERT INTO accounts VALUES ('eve', 1000000)")
                return 1

            for _ in range(2):
                with pytest.raises(TransactionError, match="rolled"):
                    roll_back()
                assert not connection.in_transaction
        assert balances(path) == {"ada": 100, "bob": 0}
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT count(*) FROM oncelog_records").fetchone() == (0,)

    def test_function_may_use_savepoints(self, path: Path, connection: sqlite3.Connection) -> None:
        @once(share(connection), name="careful")
        def use_savepoints() -> int:
            connection.execute("UPDATE accounts SET cents = cents + 1")
            connection.execute("SAVEPOINT mine")
            connection.execute("DELETE FROM accounts")
            connection.execute("ROLLBACK TO mine")
            connection.execute("RELEASE mine")
            return 1

        assert use_savepoints() == use_savepoints() == 1
        assert balances(path) == {"ada": 101, "bob": 1}

    def test_open_transaction_is_refused(self, connection: sqlite3.Connection) -> None:
        transfer = transfer_on(connection)
        connection.execute("UPDATE accounts SET cents = 50")
        with pytest.raises(TransactionError, match="open"):
            transfer("a", 1)
        assert connection.in_transaction
        connection.rollback()
        assert transfer("a", 1) == 99

    def test_nested_call_on_one_connection_is_refused(self, path: Path, connection: sqlite3.Connection) -> None:
        transfer = transfer_on(connection)

        @once(share(connection), name="outer")
        def outer() -> int:
            return transfer("a", 1)

        with pytest.raises(TransactionError, match="open"):
            outer()
        assert balances(path) == {"ada": 100, "bob": 0}


class TestSharedFileWithLog:
    async def test_log_reads_records_committed_by_a_shared_connection(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        async with oncelog.open(path) as log:
            transfer = transfer_on(connection)
            work = work_of(transfer, "a", 30)
            assert transfer("a", 30) == 70
            async with log.follow(stream=work.scope) as records:
                record = await anext(aiter(records))
                assert (record.key, record.sequence) == (b"a", 1)
                transfer("b", 30)
                assert (await anext(aiter(records))).key == b"b"
            assert (await log.lookup(b"a", policy=work.policy, scope=work.scope)).record == record

    def test_shared_and_leased_calls_of_one_function_run_it_once(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        times = []

        def work(number: int) -> int:
            times.append(number)
            return number

        with oncelog.open_blocking(path) as log:
            shared, leased = once(share(connection), name="work")(work), once(log, name="work")(work)
            for number in range(50):
                pair = (shared, leased) if number % 2 else (leased, shared)
                assert [one(number) for one in pair] == [number, number]
        assert times == list(range(50))

    async def test_leased_call_in_flight_raises_in_flight_error_for_a_shared_call(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        async with oncelog.open(path) as log:
            inside, go_on = asyncio.Event(), asyncio.Event()

            @once(log, name="work")
            async def call_leased() -> int:
                inside.set()
                await go_on.wait()
                return 1

            @once(share(connection), name="work")
            def call_shared() -> int:
                return 2

            first = asyncio.create_task(call_leased())
            await inside.wait()
            with pytest.raises(InFlightError):
                call_shared()
            go_on.set()
            assert await first == call_shared() == 1

    def test_shared_calls_respect_conflicts_erasures_and_retention(
        self, path: Path, connection: sqlite3.Connection
    ) -> None:
        clock = ManualClock()
        transfer = transfer_on(connection, clock=clock)
        assert transfer("a", 30) == 70
        with pytest.raises(ConflictError):
            transfer("a", 31)
        clock.advance(DAY_MS // 2)
        with oncelog.open_blocking(path, clock=clock) as log:
            log.confirm_clock()
            work = work_of(transfer, "a", 30)
            assert transfer("a", 30) == 70
            log.erase(key=work.key, policy=work.policy, scope=work.scope)
            with pytest.raises(ResultErasedError):
                transfer("a", 30)
            clock.advance(DAY_MS // 2)
            log.confirm_clock()
        assert transfer("a", 30) == 40  # expired
        with pytest.raises(PolicyError):
            transfer_on(connection, retention=FOREVER)("a", 30)

    @pytest.mark.parametrize(
        "filtered_keys_max", [transaction.IMMEDIATE_FILL_KEYS_MAX, -1], ids=["filter", "too many for one"]
    )
    def test_key_index_follows_segments_of_other_connections(
        self, path: Path, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, filtered_keys_max: int
    ) -> None:
        """A shared connection's key index seals segments, and follows those that other connections seal and merge."""
        monkeypatch.setattr(transaction, "IMMEDIATE_FILL_KEYS_MAX", filtered_keys_max)
        calls = []
        log = share(connection)

        @once(log, name="work")
        def work(number: int) -> int:
            calls.append(number)
            return number

        shared = log._borrowed._shared_file.transaction
        shared.options = shared.options._replace(seal_keys=20)
        for number in range(150):
            assert work(number) == number
            if number % 40 == 0:
                with oncelog.open_blocking(path) as own:
                    own.submit_many([_event(number * 100 + one) for one in range(30)])
        for number in range(150):
            assert work(number) == number
        assert calls == list(range(150))
        index = log._borrowed._shared_file.transaction.index
        assert index is not None
        assert index.has_filter is (filtered_keys_max > 0)
        assert index._unfiltered == []  # The list would otherwise grow without limit.
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT count(*) FROM oncelog_key_segments").fetchone()[0] > 0
        assert processes.oncelog("verify", str(path)).returncode == 0


def _event(number: int) -> oncelog.Submission:
    return oncelog.event(f"00000000-0000-4000-8000-{number:012}", {"type": "x"}, ["p"])


class TestConnections:
    def test_connection_may_have_a_row_factory(self, connection: sqlite3.Connection) -> None:
        connection.row_factory = lambda cursor, row: dict(zip([one[0] for one in cursor.description], row, strict=True))

        @once(share(connection), name="work")
        def work() -> int:
            row = connection.execute("SELECT cents FROM accounts WHERE name = 'ada'").fetchone()
            return int(row["cents"])

        assert work() == work() == 100

    @pytest.mark.parametrize("isolation_level", [None, "DEFERRED", "EXCLUSIVE"])
    def test_connection_may_have_any_isolation_level(self, path: Path, isolation_level: Any) -> None:
        with closing(sqlite3.connect(path, isolation_level=isolation_level)) as connection:
            transfer = transfer_on(connection)
            assert [transfer("a", 30), transfer("a", 30)] == [70, 70]
        assert balances(path) == {"ada": 70, "bob": 30}

    def test_older_file_is_upgraded(self, path: Path) -> None:
        make_older(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("BEGIN")
            with pytest.raises(TransactionError):
                share(connection)
            connection.rollback()
            transfer = transfer_on(connection)
            for number in range(20):  # often enough for a complete expiry pass
                assert [transfer(f"{number}", 1), transfer(f"{number}", 1)] == [99 - number] * 2
            found = connection.execute("SELECT schema_version FROM oncelog_log").fetchone()
        assert found == (SCHEMA_VERSION,)
        assert balances(path) == {"ada": 80, "bob": 20}

    def test_threads_with_separate_connections_run_each_key_once(self, path: Path) -> None:
        left: list[int] = []
        errors: list[BaseException] = []

        def caller(number: int) -> None:
            try:
                with closing(sqlite3.connect(path, timeout=600)) as connection:
                    transfer = transfer_on(connection)
                    left.extend(transfer(f"{number % 2} {step}", 1) for step in range(10))
            except BaseException as error:  # noqa: BLE001 - the test reports it
                errors.append(error)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert balances(path) == {"ada": 80, "bob": 20}
        assert sorted(set(left)) == list(range(80, 100))

    def test_database_without_log_is_refused(self, tmp_path: Path) -> None:
        with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(NotALogError):
            share(connection)
        with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
            connection.execute("CREATE TABLE t (x)")
            with pytest.raises(NotALogError):
                share(connection)
        with pytest.raises(TypeError, match="sqlite3"):
            share("app.db")

    def test_connection_without_full_sync_is_refused(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous = NORMAL")
        with pytest.raises(SettingsError, match="synchronous"):
            share(connection)

    def test_call_is_refused_after_sync_is_turned_off(self, path: Path, connection: sqlite3.Connection) -> None:
        transfer = transfer_on(connection)
        connection.execute("PRAGMA synchronous = OFF")
        with pytest.raises(SettingsError, match="synchronous"):
            transfer("a", 30)
        assert balances(path) == {"ada": 100, "bob": 0}

    def test_call_is_refused_after_the_file_was_moved(self, path: Path, connection: sqlite3.Connection) -> None:
        transfer = transfer_on(connection)
        path.rename(path.with_name("moved.db"))
        with pytest.raises(StoreUnavailableError, match="removed or replaced"):
            transfer("a", 30)

    def test_key_index_of_a_replaced_file_is_not_used(self, tmp_path: Path) -> None:
        """A template copied over the file keeps name, inode and epoch, as in users' test suites."""
        template, path = tmp_path / "template.db", tmp_path / "copy.db"
        with oncelog.open_blocking(template):
            pass
        ran = []

        def call(key: str) -> None:
            with closing(sqlite3.connect(path)) as connection:

                @once(share(connection), name="work")
                def work(key: str) -> int:
                    ran.append(key)
                    return 1

                work(key)

        shutil.copyfile(template, path)
        for key in "abc":
            call(key)
        shutil.copyfile(template, path)
        with oncelog.open_blocking(path) as log:
            for key in "uvwxyz":

                @once(log, name="work")
                def work(key: str) -> int:
                    ran.append(key)
                    return 1

                work(key)
        for key in "uvwxyz":
            call(key)
        assert "".join(ran) == "abcuvwxyz"

    def test_wait_for_another_thread_ends_with_the_timeout_of_the_connection(self, path: Path) -> None:
        holds, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with closing(sqlite3.connect(path)) as connection, share(connection)._borrowed.transaction():
                holds.set()
                go_on.wait()

        with closing(sqlite3.connect(path, timeout=0.001)) as connection:
            transfer = transfer_on(connection)
            holder = threading.Thread(target=hold)
            holder.start()
            holds.wait()
            with pytest.raises(StoreUnavailableError, match="another thread"):
                transfer("a", 30)
            go_on.set()
            holder.join()
            assert transfer("a", 30) == 70

    def test_interrupt_right_after_locking_releases_the_lock(
        self, path: Path, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transfer = transfer_on(connection)

        def interrupt(self: BorrowedTransaction) -> None:
            self._shared_file.lock.acquire()
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(BorrowedTransaction, "_acquire_lock", interrupt)
            with pytest.raises(KeyboardInterrupt):
                transfer("a", 30)
        left: list[int] = []

        def call() -> None:
            with closing(sqlite3.connect(path, timeout=0.001)) as other:
                left.append(transfer_on(other)("a", 30))

        elsewhere = threading.Thread(target=call)
        elsewhere.start()
        elsewhere.join()
        assert left == [70]

    def test_connection_with_a_text_factory_is_refused(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = bytes
        with pytest.raises(SettingsError, match="text_factory"):
            share(connection)

    def test_locked_database_raises_store_unavailable(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as holder, closing(sqlite3.connect(path, timeout=0)) as connection:
            transfer = transfer_on(connection)
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="locked"):
                transfer("a", 30)
            holder.rollback()
            assert transfer("a", 30) == 70

    def test_async_function_is_refused(self, connection: sqlite3.Connection) -> None:
        async def work() -> int:
            return 1

        with pytest.raises(TypeError, match="async"):
            once(share(connection), name="work")(work)
