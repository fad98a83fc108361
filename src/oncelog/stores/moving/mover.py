"""The move itself: while the file is in use, then under its write lock, then the end.

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
from oncelog.stores.about import About
from oncelog.stores.leaps import count_records
from oncelog.stores.moving.running import run
from oncelog.stores.moving.source import SLICE_ROWS, Source, opened_source
from oncelog.stores.moving.target import Target, opened_target
from oncelog.stores.moving.values import Move, Outcome, State
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.moved import Moved, moved
from oncelog.stores.sqlite.verifying import verify_quickly
from oncelog.stores.verifying.findings import Progress

ROUNDS_MAX: Final = 20
"""So often what came since is copied before the lock is taken, if it is much. Who writes faster has to wait."""

Report = Callable[[Progress], None]
T = TypeVar("T")


def move(path: str, address: str, report: Report) -> Outcome:
    """Moves the log in a file into a database that has none, or goes on with that.

    Raises StoreError (MovedError if it has been moved elsewhere) or SettingsError. Whatever it raises, and wherever it
    is killed: it can be run again.
    """
    _check(path, report)
    return run(_move(path, address, report))


def demand_possible(path: str, address: str) -> None:
    """Raises what `move` would raise at once, before its long look at the file. Changes nothing."""
    run(_demand_possible(path, address))


def _check(path: str, report: Report) -> None:
    with looking_at(path) as (connection, _):
        if moved(connection) is None:
            report(Progress("structure"))
            verify_quickly(connection)


async def _demand_possible(path: str, address: str) -> None:
    with opened_source(path) as source:
        async with opened_target(address) as target:
            await _found(source, target)


async def _move(path: str, address: str, report: Report) -> Outcome:
    with opened_source(path) as source:
        async with opened_target(address) as target:
            return await _Mover(source, target, report).move()


async def _found(source: Source, target: Target) -> tuple[About, Move | None] | None:
    """What is in the target, if it is of this log. Raises StoreError for anything else."""
    found, mark = await target.about(), source.moved()
    if mark is not None and (found is None or not _is_of(found, source.about.epoch, mark)):
        raise _moved_elsewhere(mark, target)
    if found is None:
        return None
    about, underway = found
    if about.epoch != source.about.epoch:
        what = "has another log in it" if underway is None else "has been begun to be filled from another log"
        raise StoreError(f"{target.name} {what} (epoch {about.epoch}, not {source.about.epoch}). Nothing was changed.")
    return found


def _moved_elsewhere(mark: Moved, target: Target) -> MovedError:
    return MovedError(f"the log has been moved to {mark.target}, so it is not moved to {target.name}", mark.target)


def _is_of(found: tuple[About, Move | None], epoch: str, mark: Moved) -> bool:
    about, underway = found
    return about.epoch == epoch and (underway is None or underway.id == mark.move)


class _Mover:
    def __init__(self, source: Source, target: Target, report: Report) -> None:
        self._source = source
        self._target = target
        self._report = report

    async def move(self) -> Outcome:
        """As the function says."""
        source, target = self._source, self._target
        found = await _found(source, target)
        is_marked = source.moved() is not None
        underway = await self._begun() if found is None else found[1]
        if underway is None:
            if not is_marked:
                await self._mark_what_was_moved()
            return self._outcome(await target.heads(), source.state(), is_new=not is_marked)
        if found is not None:
            await target.go_on(found[0])
            await self._demand_same_history()
        # Also if the file is marked already: whatever the database has lost since then (a standby that was behind has
        # taken its place) is copied again, and the mark is on the disk, before anybody may write.
        await self._copy_while_in_use()
        await self._copy_the_rest(underway)
        await target.end(underway)
        state = source.state()
        return self._outcome(state.heads, state, is_new=True)

    async def _begun(self) -> Move:
        source = self._source
        underway = Move(source.about.epoch, _now_ms(), secrets.token_hex(8))
        # Before the first record is read: what is erased from now on makes the numbers differ at the end.
        await self._target.begin(source.about, source.state().erasures, underway)
        return underway

    def _outcome(self, heads: dict[int, LaneHead], state: State, *, is_new: bool) -> Outcome:
        records = count_records(heads, state.gaps)
        return Outcome(self._source.about.epoch, records, len(heads), is_new, self._source.tables_of_others())

    # --- while the file is in use

    async def _copy_while_in_use(self) -> None:
        step = "copying"
        for _ in range(ROUNDS_MAX):
            state = self._source.state()
            self._source.settle()
            copied = await self._copy(state, step)
            if copied <= SLICE_ROWS:
                break
            step = "copying what came since"

    async def _copy(self, state: State, step: str) -> int:
        """Copies records up to the heads, and says how many there were to copy."""
        reached = await self._target.reached()
        total = state.records
        begun = done = count_records({lane: LaneHead(at.position) for lane, at in reached.items()}, state.gaps)
        self._report(Progress(step, done, total))
        async with aclosing(_ahead(self._source.slices(state, reached))) as slices:
            async for part in slices:
                await self._target.take(part)
                done += len(part.records)
                self._report(Progress(step, done, total))
        return done - begun

    async def _demand_same_history(self) -> None:
        """What an earlier run has copied must be what the file says still, and not a copy of it that went on alone."""
        for lane, at in (await self._target.reached()).items():
            if at.height and self._source.block(lane, at.height) != await self._target.block(lane, at.height):
                raise StoreError(
                    f"{self._target.name} has been begun to be filled from this log, but lane {lane} has another "
                    f"history there (at height {at.height}). Drop its tables oncelog_* to begin anew."
                )

    # --- under the file's write lock

    async def _copy_the_rest(self, underway: Move) -> None:
        source, target = self._source, self._target
        with self._locked():
            mark = source.moved()
            if mark is not None and mark.move != underway.id:  # to another database, while this was under way
                raise _moved_elsewhere(mark, target)
            state = source.state()
            await self._copy(state, "copying the rest")
            if state.erasures != await target.erasures():
                self._report(Progress("erasing"))
                await target.erase(source.erased(), state.records)
            self._report(Progress("side state"))
            await target.replace(source, state)
            await self._demand_equal(state)
            source.mark(Moved(target.name, _now_ms(), underway.id))

    async def _mark_what_was_moved(self) -> None:
        """The database is whole, but the file, or a copy of it that was brought back, knows nothing of that."""
        source, target = self._source, self._target
        with self._locked():
            if source.state().heads != await target.heads():
                raise StoreError(
                    f"{target.name} has this log already (epoch {source.about.epoch}), and one of the two has gone on "
                    "since then: the file is a copy from before it was moved. Nothing was changed."
                )
            source.mark(Moved(target.name, _now_ms(), ""))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else writes to the file, so the database must answer soon. If it does not, they can write again."""
        self._source.lock()
        try:
            with self._target.hurrying():
                yield
        finally:
            self._source.unlock()

    async def _demand_equal(self, state: State) -> None:
        """Raises CorruptError if the target is not what the source is."""
        self._report(Progress("comparing"))
        heads = await self._target.heads()
        for lane in sorted(state.heads.keys() | heads.keys()):
            if state.heads.get(lane) != heads.get(lane):
                raise CorruptError(
                    f"lane {lane} is not what was moved: {heads.get(lane)} in {self._target.name}, "
                    f"{state.heads.get(lane)} in the file. Nothing was opened; see `oncelog verify`"
                )
        counts = await self._target.counts(state.records)
        for name, count in self._source.counts().items():
            if counts[name] != count:
                raise CorruptError(
                    f"{self._target.name} has {counts[name]} {name}, and the file {count}. Nothing was opened; see "
                    "`oncelog verify`"
                )


async def _ahead(parts: Iterator[T]) -> AsyncGenerator[T, None]:
    """Each of them, while the next is already being read in a thread."""
    loop = asyncio.get_running_loop()
    reading = loop.run_in_executor(None, next, parts, None)
    try:
        while (part := await asyncio.shield(reading)) is not None:
            reading = loop.run_in_executor(None, next, parts, None)
            yield part
    finally:
        # Whoever comes next uses the same connection, or closes it. Also if it is told twice to end.
        while not reading.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([reading])
        reading.exception()  # looked at: what ended this is told, and not what was found in a part nobody asked for


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
