"""With `share` and an asyncpg connection, the caller's rows and the stored result commit in one transaction."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import asyncpg
import pytest

import oncelog
from oncelog import (
    ConflictError,
    InFlightError,
    NotALogError,
    ResultError,
    SettingsError,
    StoreUnavailableError,
    TransactionError,
    once,
    share,
)
from oncelog.storage.postgres import borrowed_transaction
from oncelog.storage.postgres.statements import SQL
from oncelog.testing.postgres_proxy import PostgresProxy

SHORT: Final = "2s"
"""Idle limit of a session that a test blocks. It is much longer than the time between two statements."""


class OverdrawnError(Exception):
    pass


def transfer_on(connection: Any, **options: Any) -> Callable[[str, int], Awaitable[int]]:
    @once(share(connection), key=lambda key, _: key, name="transfer", remember=[OverdrawnError], **options)
    async def transfer(key: str, cents: int) -> int:
        await connection.execute("UPDATE accounts SET cents = cents + $1 WHERE name = 'bob'", cents)
        await connection.execute("UPDATE accounts SET cents = cents - $1 WHERE name = 'ada'", cents)
        left = int(await connection.fetchval("SELECT cents FROM accounts WHERE name = 'ada'"))
        if left < 0:
            raise OverdrawnError(key)
        if cents == 13:
            raise KeyError(key)
        return left

    return transfer


@pytest.fixture
async def accounts(database: str) -> str:
    """Address of a database with a log and an application table."""
    async with oncelog.open(database), connect_to(database) as connection:
        await connection.execute("CREATE TABLE accounts (name text PRIMARY KEY, cents bigint NOT NULL)")
        await connection.execute("INSERT INTO accounts VALUES ('ada', 100), ('bob', 0)")
    return database


@pytest.fixture
async def connection(accounts: str) -> AsyncIterator[Any]:
    async with connect_to(accounts) as connection:
        yield connection


@asynccontextmanager
async def connect_to(address: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(address)
    try:
        yield connection
    finally:
        await connection.close()


async def balances(address: str) -> dict[str, int]:
    async with connect_to(address) as connection:
        return dict([tuple(row) for row in await connection.fetch("SELECT name, cents FROM accounts")])


@pytest.mark.rule("RU-12")
class TestOneTransaction:
    async def test_repeated_call_changes_nothing_and_returns_the_same_result(
        self, accounts: str, connection: Any
    ) -> None:
        transfer = transfer_on(connection)
        assert [await transfer("a", 30), await transfer("a", 30), await transfer("b", 30)] == [70, 70, 40]
        async with connect_to(accounts) as other:
            assert await transfer_on(other)("a", 30) == 70
        assert await balances(accounts) == {"ada": 40, "bob": 60}
        assert not connection.is_in_transaction()
        with pytest.raises(ConflictError):
            await transfer("a", 31)
        assert await connection.fetchval("SELECT count(*) FROM oncelog_shared") == 0

    async def test_exception_rolls_back_rows_and_result(self, accounts: str, connection: Any) -> None:
        transfer = transfer_on(connection)
        for _ in range(2):
            with pytest.raises(KeyError):
                await transfer("a", 13)
        assert await balances(accounts) == {"ada": 100, "bob": 0}
        assert not connection.is_in_transaction()

    async def test_listed_exception_is_stored_and_its_rows_are_rolled_back(
        self, accounts: str, connection: Any
    ) -> None:
        transfer = transfer_on(connection)
        with pytest.raises(OverdrawnError):
            await transfer("a", 1000)
        await connection.execute("UPDATE accounts SET cents = 5000 WHERE name = 'ada'")
        with pytest.raises(OverdrawnError):
            await transfer("a", 1000)  # raises the stored error, although the balance is now sufficient
        assert await balances(accounts) == {"ada": 5000, "bob": 0}

    async def test_invalid_result_rolls_back_the_rows(self, accounts: str, connection: Any) -> None:
        @once(share(connection), name="odd", result=int)
        async def return_wrong_type() -> Any:
            await connection.execute("DELETE FROM accounts")
            return "text"

        with pytest.raises(ResultError):
            await return_wrong_type()
        assert await balances(accounts) == {"ada": 100, "bob": 0}

    async def test_failed_statement_rolls_back_the_others(self, accounts: str, connection: Any) -> None:
        @once(share(connection), name="odd")
        async def divide_by_zero() -> None:
            await connection.execute("DELETE FROM accounts")
            await connection.execute("SELECT 1 / 0")

        with pytest.raises(asyncpg.DivisionByZeroError):
            await divide_by_zero()
        assert await balances(accounts) == {"ada": 100, "bob": 0}
        assert not connection.is_in_transaction()

    @pytest.mark.parametrize("how", ["COMMIT", "COMMIT; BEGIN", "ROLLBACK", "ROLLBACK; BEGIN"])
    @pytest.mark.parametrize("is_swallowed", [False, True])
    async def test_function_cannot_end_the_transaction(
        self, accounts: str, connection: Any, how: str, is_swallowed: bool
    ) -> None:
        @once(share(connection), name="ends")
        async def end_transaction() -> int:
            await connection.execute("UPDATE accounts SET cents = 0 WHERE name = 'ada'")
            try:
                await connection.execute(how)
            except asyncpg.PostgresError:
                if not is_swallowed:
                    raise
            return 1

        with pytest.raises(TransactionError):
            await end_transaction()
        assert await balances(accounts) == {"ada": 100, "bob": 0}
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SELECT count(*) FROM oncelog_records") == 0

    async def test_function_may_use_nested_transactions(self, accounts: str, connection: Any) -> None:
        @once(share(connection), name="nested")
        async def use_nested() -> int:
            async with connection.transaction():
                await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
            with pytest.raises(asyncpg.DivisionByZeroError):
                await _fail_after_a_statement(connection)
            return 7

        assert [await use_nested(), await use_nested()] == [7, 7]
        assert (await balances(accounts))["ada"] == 1

    async def test_shared_connection_and_log_replay_each_others_results(self, accounts: str, connection: Any) -> None:
        runs = []
        async with oncelog.open(accounts) as log:

            @once(log, name="transfer", key=lambda key: key)
            async def call_leased(key: str) -> int:
                runs.append(key)
                return 1

            @once(share(connection), name="transfer", key=lambda key: key)
            async def call_shared(key: str) -> int:
                runs.append(key)
                return 2

            assert [await call_leased("a"), await call_shared("a")] == [1, 1]
            assert [await call_shared("b"), await call_leased("b")] == [2, 2]
            assert runs == ["a", "b"]

    async def test_transfer_happens_once_when_the_process_is_killed_after_any_statement(
        self, accounts: str, connection: Any
    ) -> None:
        """After each kill, another process repeats the call with the same key."""
        transfer = transfer_on(connection)
        survived = None
        for kill_after in range(1, 80):
            key = f"t{kill_after}"
            process = multiprocessing.get_context("fork").Process(
                target=_transfer_until_killed, args=(accounts, key, kill_after)
            )
            process.start()
            await asyncio.to_thread(process.join)
            assert await transfer(key, 1) == 100 - kill_after
            rows = await connection.fetch("SELECT name, cents FROM accounts")
            assert dict(map(tuple, rows)) == {"ada": 100 - kill_after, "bob": kill_after}
            if process.exitcode == 0:
                survived = kill_after
                break
        assert survived is not None
        assert survived > 10


def _transfer_until_killed(address: str, key: str, kill_after: int) -> None:
    """Transfer a cent and kill this process after the n-th statement."""
    warnings.simplefilter("ignore", ResourceWarning)  # ignores warnings about processes and sockets of the parent
    statements = itertools.count(1)

    def count(_: Any) -> None:
        if next(statements) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    async def call() -> None:
        async with connect_to(address) as connection:
            connection.add_query_logger(count)
            await transfer_on(connection)(key, 1)

    asyncio.run(call())


@pytest.mark.rule("RU-12", "RU-7")
class TestConcurrentCallers:
    async def test_concurrent_callers_run_once_and_get_one_result(self, accounts: str) -> None:
        async def call() -> int:
            async with connect_to(accounts) as connection:
                return await transfer_on(connection)("a", 30)

        assert await asyncio.gather(*[call() for _ in range(12)]) == [70] * 12
        assert await balances(accounts) == {"ada": 70, "bob": 30}

    async def test_call_in_flight_raises_without_waiting_or_after_wait_s(self, accounts: str, connection: Any) -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        @once(share(connection), name="slow")
        async def work_slowly() -> int:
            entered.set()
            await leave.wait()
            return 1

        first = asyncio.create_task(work_slowly())
        await entered.wait()
        async with connect_to(accounts) as other:
            for options in ({"in_flight": "raise"}, {"wait_s": 0.05}):
                again: Any = once(share(other), name="slow", **options)(_return_two)
                with pytest.raises(InFlightError):
                    await again()
                assert not other.is_in_transaction()
            assert await other.fetchval("SHOW lock_timeout") == "0"
            leave.set()
            assert await first == 1
            assert await again() == 1

    async def test_long_running_function_does_not_hold_the_lane(self, accounts: str, connection: Any) -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        @once(share(connection), name="one stream", key=lambda key: key)
        async def work_slowly(key: str) -> str:
            entered.set()
            await leave.wait()
            return key

        first = asyncio.create_task(work_slowly("a"))
        await entered.wait()
        async with connect_to(accounts) as other:

            @once(share(other), name="one stream", key=lambda key: key)
            async def work_quickly(key: str) -> str:
                return key

            assert await work_quickly("b") == "b"  # same stream, and therefore same lane
        assert not first.done()
        leave.set()
        assert await first == "a"


async def _fail_after_a_statement(connection: Any) -> None:
    async with connection.transaction():
        await connection.execute("UPDATE accounts SET cents = 2 WHERE name = 'ada'")
        await connection.execute("SELECT 1 / 0")


async def _return_two() -> int:
    return 2


@pytest.mark.rule("RU-12")
class TestSessionSettings:
    async def test_function_cannot_turn_off_synchronous_commit(self, connection: Any) -> None:
        await connection.execute(
            """
            CREATE TABLE seen (value text);
            CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER at_commit AFTER UPDATE ON accounts DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION look();
            """
        )

        @once(share(connection), name="hasty")
        async def disable_sync() -> int:
            await connection.execute("SET LOCAL synchronous_commit = off")
            await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
            return 1

        assert await disable_sync() == 1
        assert await connection.fetchval("SELECT value FROM seen") == "on"

    async def test_lost_connection_raises_store_unavailable(self, connection: Any) -> None:
        await self.check_lost_connection(connection)

    async def test_lost_pooled_connection_raises_store_unavailable(self, accounts: str) -> None:
        async with asyncpg.create_pool(accounts, min_size=1, max_size=1) as pool, pool.acquire() as connection:
            await self.check_lost_connection(connection)

    async def check_lost_connection(self, connection: Any) -> None:
        @once(share(connection), name="lost")
        async def lose_connection() -> int:
            with suppress(asyncpg.PostgresError):
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            return 1

        with pytest.raises(StoreUnavailableError):
            await lose_connection()


@pytest.mark.rule("RU-12")
class TestLaneLimits:
    async def test_session_limits_are_short_during_the_commit_and_restored_afterwards(self, connection: Any) -> None:
        await connection.execute(
            """
            CREATE TABLE seen (idle text, lock text);
            CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO seen VALUES (
                    current_setting('idle_in_transaction_session_timeout'), current_setting('lock_timeout'));
                RETURN NULL;
            END $$;
            CREATE CONSTRAINT TRIGGER at_commit AFTER UPDATE ON accounts DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION look();
            SET idle_in_transaction_session_timeout = '3h';
            SET lock_timeout = '2h';
            """
        )
        inside = []

        @once(share(connection), name="looks")
        async def read_limits() -> int:
            inside.append(await limits_of(connection))
            await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
            return 1

        assert await read_limits() == 1
        assert inside == [(borrowed_transaction.IDLE_TIMEOUT, "2h")]
        assert (
            tuple(await connection.fetchrow("SELECT idle, lock FROM seen")) == (borrowed_transaction.LANE_TIMEOUT,) * 2
        )
        assert await limits_of(connection) == ("3h", "2h")

    async def test_wait_for_a_held_lane_has_a_limit(
        self, accounts: str, connection: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Only the lock timeout is short, because the idle limit must not close the session on a busy machine.
        monkeypatch.setitem(SQL, "limit_lock", "SELECT set_config('lock_timeout', '50ms', true), $1::text")
        async with connect_to(accounts) as other:
            async with other.transaction():
                await other.execute("SELECT 1 FROM oncelog_lanes FOR UPDATE")
                with pytest.raises(StoreUnavailableError, match="call again with the same key"):
                    await transfer_on(connection)("a", 30)
            monkeypatch.undo()
            assert await balances(accounts) == {"ada": 100, "bob": 0}
            assert await transfer_on(other)("a", 30) == 70

    async def test_server_closes_an_idle_session_that_holds_the_lane(
        self, accounts: str, connection: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(borrowed_transaction, "IDLE_TIMEOUT", "1h")
        async with PostgresProxy(accounts) as proxy:
            while True:
                stuck = await asyncpg.connect(proxy.address)
                monkeypatch.setattr(borrowed_transaction, "LANE_TIMEOUT", "1h")
                assert await transfer_on(stuck)("a", 1) == 99
                monkeypatch.setattr(borrowed_transaction, "LANE_TIMEOUT", SHORT)
                held = proxy.hold("COMMIT", is_query=True)
                calling = asyncio.ensure_future(transfer_on(stuck)("b", 2))
                reaching = asyncio.ensure_future(held.wait_reached())
                await asyncio.wait({reaching, calling}, return_when=asyncio.FIRST_COMPLETED)
                if reaching.done():
                    break
                # On a slow machine, the limit can close the session before its COMMIT.
                reaching.cancel()
                proxy.held.remove(held)
                with pytest.raises(StoreUnavailableError):
                    await calling
                stuck.terminate()
            try:
                monkeypatch.setattr(borrowed_transaction, "LANE_TIMEOUT", "1h")
                assert await transfer_on(connection)("c", 3) == 96  # the rows of "b" are rolled back
                held.release()
                with pytest.raises(StoreUnavailableError):
                    await calling
            finally:
                stuck.terminate()
            assert await transfer_on(connection)("b", 2) == 94


async def limits_of(connection: Any) -> tuple[str, str]:
    idle = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
    return idle, await connection.fetchval("SHOW lock_timeout")


class TestUnsupportedConnections:
    async def test_open_transaction_is_refused(self, connection: Any) -> None:
        async with connection.transaction():
            with pytest.raises(TransactionError):
                await transfer_on(connection)("a", 1)

    async def test_session_without_synchronous_commit_is_refused(self, accounts: str, connection: Any) -> None:
        await connection.execute("SET synchronous_commit = off")
        with pytest.raises(SettingsError):
            await transfer_on(connection)("a", 1)
        assert await balances(accounts) == {"ada": 100, "bob": 0}

    async def test_database_without_log_is_refused(self, database: str) -> None:
        async with connect_to(database) as connection:
            with pytest.raises(NotALogError):
                await transfer_on(connection)("a", 1)

    async def test_blocking_function_is_refused(self, connection: Any) -> None:
        def blocking() -> None: ...

        with pytest.raises(TypeError, match="not async"):
            once(share(connection), name="blocking")(blocking)

    async def test_pooled_connection_is_accepted(self, accounts: str) -> None:
        async with asyncpg.create_pool(accounts, min_size=1, max_size=1) as pool, pool.acquire() as connection:
            assert await transfer_on(connection)("a", 30) == 70
