"""`share` with a connection of asyncpg: the caller's rows and the memory of the call are one transaction."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

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
from oncelog.stores.postgres import guest
from oncelog.testing.postgres_proxy import PostgresProxy

WAIT_S = 60
"""Nothing that a test waits for takes that long."""
SHORT = "2s"
"""Longer than a busy machine takes between two statements."""


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
def accounts(database: str) -> str:
    """A log, and tables of our own beside it."""

    async def made() -> None:
        async with oncelog.open(database), connected(database) as connection:
            await connection.execute("CREATE TABLE accounts (name text PRIMARY KEY, cents bigint NOT NULL)")
            await connection.execute("INSERT INTO accounts VALUES ('ada', 100), ('bob', 0)")

    asyncio.run(made())
    return database


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(address)
    try:
        yield connection
    finally:
        await connection.close()


async def balances(address: str) -> dict[str, int]:
    async with connected(address) as connection:
        return dict([tuple(row) for row in await connection.fetch("SELECT name, cents FROM accounts")])


def run(test: Callable[[Any], Coroutine[Any, Any, None]], address: str) -> None:
    async def whole() -> None:
        async with connected(address) as connection:
            await test(connection)

    asyncio.run(whole())


@pytest.mark.rule("RU-12")
class TestOneTransaction:
    def test_a_repeated_call_moves_nothing_and_gives_the_same(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            transfer = transfer_on(connection)
            assert [await transfer("a", 30), await transfer("a", 30), await transfer("b", 30)] == [70, 70, 40]
            async with connected(accounts) as other:
                assert await transfer_on(other)("a", 30) == 70
            assert await balances(accounts) == {"ada": 40, "bob": 60}
            assert not connection.is_in_transaction()
            with pytest.raises(ConflictError):
                await transfer("a", 31)
            assert await connection.fetchval("SELECT count(*) FROM oncelog_shared") == 0

        run(test, accounts)

    def test_both_or_neither_where_it_raises(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            transfer = transfer_on(connection)
            for _ in range(2):
                with pytest.raises(KeyError):
                    await transfer("a", 13)
            assert await balances(accounts) == {"ada": 100, "bob": 0}
            assert not connection.is_in_transaction()

        run(test, accounts)

    def test_a_listed_exception_is_kept_without_its_rows(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            transfer = transfer_on(connection)
            with pytest.raises(OverdrawnError):
                await transfer("a", 1000)
            await connection.execute("UPDATE accounts SET cents = 5000 WHERE name = 'ada'")
            with pytest.raises(OverdrawnError):
                await transfer("a", 1000)  # kept, though by now there would be enough
            assert await balances(accounts) == {"ada": 5000, "bob": 0}

        run(test, accounts)

    def test_a_result_that_cannot_be_kept_takes_the_rows_with_it(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            @once(share(connection), name="odd", result=int)
            async def odd() -> Any:
                await connection.execute("DELETE FROM accounts")
                return "text"

            with pytest.raises(ResultError):
                await odd()
            assert await balances(accounts) == {"ada": 100, "bob": 0}

        run(test, accounts)

    def test_a_statement_that_fails_takes_the_others_with_it(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            @once(share(connection), name="odd")
            async def odd() -> None:
                await connection.execute("DELETE FROM accounts")
                await connection.execute("SELECT 1 / 0")

            with pytest.raises(asyncpg.DivisionByZeroError):
                await odd()
            assert await balances(accounts) == {"ada": 100, "bob": 0}
            assert not connection.is_in_transaction()

        run(test, accounts)

    @pytest.mark.parametrize("how", ["COMMIT", "COMMIT; BEGIN", "ROLLBACK", "ROLLBACK; BEGIN"])
    @pytest.mark.parametrize("is_swallowed", [False, True])
    def test_the_function_cannot_end_the_transaction(self, accounts: str, how: str, is_swallowed: bool) -> None:
        async def test(connection: Any) -> None:
            @once(share(connection), name="ends")
            async def ends() -> int:
                await connection.execute("UPDATE accounts SET cents = 0 WHERE name = 'ada'")
                try:
                    await connection.execute(how)
                except asyncpg.PostgresError:
                    if not is_swallowed:
                        raise
                return 1

            with pytest.raises(TransactionError):
                await ends()
            assert await balances(accounts) == {"ada": 100, "bob": 0}
            assert not connection.is_in_transaction()
            assert await connection.fetchval("SELECT count(*) FROM oncelog_records") == 0

        run(test, accounts)

    def test_the_function_may_have_transactions_inside(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            @once(share(connection), name="nested")
            async def nested() -> int:
                async with connection.transaction():
                    await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
                with pytest.raises(asyncpg.DivisionByZeroError):
                    await _undone(connection)
                return 7

            assert [await nested(), await nested()] == [7, 7]
            assert (await balances(accounts))["ada"] == 1

        run(test, accounts)

    def test_it_and_a_log_remember_together(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            runs = []
            async with oncelog.open(accounts) as log:

                @once(log, name="transfer", key=lambda key: key)
                async def by_lease(key: str) -> int:
                    runs.append(key)
                    return 1

                @once(share(connection), name="transfer", key=lambda key: key)
                async def shared(key: str) -> int:
                    runs.append(key)
                    return 2

                assert [await by_lease("a"), await shared("a")] == [1, 1]
                assert [await shared("b"), await by_lease("b")] == [2, 2]
                assert runs == ["a", "b"]

        run(test, accounts)

    def test_killed_after_any_of_its_statements(self, accounts: str) -> None:
        """Asked for again after each death, every transfer happens once."""
        survived = None
        for die_after in range(1, 80):
            key = f"t{die_after}"
            process = multiprocessing.get_context("fork").Process(target=_transfer, args=(accounts, key, die_after))
            process.start()
            process.join()
            assert asyncio.run(_transferred(accounts, key, 0)) == 100 - die_after
            assert asyncio.run(balances(accounts)) == {"ada": 100 - die_after, "bob": die_after}
            if process.exitcode == 0:
                survived = die_after
                break
        assert survived is not None
        assert survived > 10


def _transfer(address: str, key: str, die_after: int) -> None:
    asyncio.run(_transferred(address, key, die_after))


async def _transferred(address: str, key: str, die_after: int) -> int:
    """Moves a cent on a session of its own, whose process dies after its n-th statement."""
    async with connected(address) as connection:
        statements = 0

        def count(_: Any) -> None:
            nonlocal statements
            statements += 1
            if statements == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        connection.add_query_logger(count)
        return await transfer_on(connection)(key, 1)


@pytest.mark.rule("RU-12", "RU-7")
class TestCallersAtOnce:
    def test_one_runs_and_all_get_its_result(self, accounts: str) -> None:
        async def test(_: Any) -> None:
            async def call() -> int:
                async with connected(accounts) as connection:
                    return await transfer_on(connection)("a", 30)

            assert await asyncio.gather(*[call() for _ in range(12)]) == [70] * 12
            assert await balances(accounts) == {"ada": 70, "bob": 30}

        run(test, accounts)

    def test_who_does_not_want_to_wait_is_told(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            entered, leave = asyncio.Event(), asyncio.Event()

            @once(share(connection), name="slow")
            async def slow() -> int:
                entered.set()
                await leave.wait()
                return 1

            first = asyncio.create_task(slow())
            await entered.wait()
            async with connected(accounts) as other:
                for options in ({"in_flight": "raise"}, {"wait_s": 0.05}):
                    again: Any = once(share(other), name="slow", **options)(_two)
                    with pytest.raises(InFlightError):
                        await again()
                    assert not other.is_in_transaction()
                assert await other.fetchval("SHOW lock_timeout") == "0"
                leave.set()
                assert await first == 1
                assert await again() == 1

        run(test, accounts)

    def test_a_function_that_takes_long_keeps_nobody_from_the_lane(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            entered, leave = asyncio.Event(), asyncio.Event()

            @once(share(connection), name="one stream", key=lambda key: key)
            async def slow(key: str) -> str:
                entered.set()
                await leave.wait()
                return key

            first = asyncio.create_task(slow("a"))
            await entered.wait()
            async with connected(accounts) as other:

                @once(share(other), name="one stream", key=lambda key: key)
                async def quick(key: str) -> str:
                    return key

                assert await quick("b") == "b"  # of the same stream, so of the same lane
            assert not first.done()
            leave.set()
            assert await first == "a"

        run(test, accounts)


async def _undone(connection: Any) -> None:
    async with connection.transaction():
        await connection.execute("UPDATE accounts SET cents = 2 WHERE name = 'ada'")
        await connection.execute("SELECT 1 / 0")


async def _two() -> int:
    return 2


@pytest.mark.rule("RU-12")
class TestWhatTheFunctionDoesToItsSession:
    def test_it_cannot_have_its_commit_told_before_it_is_synced(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
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
            async def hasty() -> int:
                await connection.execute("SET LOCAL synchronous_commit = off")
                await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
                return 1

            assert await hasty() == 1
            assert await connection.fetchval("SELECT value FROM seen") == "on"

        run(test, accounts)

    @pytest.mark.parametrize("is_pooled", [False, True])
    def test_a_session_that_is_lost_is_told_in_our_words(self, accounts: str, is_pooled: bool) -> None:
        async def lose(connection: Any) -> None:
            @once(share(connection), name="lost")
            async def lost() -> int:
                with suppress(asyncpg.PostgresError):
                    await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
                return 1

            with pytest.raises(StoreUnavailableError):
                await lost()

        async def pooled(_: Any) -> None:
            async with asyncpg.create_pool(accounts, min_size=1, max_size=1) as pool, pool.acquire() as connection:
                await lose(connection)

        run(pooled if is_pooled else lose, accounts)


@pytest.mark.rule("RU-12")
class TestWhileTheLaneIsHeld:
    def test_the_limits_are_shorter_at_the_end_and_the_callers_own_again_behind_it(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
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
            async def looks() -> int:
                inside.append(await limits_of(connection))
                await connection.execute("UPDATE accounts SET cents = 1 WHERE name = 'ada'")
                return 1

            assert await looks() == 1
            assert inside == [(guest.IDLE_LIMIT, "2h")]
            assert tuple(await connection.fetchrow("SELECT idle, lock FROM seen")) == (guest.LANE_LIMIT,) * 2
            assert await limits_of(connection) == ("3h", "2h")

        run(test, accounts)

    def test_a_lane_that_another_holds_is_not_waited_for_for_ever(
        self, accounts: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guest, "LANE_LIMIT", SHORT)

        async def test(connection: Any) -> None:
            async with connected(accounts) as other, asyncio.timeout(WAIT_S):
                async with other.transaction():
                    await other.execute("SELECT 1 FROM oncelog_lanes FOR UPDATE")
                    with pytest.raises(StoreUnavailableError, match="call again with the same key"):
                        await transfer_on(connection)("a", 30)
                monkeypatch.undo()
                assert await balances(accounts) == {"ada": 100, "bob": 0}
                assert await transfer_on(other)("a", 30) == 70

        run(test, accounts)

    def test_who_is_cut_off_with_the_lane_loses_it(self, accounts: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guest, "IDLE_LIMIT", "1h")
        lane_limit = guest.LANE_LIMIT

        async def test(_: Any) -> None:
            async with PostgresProxy(accounts) as proxy, connected(accounts) as other, asyncio.timeout(WAIT_S):
                connection = await asyncpg.connect(proxy.address)
                try:
                    assert await transfer_on(connection)("a", 1) == 99
                    monkeypatch.setattr(guest, "LANE_LIMIT", SHORT)
                    held = proxy.hold("COMMIT", is_query=True)
                    cut_off = asyncio.ensure_future(transfer_on(connection)("b", 2))
                    await held.reached()
                    monkeypatch.setattr(guest, "LANE_LIMIT", lane_limit)
                    assert await transfer_on(other)("c", 3) == 96  # the rows of who was cut off are gone as well
                    held.let_go()
                    with pytest.raises(StoreUnavailableError):
                        await cut_off
                finally:
                    connection.terminate()
                assert await transfer_on(other)("b", 2) == 94

        run(test, accounts)


async def limits_of(connection: Any) -> tuple[str, str]:
    idle = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
    return idle, await connection.fetchval("SHOW lock_timeout")


class TestWhatCannotBeShared:
    def test_a_transaction_that_is_open(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            async with connection.transaction():
                with pytest.raises(TransactionError):
                    await transfer_on(connection)("a", 1)

        run(test, accounts)

    def test_a_session_that_does_not_wait_for_the_disk(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            await connection.execute("SET synchronous_commit = off")
            with pytest.raises(SettingsError):
                await transfer_on(connection)("a", 1)
            assert await balances(accounts) == {"ada": 100, "bob": 0}

        run(test, accounts)

    def test_a_database_without_a_log(self, database: str) -> None:
        async def test(connection: Any) -> None:
            with pytest.raises(NotALogError):
                await transfer_on(connection)("a", 1)

        run(test, database)

    def test_functions_and_logs_that_do_not_fit(self, accounts: str) -> None:
        async def test(connection: Any) -> None:
            def blocking() -> None: ...

            with pytest.raises(TypeError, match="not async"):
                once(share(connection), name="blocking")(blocking)

        run(test, accounts)

    def test_a_connection_of_a_pool_can_be(self, accounts: str) -> None:
        async def test(_: Any) -> None:
            async with asyncpg.create_pool(accounts, min_size=1, max_size=1) as pool, pool.acquire() as connection:
                assert await transfer_on(connection)("a", 30) == 70

        run(test, accounts)
