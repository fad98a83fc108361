"""Erasure of records' bodies: of one identity, of all records of a query, or of deltas that a compaction drops.

Each transaction erases at most `ERASE_RECORDS` bodies and records the act with its actor. Afterwards `scrub` waits
until the erased bytes have left the disk.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from oncelog.core.canonical import canonical
from oncelog.core.rules.audit import COMPACT, ERASE, add_detail
from oncelog.core.values import Applied, FoldRows, Item, KeyIdentity, RecordAct, Verdict
from oncelog.engine.audit import UNRECORDABLE
from oncelog.engine.compaction import build_fold
from oncelog.errors import StoreUnavailableError
from oncelog.storage.store import Query, Store

ERASE_RECORDS = 500
"""Records that one transaction erases."""
SCRUB_ATTEMPTS = 200
SCRUB_PAUSE_S = 0.05
"""Together ten seconds for emptying the write-ahead log between commits."""


class ActSink(Protocol):
    """Where an act is recorded later that could not be recorded in its transaction."""

    def put(self, act: RecordAct) -> None:
        """Record the act as soon as the log can be written."""


class Eraser:
    """Erases bodies in the store of one log."""

    def __init__(
        self,
        store: Store,
        submit: Callable[[Item], Awaitable[Verdict]],
        acts: ActSink,
        on_erased: Callable[[], None],
    ) -> None:
        """`on_erased` is called after each transaction: subscribers drop the records that they have buffered."""
        self._store = store
        self._submit = submit
        self._acts = acts
        self._on_erased = on_erased

    async def erase_identity(self, identity: KeyIdentity, actor: str) -> int:
        """Erase the body of the record of an identity. Return how many bodies were erased."""
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

    async def _erase(self, lane: int, positions: Sequence[int], act: RecordAct) -> int:
        """Erase bodies and record it in one transaction, or record it later if it cannot be recorded now."""
        try:
            return await self._store.erase(lane, positions, act)
        except UNRECORDABLE:
            erased = await self._store.erase(lane, positions)
            if erased:
                self._acts.put(add_detail(act, "records", erased))
            return erased

    async def erase_all(self, query: Query, act: RecordAct, policy: str | None = None) -> int:
        """Erase the bodies of all records of a query, or of those of one policy. Return how many were erased."""
        erased = 0
        while True:
            page = await self._store.read(query)
            full = [record for record in page.records if not record.erased and policy in (None, record.policy)]
            if full and act.act == COMPACT:
                await self._commit_fold(build_fold(query.stream or "", full))
            if full:
                erased += await self._erase(full[0].lane, [record.position for record in full], act)
                self._on_erased()
            if not page.has_more:
                return erased
            query = replace(query, after=page.next, upto=page.upto)

    async def _commit_fold(self, fold: FoldRows) -> None:
        """Commit the digests of rows, before the bodies of their deltas are dropped.

        Without them, as on a full disk, `verify` cannot check these rows; the bodies are dropped all the same.
        """
        if not fold.rows:
            return
        with suppress(*UNRECORDABLE):
            verdict = await self._submit(fold)
            if not isinstance(verdict, Applied):
                raise TypeError(f"a fold was answered with {verdict!r}")

    async def scrub(self) -> None:
        """Wait until no erased bytes are on the disk, also those of an earlier call that failed.

        Raises:
            StoreUnavailableError: a reader keeps the old state of the log.
        """
        for _ in range(SCRUB_ATTEMPTS):
            if await self._store.scrub():
                return
            await asyncio.sleep(SCRUB_PAUSE_S)
        raise StoreUnavailableError(
            "it is erased, but a reader (a backup, a verification) holds on to the log as it was, so that its bytes "
            "are still on the disk; erase it again when the reader is done"
        )
