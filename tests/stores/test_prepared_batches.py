"""Batches that are decided and written on the event loop's thread, and made durable by another."""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncelog.core.values import Committed, Request
from oncelog.stores.protocol import Decided
from oncelog.stores.sqlite import store as sqlite_store
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.store import SqliteStore
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import event


def batch(*numbers: int) -> list[Request]:
    return [Request((event(number),)) for number in numbers]


class Watched:
    """Which thread did what to the writer's session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bool]] = []
        """What was done, and whether on the event loop's thread."""
        for name in ("prepare", "finish", "commit"):
            monkeypatch.setattr(Session, name, self._watching(name, getattr(Session, name)))

    def _watching(self, name: str, done: Any) -> Any:
        def watching(session: Session, *arguments: Any) -> Any:
            result = done(session, *arguments)
            is_here = threading.current_thread() is threading.main_thread()
            self.seen.append((name if result is not None or name == "finish" else f"no {name}", is_here))
            return result

        return watching


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore(path, clock=ManualClock())
    await store.open()
    return store


def committed(decided: Decided) -> int:
    return sum(isinstance(verdict, Committed) for verdicts in decided.verdicts for verdict in verdicts)


def positions_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM oncelog_records").fetchone()
    return int(count)


def test_a_batch_is_written_here_and_made_durable_elsewhere(tmp_path: Path, watched: Watched) -> None:
    async def main() -> None:
        store = await opened(tmp_path / "log.db")
        assert committed(await store.commit(batch(1, 2))) == 2
        assert watched.seen == [("prepare", True), ("finish", False)]
        # What is known already changes nothing, and there is nothing to be made durable.
        assert committed(await store.commit(batch(1, 2))) == 0
        assert watched.seen[2:] == [("prepare", True)]
        await store.close()

    asyncio.run(main())


def test_while_another_process_writes_the_loop_does_not_wait(tmp_path: Path, watched: Watched) -> None:
    async def main() -> None:
        path = tmp_path / "log.db"
        store = await opened(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.ensure_future(store.commit(batch(1)))
            for _ in range(3):
                await asyncio.sleep(0)  # the loop turns: had it waited for the lock, nobody could let go of it
            assert watched.seen == [("no prepare", True)]
            assert not waiting.done()
            other.execute("ROLLBACK")
            assert committed(await waiting) == 1
        assert watched.seen == [("no prepare", True), ("commit", False)]
        await store.close()

    asyncio.run(main())


def test_what_is_under_way_in_the_writers_thread_is_not_disturbed(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def scrub(_: Session) -> bool:
        held.set()
        return go_on.wait(60)

    monkeypatch.setattr(Session, "scrub", scrub)

    async def main() -> None:
        store = await opened(tmp_path / "log.db")
        scrubbing = asyncio.ensure_future(store.scrub())
        await asyncio.to_thread(held.wait, 60)
        waiting = asyncio.ensure_future(store.commit(batch(1)))
        await asyncio.sleep(0)
        assert watched.seen == []
        # Whoever gives up waiting for the thread does not make it idle.
        scrubbing.cancel()
        await asyncio.wait([scrubbing])
        second = asyncio.ensure_future(store.commit(batch(2)))
        await asyncio.sleep(0)
        assert watched.seen == []
        go_on.set()
        await asyncio.gather(waiting, second)
        assert watched.seen == [("commit", False)] * 2
        await store.close()

    asyncio.run(main())


def test_one_who_goes_away_before_it_is_durable_leaves_no_transaction_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, finish = threading.Event(), Session.finish

    def held(session: Session) -> None:
        go_on.wait(60)
        finish(session)

    monkeypatch.setattr(Session, "finish", held)

    async def main() -> None:
        path = tmp_path / "log.db"
        store = await opened(path)
        going = asyncio.ensure_future(store.commit(batch(1)))
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait([going])
        assert going.cancelled()
        go_on.set()
        assert committed(await store.commit(batch(1, 2))) == 1
        await store.close()
        assert positions_of(path) == 2

    asyncio.run(main())


def test_a_failed_commit_is_told_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        path = tmp_path / "log.db"
        store = await opened(path)
        await store.commit(batch(1))
        with monkeypatch.context() as patched:

            def failing(*_: Any) -> None:
                raise ZeroDivisionError

            patched.setattr("oncelog.stores.sqlite.writing.Writing._save", failing)
            with pytest.raises(ZeroDivisionError):
                await store.commit(batch(2))
        assert committed(await store.commit(batch(1, 2, 3))) == 2
        await store.close()
        assert positions_of(path) == 3

    asyncio.run(main())


@pytest.mark.parametrize("by", ["items", "bytes"])
def test_large_batches_are_left_to_the_writers_thread(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(sqlite_store, f"PREPARED_{by.upper()}_MAX", 2)

    async def main() -> None:
        store = await opened(tmp_path / "log.db")
        assert committed(await store.commit(batch(1, 2, 3))) == 3
        assert watched.seen == [("commit", False)]
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize(("written", "is_prepared"), [(0, True), (50, True), (1001, False)])
def test_what_others_have_written_is_read_by_the_writers_thread_if_it_is_much(
    tmp_path: Path, watched: Watched, written: int, is_prepared: bool
) -> None:
    async def main() -> None:
        store, other = await opened(tmp_path / "log.db"), await opened(tmp_path / "log.db")
        await store.commit(batch(1))
        if written:
            assert committed(await other.commit(batch(*range(2, written + 2)))) == written
        watched.seen.clear()
        assert committed(await store.commit(batch(1, 2, written + 2))) == 1
        expected = [("prepare", True), ("finish", False)] if is_prepared else [("no prepare", True), ("commit", False)]
        assert watched.seen == expected
        await store.commit(batch(written + 3))
        assert watched.seen[2:] == [("prepare", True), ("finish", False)]
        await store.close()
        await other.close()

    asyncio.run(main())


def test_a_thread_that_takes_no_more_work_leaves_no_transaction_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = await opened(tmp_path / "log.db")

        def refused(*_: Any, **__: Any) -> None:
            raise RuntimeError("the thread has been stopped")

        with monkeypatch.context() as patched:
            patched.setattr(store._writer, "start", refused)
            with pytest.raises(RuntimeError):
                await store.commit(batch(1))
        assert committed(await store.commit(batch(1))) == 1
        await store.close()

    asyncio.run(main())


def test_an_application_validates_in_the_writers_thread(tmp_path: Path, watched: Watched) -> None:
    async def main() -> None:
        store = await opened(tmp_path / "log.db")
        assert committed(await store.commit(batch(1), lambda _: None)) == 1
        assert watched.seen == [("commit", False)]
        await store.close()

    asyncio.run(main())


def test_a_disk_that_let_the_loop_wait_is_left_to_the_writers_thread_for_a_while(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("oncelog.stores.sqlite.store.time.monotonic", lambda: now_s[0])
    prepare = Session.prepare

    def slowly(session: Session, asked: Sequence[Request]) -> Decided | None:
        now_s[0] += 0.2
        return prepare(session, asked)

    async def main() -> None:
        store = await opened(tmp_path / "log.db")
        with monkeypatch.context() as patched:
            patched.setattr(Session, "prepare", slowly)
            await store.commit(batch(1))
        await store.commit(batch(2))
        assert watched.seen[2:] == [("commit", False)]
        now_s[0] += 6
        await store.commit(batch(3))
        assert watched.seen[3:] == [("prepare", True), ("finish", False)]
        await store.close()

    asyncio.run(main())
