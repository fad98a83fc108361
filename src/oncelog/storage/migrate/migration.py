"""The migration: copies while the file is in use, completes the copy under the file's write lock, then switches over.

Records are only ever added, so the migration copies them while other processes write. Then it acquires the file's write
lock, copies the new records, erases the bodies that have been erased since they were copied, and copies all side state
again. If both logs are equal, it commits the marker of the move in the file, and then opens the database for servers.

In this order, the two logs never accept writes at the same time. If the migration is killed between the two steps, both
logs are complete and neither accepts writes; the next run detects this and opens the database. In the opposite order,
both logs would accept writes: two histories of one epoch.
"""

import asyncio
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, TypeVar

from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.errors import CorruptError, MovedError, StoreError
from oncelog.storage.clock import SystemClock
from oncelog.storage.metadata import LogMetadata, count_records
from oncelog.storage.migrate.source import SLICE_ROWS, MigrationSource, PendingMove, SourceState, open_source
from oncelog.storage.migrate.target import MigrationTarget, open_target
from oncelog.storage.queries.records import count_erasures, find_block, load_heads
from oncelog.storage.sqlite.moved_marker import MovedMarker, load_marker
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import ReportProgress, StepProgress
from oncelog.storage.verify.sqlite import verify_quickly

T = TypeVar("T")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run_interruptible(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`. SIGINT and SIGTERM raise KeyboardInterrupt, if this process has handlers for
    them.

    The event loop receives the signals through its wake-up socket. A handler that raises is not enough: asyncpg loses
    an exception that is raised while it sends a statement, and keeps waiting for the answer. A handler that cancels, as
    asyncio installs for SIGINT, is not enough either: if the signal arrives right before the loop waits, or on another
    thread, Python calls the handler only after the wait.
    """

    async def run_cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None or threading.current_thread() is not threading.main_thread():
            return await coroutine
        before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
        for number in before:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await coroutine
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    try:
        return asyncio.run(run_cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


COPY_ROUNDS_MAX: Final = 20
"""Maximum rounds of copying new records before the lock. If writers are faster, the rest is copied under the lock."""


class MigrationOutcome(Struct, frozen=True):
    """Result of a migration."""

    epoch: str
    records: int
    lanes: int
    is_new: bool
    """False if an earlier run had already completed the move."""
    tables_left: list[str]
    """The application's tables, which are left in the file."""


def migrate_log(path: str, address: str, report: ReportProgress) -> MigrationOutcome:
    """Move the log in a file into a database that contains no log, or complete an earlier move.

    Raises StoreError (MovedError for a log that was moved elsewhere) or SettingsError. After any error, or if the
    process is killed at any time, the same call can be repeated.
    """
    _verify_source(path, report)
    return run_interruptible(_migrate_log(path, address, report))


def check_migration(path: str, address: str) -> None:
    """Raise the errors that `migrate_log` would raise before it verifies the file. Changes nothing."""
    run_interruptible(_run_with_both(path, address, _find_target_log))


def _verify_source(path: str, report: ReportProgress) -> None:
    with open_read_transaction(path) as (connection, _):
        if load_marker(connection) is None:
            report(StepProgress("structure"))
            verify_quickly(connection)


def _migrate_log(path: str, address: str, report: ReportProgress) -> Coroutine[Any, Any, MigrationOutcome]:
    return _run_with_both(path, address, lambda source, target: _LogMigration(source, target, report).run())


async def _run_with_both(
    path: str, address: str, function: Callable[[MigrationSource, MigrationTarget], Awaitable[T]]
) -> T:
    """Open the file and the database, and call the function with both."""
    with open_source(path) as source:
        async with open_target(address) as target:
            return await function(source, target)


async def _find_target_log(
    source: MigrationSource, target: MigrationTarget
) -> tuple[LogMetadata, PendingMove | None] | None:
    """Return the metadata and the move of this log in the target, or None if the target has no log.

    Raises StoreError if it has a different log.
    """
    found, mark = await target.load_metadata(), load_marker(source.connection)
    if mark is not None and (found is None or not _belongs_to(found, source.metadata.epoch, mark)):
        raise _build_moved_error(mark, target)
    if found is None:
        return None
    metadata, underway = found
    if metadata.epoch != source.metadata.epoch:
        problem = "contains another log" if underway is None else "contains part of another log"
        raise StoreError(
            f"{target.name} {problem} (epoch {metadata.epoch}, not {source.metadata.epoch}). Nothing was changed."
        )
    return found


def _build_moved_error(mark: MovedMarker, target: MigrationTarget) -> MovedError:
    return MovedError(f"the log has been moved to {mark.target}, so it cannot be moved to {target.name}", mark.target)


def _belongs_to(found: tuple[LogMetadata, PendingMove | None], epoch: str, mark: MovedMarker) -> bool:
    metadata, underway = found
    return metadata.epoch == epoch and (underway is None or underway.id == mark.move)


class _LogMigration:
    def __init__(self, source: MigrationSource, target: MigrationTarget, report: ReportProgress) -> None:
        self._source = source
        self._target = target
        self._report = report

    async def run(self) -> MigrationOutcome:
        """See `migrate_log`."""
        source, target = self._source, self._target
        found = await _find_target_log(source, target)
        is_marked = load_marker(source.connection) is not None
        underway = await self._begin() if found is None else found[1]
        if underway is None:
            if not is_marked:
                await self._mark_source_moved()
            return self._build_outcome(await target.run_query(load_heads), source.load_state(), is_new=not is_marked)
        if found is not None:
            await target.resume(found[0])
            await self._check_same_history()
        # Copy even if the file has the marker: a standby that lagged behind may have become the primary. The records
        # that it lacks are then copied again, and the marker is on the disk, before a server can write.
        await self._copy_while_in_use()
        await self._copy_remainder(underway)
        await target.finish(underway)
        state = source.load_state()
        return self._build_outcome(state.heads, state, is_new=True)

    async def _begin(self) -> PendingMove:
        source = self._source
        underway = PendingMove(source.metadata.epoch, SystemClock().wall_ms(), secrets.token_hex(8))
        # Save the erasure count before reading the first record, so that later erasures make the counts differ at the
        # end.
        await self._target.begin(source.metadata, source.load_state().erasures, underway)
        return underway

    def _build_outcome(self, heads: dict[int, LaneHead], state: SourceState, *, is_new: bool) -> MigrationOutcome:
        records = count_records(heads, state.gaps)
        tables = [name for (name,) in self._source.iterate_rows("tables_of_others")]
        return MigrationOutcome(self._source.metadata.epoch, records, len(heads), is_new, tables)

    # --- while the file is in use

    async def _copy_while_in_use(self) -> None:
        step = "copying"
        for _ in range(COPY_ROUNDS_MAX):
            state = self._source.load_state()
            self._source.make_durable()
            copied = await self._copy(state, step)
            if copied <= SLICE_ROWS:
                break
            step = "copying new records"

    async def _copy(self, state: SourceState, step: str) -> int:
        """Copy the records up to the heads, and return how many were copied."""
        reached = await self._target.load_progress()
        total = state.record_count
        copied_before = done = count_records(reached, state.gaps)
        self._report(StepProgress(step, done, total))
        async with aclosing(_read_ahead(self._source.iterate_slices(state, reached))) as slices:
            async for part in slices:
                await self._target.save_slice(part)
                done += len(part.records)
                self._report(StepProgress(step, done, total))
        return done - copied_before

    async def _check_same_history(self) -> None:
        """Check that the records of an earlier run come from this file, not from a copy that has since changed."""
        for lane, at in (await self._target.load_progress()).items():
            block = self._source.run_query(find_block, lane, at.height)
            if at.height and block != await self._target.run_query(find_block, lane, at.height):
                raise StoreError(
                    f"{self._target.name} contains part of this log, but lane {lane} has a different history there "
                    f"(at height {at.height}). Drop its tables oncelog_* to start over."
                )

    # --- under the file's write lock

    async def _copy_remainder(self, underway: PendingMove) -> None:
        source, target = self._source, self._target
        with self._lock_source():
            mark = load_marker(source.connection)
            if mark is not None and mark.move != underway.id:  # moved to a different database in the meantime
                raise _build_moved_error(mark, target)
            state = source.load_state()
            await self._copy(state, "copying the rest")
            if state.erasures != await target.run_query(count_erasures):
                self._report(StepProgress("erasing"))
                await target.erase(source.iterate_erasures(), state.record_count)
            self._report(StepProgress("side state"))
            await target.replace_side_state(source, state)
            await self._check_equal(state)
            source.save_marker(MovedMarker(target.name, SystemClock().wall_ms(), underway.id))

    async def _mark_source_moved(self) -> None:
        """Save the marker in a file that lacks it after a completed move, for example in a restored copy."""
        source, target = self._source, self._target
        with self._lock_source():
            if source.load_state().heads != await target.run_query(load_heads):
                raise StoreError(
                    f"{target.name} already contains this log (epoch {source.metadata.epoch}), and one of the two has "
                    "been written to since then: the file is a copy made before the move. Nothing was changed."
                )
            source.save_marker(MovedMarker(target.name, SystemClock().wall_ms(), ""))

    @contextmanager
    def _lock_source(self) -> Iterator[None]:
        """Hold the file's write lock. The database must answer soon, because other writers of the file are waiting."""
        self._source.lock()
        try:
            with self._target.use_locked_limit():
                yield
        finally:
            self._source.unlock()

    async def _check_equal(self, state: SourceState) -> None:
        """Raise CorruptError unless source and target are equal."""
        self._report(StepProgress("comparing"))
        moved = _name_heads(state.heads) | self._source.count_rows()
        copied = _name_heads(await self._target.run_query(load_heads))
        copied |= await self._target.count_rows(state.record_count)
        for name in {**moved, **copied}:
            if moved.get(name) != copied.get(name):
                raise CorruptError(
                    f"{name} differs after the copy: {copied.get(name)} in {self._target.name}, {moved.get(name)} in "
                    "the file. The database was not opened; see `oncelog verify`"
                )


def _name_heads(heads: Mapping[int, LaneHead]) -> dict[str, Any]:
    return {f"lane {lane}": head for lane, head in heads.items()}


async def _read_ahead(parts: Iterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items while a thread reads ahead by one."""
    loop = asyncio.get_running_loop()
    next_part = loop.run_in_executor(None, next, parts, None)
    try:
        while (part := await asyncio.shield(next_part)) is not None:
            next_part = loop.run_in_executor(None, next, parts, None)
            yield part
    finally:
        # The caller uses or closes the connection next, so the thread must have finished, even after two cancellations.
        while not next_part.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([next_part])
        next_part.exception()  # marks an error of an unused item as retrieved
