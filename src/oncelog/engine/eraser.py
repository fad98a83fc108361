"""Erases the record bodies of an identity, a stream or a partition, or of deltas that a compaction drops.

Each transaction erases at most `ERASE_RECORDS` bodies and adds an audit record with the actor. Afterwards `scrub` waits
until the erased bytes are no longer on disk.

After a compaction, the eraser reads the gateway's rows and drops deleted rows that readers no longer need.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from oncelog.core.canonical import canonical
from oncelog.core.deltas import decode_stored_delta
from oncelog.core.identity import compute_lane, normal_partitions
from oncelog.core.limits import TOMBSTONES_MAX
from oncelog.core.policy import DELTAS
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.audit import COMPACT, ERASE, add_detail
from oncelog.core.rules.compaction import list_delete_ids
from oncelog.core.values import (
    Applied,
    DropTombstones,
    FoldRows,
    Item,
    KeyIdentity,
    Record,
    RecordAct,
    SetCursor,
    Tombstone,
    Verdict,
)
from oncelog.engine.audit import UNRECORDABLE, ActQueue
from oncelog.engine.read_results import Compacted
from oncelog.errors import CanonicalError, StoreUnavailableError
from oncelog.storage.store import Consumer, Query, RowPage, Store

ERASE_RECORDS = 500
"""Maximum number of records that one transaction erases."""
SCRUB_ATTEMPTS = 200
SCRUB_PAUSE_S = 0.05
"""Pause between attempts to empty the write-ahead log. All attempts together take about ten seconds."""
COMPACTION_CONSUMER: Final = "oncelog.compaction"
"""Consumer whose cursor is the sequence up to which a stream is compacted."""
_PAGE_BYTES_MAX: Final = 8 * 2**20

Submit = Callable[[Item], Awaitable[Verdict]]


@dataclass(slots=True, eq=False)
class Eraser:
    """Erases bodies in the store of one log."""

    _store: Store
    _submit: Submit
    _acts: ActQueue
    _drop_buffered: Callable[[], None]
    """Called after each transaction, because subscribers must not receive erased bodies."""
    _clear_caches: Callable[[], None]

    async def erase_identity(self, identity: KeyIdentity, actor: str) -> int:
        """Erase the bodies under an identity. Return how many were erased."""
        async with self._purge():
            key_status = await self._store.get_key_status(identity)
            record = key_status.record
            if record is None:
                return 0
            act = RecordAct(
                act=ERASE,
                actor=actor,
                scope=record.scope if record.sequence else "",
                lane=record.lane,
                target=record.key.hex(),
                details=canonical({"policy": record.policy}),
            )
            return await self._erase(record.lane, key_status.positions, act)

    async def erase_stream(self, stream: str, actor: str) -> int:
        """Erase the bodies of a stream. Return how many were erased."""
        async with self._purge():
            act = RecordAct(act=ERASE, actor=actor, scope=stream, target=stream)
            return await self._erase_all(Query(stream=stream, limit=ERASE_RECORDS), act)

    async def erase_partition(self, partition: str, actor: str) -> int:
        """Erase the bodies of a partition in all lanes, because it may also contain records of streams."""
        async with self._purge():
            partitions = normal_partitions((partition,))
            act = RecordAct(act=ERASE, actor=actor, target=partitions[0] if partitions else "")
            erased = 0
            for lane in await self._store.heads():
                query = Query(lane=lane, partitions=partitions, limit=ERASE_RECORDS)
                erased += await self._erase_all(query, replace(act, lane=lane))
            return erased

    async def compact(  # noqa: PLR0913 - as `Log.compact`
        self,
        scope: str,
        *,
        upto: int | None,
        keep: int,
        limit: int,
        tombstone_age_ms: int,
        after_row: tuple[str, str],
        rows_max: int,
        actor: str,
    ) -> Compacted:
        """Drop the bodies of deltas up to a sequence, or of all but the newest, and then drop old deleted rows."""
        identity = (scope, COMPACTION_CONSUMER)
        read_set = ReadSet(
            lanes={compute_lane(scope, self._store.settings.lanes)}, streams={scope}, consumers={identity}
        )
        known = (await self._store.side_state(read_set)).snapshot
        newest, after = known.streams.get(scope, 0), known.consumers.get(identity, 0)
        if upto is None:
            wanted = await self._store.sequence_before(scope, newest, max(0, keep) + 1)
        else:
            wanted = min(newest, upto)
        bound = min(wanted, await self._store.sequence_after(scope, after, max(0, limit)))
        erased = 0
        if bound > after:
            async with self._purge():
                act = RecordAct(act=COMPACT, actor=actor, scope=scope, details=canonical({"upto": bound}))
                query = Query(stream=scope, after=after, upto=bound, limit=ERASE_RECORDS)
                erased = await self._erase_all(query, act, policy=DELTAS.name)
            await self._submit(SetCursor(COMPACTION_CONSUMER, bound, scope))
            if bound < wanted:
                return Compacted(erased, bound, has_more=True)
        upto = max(bound, after)
        if upto == 0:
            return Compacted(0, 0)
        swept = await sweep_tombstones(
            self._store,
            self._submit,
            scope,
            upto=upto,
            age_ms=tombstone_age_ms,
            after=after_row,
            rows_max=rows_max,
            actor=actor,
        )
        return replace(swept, deltas=erased)

    @asynccontextmanager
    async def _purge(self) -> AsyncIterator[None]:
        """Clear the caches after an erasure, even a failed one, and wait until the bytes are no longer on disk."""
        try:
            yield
        finally:
            self._clear_caches()
        await self.scrub()

    async def _erase(self, lane: int, positions: Sequence[int], act: RecordAct) -> int:
        """Erase bodies and record the act in the same transaction, or later if it cannot be recorded now."""
        try:
            return await self._store.erase(lane, positions, act)
        except UNRECORDABLE:
            erased = await self._store.erase(lane, positions)
            if erased:
                self._acts.put(add_detail(act, "records", erased))
            return erased

    async def _erase_all(self, query: Query, act: RecordAct, policy: str | None = None) -> int:
        """Erase the bodies of all records that a query selects, or only of those under one policy. Return how many were
        erased."""
        erased = 0
        while True:
            page = await self._store.read(query)
            full = [record for record in page.records if not record.erased and policy in (None, record.policy)]
            if full and act.act == COMPACT:
                await self._commit_fold(build_fold(query.stream or "", full))
            if full:
                erased += await self._erase(full[0].lane, [record.position for record in full], act)
                self._drop_buffered()
            if not page.has_more:
                return erased
            query = replace(query, after=page.next, upto=page.upto)

    async def _commit_fold(self, fold: FoldRows) -> None:
        """Commit the digests of rows before the bodies of their deltas are dropped.

        The bodies are dropped even if this commit fails, for example on a full disk. `verify` then cannot check these
        rows.
        """
        if not fold.rows:
            return
        with suppress(*UNRECORDABLE):
            await _apply(self._submit, fold)

    async def scrub(self) -> None:
        """Wait until no erased bytes are left on disk, including bytes that an earlier call failed to remove.

        Raises:
            StoreUnavailableError: a reader holds an old snapshot of the log open.
        """
        for _ in range(SCRUB_ATTEMPTS):
            if await self._store.scrub():
                return
            await asyncio.sleep(SCRUB_PAUSE_S)
        raise StoreUnavailableError(
            "the content is erased, but its bytes are still on the disk, because a reader (a backup, a verification) "
            "holds an old snapshot of the log; erase it again when the reader is done"
        )


async def _apply(submit: Submit, item: FoldRows | DropTombstones) -> Applied:
    verdict = await submit(item)
    if not isinstance(verdict, Applied):
        raise TypeError(f"{type(item).__name__} was answered with {verdict!r}")
    return verdict


# --- compaction


def build_fold(scope: str, records: Sequence[Record]) -> FoldRows:
    """Build the fold of the rows that these deltas of a stream changed, before the bodies of the deltas are dropped."""
    rows: dict[tuple[str, str], None] = {}
    ranges: list[tuple[int, int]] = []
    for record in records:
        try:
            delta = decode_stored_delta(record.body)
        except (CanonicalError, msgspec.MsgspecError):
            continue  # an application wrote it in a different format: its row is unknown, and no fold covers it
        rows[delta.table, delta.row_id] = None
        if ranges and ranges[-1][1] == record.sequence - 1:
            ranges[-1] = (ranges[-1][0], record.sequence)
        else:
            ranges.append((record.sequence, record.sequence))
    return FoldRows(scope, tuple(ranges), tuple(rows))


async def sweep_tombstones(  # noqa: PLR0913 - each is passed by name
    store: Store,
    submit: Submit,
    scope: str,
    *,
    upto: int,
    age_ms: int,
    after: tuple[str, str],
    rows_max: int,
    actor: str = "",
) -> Compacted:
    """Drop old deleted rows, as far as `core.rules.compaction` allows.

    Reads at most `rows_max` rows after a table and row id. `upto` is the sequence up to which the stream is compacted.
    """
    consumers = [consumer for consumer in await store.consumers() if consumer.scope == scope]
    names = tuple(consumer.name for consumer in consumers)
    slowest = min(
        (consumer for consumer in consumers if consumer.name != COMPACTION_CONSUMER),
        key=lambda consumer: consumer.cursor,
        default=None,
    )
    lane = compute_lane(scope, store.settings.lanes)
    old_ms = (await store.side_state(ReadSet(lanes={lane}))).get_time_ms(lane) - age_ms
    dropped, is_held = 0, False
    next_row: tuple[str, str] | None = after
    while next_row is not None and rows_max > 0:
        page = await store.rows(scope, "", next_row, min(TOMBSTONES_MAX, rows_max), _PAGE_BYTES_MAX)
        found = [tombstone for tombstone in await _list_tombstones(store, scope, page) if tombstone.sequence <= upto]
        if found:
            dropped += (await _apply(submit, DropTombstones(scope, tuple(found), age_ms, names, actor))).count
            is_held = is_held or _is_held(found, slowest, old_ms)
        next_row = page.rows[-1][:2] if page.has_more else None
        rows_max -= len(page.rows)
    return Compacted(0, upto, dropped=dropped, next_row=next_row, held_by=slowest if is_held else None)


def _is_held(found: Sequence[Tombstone], slowest: Consumer | None, old_ms: int) -> bool:
    return slowest is not None and any(
        tombstone.sequence > slowest.cursor and tombstone.log_time_ms <= old_ms for tombstone in found
    )


async def _list_tombstones(store: Store, scope: str, page: RowPage) -> list[Tombstone]:
    """Return the deleted rows of a page, except rows whose DELETE is no longer in the log."""
    deleted = [(place, list_delete_ids(*place)) for place in page.rows if not place[2].exists]
    ids = [identity for _, identities in deleted for identity in identities]
    known = await store.find_keys([(DELTAS.name, scope, "", identity) for identity in ids]) if ids else []
    receipts = {
        identity: remembered.receipt for identity, remembered in zip(ids, known, strict=True) if remembered is not None
    }
    tombstones = []
    for (table, row_id, row), identities in deleted:
        found = [receipts[identity] for identity in identities if identity in receipts]
        if found:
            newest = max(found, key=lambda receipt: receipt.sequence)
            tombstones.append(Tombstone(table, row_id, row.deleted, newest.sequence, newest.log_time_ms))
    return tombstones
