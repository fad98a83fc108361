"""The migration: copies while the file is in use, completes under its write lock, then switches over.

Records are only ever added, so they are copied while others go on writing. Then the write lock of the file is taken:
what has come since is copied, bodies that were erased meanwhile are erased, and everything that is no record is copied
anew. If both are alike the file is marked as moved, and that is committed; then the database is opened for gateways.

In this order there is no moment at which both can be written to. Whoever is killed between the two leaves a log that
is whole in both, and can be written to in neither; the next run finds it so, and opens the database. The other way
round the file would take writes again, and so would the database: two histories of one epoch.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Final, TypeVar

from oncelog.core.values import LaneHead
from oncelog.errors import CorruptError, MovedError, StoreError
from oncelog.storage.leaps import count_records
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.migrate.interruptible import run_interruptible
from oncelog.storage.migrate.source import SLICE_ROWS, MigrationSource, open_source
from oncelog.storage.migrate.target import MigrationTarget, open_target
from oncelog.storage.migrate.values import MigrationOutcome, PendingMove, SourceState
from oncelog.storage.sqlite.moved_marker import MovedMarker, load_marker
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify.findings import StepProgress
from oncelog.storage.verify.sqlite_schema import verify_quickly

COPY_ROUNDS_MAX: Final = 20
"""So often what came since is copied before the lock is taken, if it is much. Who writes faster has to wait."""

ReportProgress = Callable[[StepProgress], None]
T = TypeVar("T")


def migrate_log(path: str, address: str, report: ReportProgress) -> MigrationOutcome:
    """Moves the log in a file into a database that has none, or goes on with that.

    Raises StoreError (MovedError if it has been moved elsewhere) or SettingsError. Whatever it raises, and wherever it
    is killed: it can be run again.
    """
    _verify_source(path, report)
    return run_interruptible(_migrate_log(path, address, report))


def check_migration(path: str, address: str) -> None:
    """Raises what `move` would raise at once, before its long look at the file. Changes nothing."""
    run_interruptible(_check_migration(path, address))


def _verify_source(path: str, report: ReportProgress) -> None:
    with open_read_transaction(path) as (connection, _):
        if load_marker(connection) is None:
            report(StepProgress("structure"))
            verify_quickly(connection)


async def _check_migration(path: str, address: str) -> None:
    with open_source(path) as source:
        async with open_target(address) as target:
            await _find_target_log(source, target)


async def _migrate_log(path: str, address: str, report: ReportProgress) -> MigrationOutcome:
    with open_source(path) as source:
        async with open_target(address) as target:
            return await _LogMigration(source, target, report).run()


async def _find_target_log(
    source: MigrationSource, target: MigrationTarget
) -> tuple[LogMetadata, PendingMove | None] | None:
    """What is in the target, if it is of this log. Raises StoreError for anything else."""
    found, mark = await target.load_metadata(), source.load_marker()
    if mark is not None and (found is None or not _belongs_to(found, source.metadata.epoch, mark)):
        raise _build_moved_error(mark, target)
    if found is None:
        return None
    metadata, underway = found
    if metadata.epoch != source.metadata.epoch:
        problem = "has another log in it" if underway is None else "has been begun to be filled from another log"
        raise StoreError(
            f"{target.name} {problem} (epoch {metadata.epoch}, not {source.metadata.epoch}). Nothing was changed."
        )
    return found


def _build_moved_error(mark: MovedMarker, target: MigrationTarget) -> MovedError:
    return MovedError(f"the log has been moved to {mark.target}, so it is not moved to {target.name}", mark.target)


def _belongs_to(found: tuple[LogMetadata, PendingMove | None], epoch: str, mark: MovedMarker) -> bool:
    metadata, underway = found
    return metadata.epoch == epoch and (underway is None or underway.id == mark.move)


class _LogMigration:
    def __init__(self, source: MigrationSource, target: MigrationTarget, report: ReportProgress) -> None:
        self._source = source
        self._target = target
        self._report = report

    async def run(self) -> MigrationOutcome:
        """As the function says."""
        source, target = self._source, self._target
        found = await _find_target_log(source, target)
        is_marked = source.load_marker() is not None
        underway = await self._begin() if found is None else found[1]
        if underway is None:
            if not is_marked:
                await self._mark_source_moved()
            return self._build_outcome(await target.load_heads(), source.load_state(), is_new=not is_marked)
        if found is not None:
            await target.resume(found[0])
            await self._check_same_history()
        # Also if the file is marked already: whatever the database has lost since then (a standby that was behind has
        # taken its place) is copied again, and the mark is on the disk, before anybody may write.
        await self._copy_while_in_use()
        await self._copy_remainder(underway)
        await target.finish(underway)
        state = source.load_state()
        return self._build_outcome(state.heads, state, is_new=True)

    async def _begin(self) -> PendingMove:
        source = self._source
        underway = PendingMove(source.metadata.epoch, _now_ms(), secrets.token_hex(8))
        # Before the first record is read: what is erased from now on makes the numbers differ at the end.
        await self._target.begin(source.metadata, source.load_state().erasures, underway)
        return underway

    def _build_outcome(self, heads: dict[int, LaneHead], state: SourceState, *, is_new: bool) -> MigrationOutcome:
        records = count_records(heads, state.gaps)
        return MigrationOutcome(
            self._source.metadata.epoch, records, len(heads), is_new, self._source.list_foreign_tables()
        )

    # --- while the file is in use

    async def _copy_while_in_use(self) -> None:
        step = "copying"
        for _ in range(COPY_ROUNDS_MAX):
            state = self._source.load_state()
            self._source.make_durable()
            copied = await self._copy(state, step)
            if copied <= SLICE_ROWS:
                break
            step = "copying what came since"

    async def _copy(self, state: SourceState, step: str) -> int:
        """Copies records up to the heads, and says how many there were to copy."""
        reached = await self._target.load_progress()
        total = state.record_count
        copied_before = done = count_records({lane: LaneHead(at.position) for lane, at in reached.items()}, state.gaps)
        self._report(StepProgress(step, done, total))
        async with aclosing(_read_ahead(self._source.iterate_slices(state, reached))) as slices:
            async for part in slices:
                await self._target.save_slice(part)
                done += len(part.records)
                self._report(StepProgress(step, done, total))
        return done - copied_before

    async def _check_same_history(self) -> None:
        """What an earlier run has copied must be what the file says still, and not a copy of it that went on alone."""
        for lane, at in (await self._target.load_progress()).items():
            if at.height and self._source.load_block(lane, at.height) != await self._target.load_block(lane, at.height):
                raise StoreError(
                    f"{self._target.name} has been begun to be filled from this log, but lane {lane} has another "
                    f"history there (at height {at.height}). Drop its tables oncelog_* to begin anew."
                )

    # --- under the file's write lock

    async def _copy_remainder(self, underway: PendingMove) -> None:
        source, target = self._source, self._target
        with self._lock_source():
            mark = source.load_marker()
            if mark is not None and mark.move != underway.id:  # to another database, while this was under way
                raise _build_moved_error(mark, target)
            state = source.load_state()
            await self._copy(state, "copying the rest")
            if state.erasures != await target.count_erasures():
                self._report(StepProgress("erasing"))
                await target.erase(source.iterate_erasures(), state.record_count)
            self._report(StepProgress("side state"))
            await target.replace_side_state(source, state)
            await self._check_equal(state)
            source.save_marker(MovedMarker(target.name, _now_ms(), underway.id))

    async def _mark_source_moved(self) -> None:
        """The database is whole, but the file, or a copy of it that was brought back, knows nothing of that."""
        source, target = self._source, self._target
        with self._lock_source():
            if source.load_state().heads != await target.load_heads():
                raise StoreError(
                    f"{target.name} has this log already (epoch {source.metadata.epoch}), "
                    "and one of the two has gone on since then: "
                    "the file is a copy from before it was moved. Nothing was changed."
                )
            source.save_marker(MovedMarker(target.name, _now_ms(), ""))

    @contextmanager
    def _lock_source(self) -> Iterator[None]:
        """Nobody else writes to the file, so the database must answer soon. If it does not, they can write again."""
        self._source.lock()
        try:
            with self._target.use_locked_limit():
                yield
        finally:
            self._source.unlock()

    async def _check_equal(self, state: SourceState) -> None:
        """Raises CorruptError if the target is not what the source is."""
        self._report(StepProgress("comparing"))
        heads = await self._target.load_heads()
        for lane in sorted(state.heads.keys() | heads.keys()):
            if state.heads.get(lane) != heads.get(lane):
                raise CorruptError(
                    f"lane {lane} is not what was moved: {heads.get(lane)} in {self._target.name}, "
                    f"{state.heads.get(lane)} in the file. Nothing was opened; see `oncelog verify`"
                )
        counts = await self._target.count_rows(state.record_count)
        for name, count in self._source.count_rows().items():
            if counts[name] != count:
                raise CorruptError(
                    f"{self._target.name} has {counts[name]} {name}, and the file {count}. Nothing was opened; see "
                    "`oncelog verify`"
                )


async def _read_ahead(parts: Iterator[T]) -> AsyncGenerator[T, None]:
    """Each of them, while the next is already being read in a thread."""
    loop = asyncio.get_running_loop()
    next_part = loop.run_in_executor(None, next, parts, None)
    try:
        while (part := await asyncio.shield(next_part)) is not None:
            next_part = loop.run_in_executor(None, next, parts, None)
            yield part
    finally:
        # Whoever comes next uses the same connection, or closes it. Also if it is told twice to end.
        while not next_part.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([next_part])
        next_part.exception()  # looked at: what ended this is told, and not what was found in a part nobody asked for


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
