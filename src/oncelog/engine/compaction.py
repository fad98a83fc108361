"""Compaction's second step: read the rows of a gateway, and drop deleted ones that no reader needs any more."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.deltas import decode_stored_delta
from oncelog.core.identity import compute_lane
from oncelog.core.limits import TOMBSTONES_MAX
from oncelog.core.policy import DELTAS
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.tombstones import list_delete_ids
from oncelog.core.values import Applied, DropTombstones, FoldRows, Item, Record, Tombstone, Verdict
from oncelog.errors import CanonicalError
from oncelog.storage.store import Consumer, RowPage, Store

COMPACTION_CONSUMER: Final = "oncelog.compaction"
"""The consumer whose cursor says up to where a stream has been compacted."""
_PAGE_BYTES_MAX: Final = 8 * 2**20


def build_fold(scope: str, records: Sequence[Record]) -> FoldRows:
    """Return the fold of the rows that some deltas of a stream changed, before their bodies are dropped."""
    rows: dict[tuple[str, str], None] = {}
    ranges: list[tuple[int, int]] = []
    for record in records:
        try:
            delta = decode_stored_delta(record.body)
        except (CanonicalError, msgspec.MsgspecError):
            continue  # of an application's own making: its row is not known, and no fold covers it
        rows[delta.table, delta.row_id] = None
        if ranges and ranges[-1][1] == record.sequence - 1:
            ranges[-1] = (ranges[-1][0], record.sequence)
        else:
            ranges.append((record.sequence, record.sequence))
    return FoldRows(scope, tuple(ranges), tuple(rows))


class TombstoneSweep(Struct, frozen=True):
    """What became of the deleted rows of a gateway."""

    dropped: int
    next_row: tuple[str, str] | None
    held_by: Consumer | None


async def sweep_tombstones(  # noqa: PLR0913 - each of them is asked for by its name
    store: Store,
    submit: Callable[[Item], Awaitable[Verdict]],
    scope: str,
    *,
    upto: int,
    age_ms: int,
    after: tuple[str, str],
    rows_max: int,
    actor: str = "",
) -> TombstoneSweep:
    """Read at most `rows_max` rows after a table and row id, and drop the deleted ones that `core.tombstones` lets go.

    `upto` is the sequence up to which the stream is compacted.
    """
    consumers = [consumer for consumer in await store.consumers() if consumer.scope == scope]
    names = tuple(consumer.name for consumer in consumers)
    slowest = min(
        (consumer for consumer in consumers if consumer.name != COMPACTION_CONSUMER),
        key=lambda consumer: consumer.cursor,
        default=None,
    )
    lane = compute_lane(scope, store.settings.lanes)
    dropped, is_held, old_ms = 0, False, (await store.side_state(ReadSet(lanes={lane}))).get_time_ms(lane) - age_ms
    while rows_max > 0:
        page = await store.rows(scope, "", after, min(TOMBSTONES_MAX, rows_max), _PAGE_BYTES_MAX)
        found = [consumer for consumer in await _list_tombstones(store, scope, page) if consumer.sequence <= upto]
        if found:
            verdict = await submit(DropTombstones(scope, tuple(found), age_ms, names, actor))
            if not isinstance(verdict, Applied):
                raise TypeError(f"tombstones were answered with {verdict!r}")
            dropped += verdict.count
            is_held = is_held or _is_held(found, slowest, old_ms)
        if not page.has_more:
            return TombstoneSweep(dropped, None, slowest if is_held else None)
        after = page.rows[-1][:2]
        rows_max -= len(page.rows)
    return TombstoneSweep(dropped, after, slowest if is_held else None)


def _is_held(found: list[Tombstone], slowest: Consumer | None, old_ms: int) -> bool:
    return slowest is not None and any(
        tombstone.sequence > slowest.cursor and tombstone.log_time_ms <= old_ms for tombstone in found
    )


async def _list_tombstones(store: Store, scope: str, page: RowPage) -> list[Tombstone]:
    """The deleted rows of a page whose DELETE the log still knows."""
    deleted = [(place, list_delete_ids(*place)) for place in page.rows if not place[2].exists]
    ids = [identity for _, identities in deleted for identity in identities]
    if not ids:
        return []
    known = await store.find_keys([(DELTAS.name, scope, "", identity) for identity in ids])
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
