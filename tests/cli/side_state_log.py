"""Logs with ledgers and deltas, whose side state `oncelog verify` rebuilds."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from cli.sample_log import HOUR_MS, START_MS, SetClock, open_store
from oncelog.core.deltas import delta
from oncelog.core.hlc import format_hlc
from oncelog.core.identity import delta_id
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import Condition, DeleteEntity, Must, Operation, Relate, SetEntity, Unrelate
from oncelog.core.policy import BUILT_IN_POLICIES
from oncelog.core.transactions import transaction
from oncelog.core.values import Committed, Item, Refused, Request, SetCursor, Verdict
from oncelog.engine.eraser import COMPACTION_CONSUMER, build_fold, sweep_tombstones
from oncelog.storage.store import Query, Store
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, Inconsistency, VerificationSummary, VerifyOptions
from oncelog.storage.verify.verification import verify_log

SCOPES: Final = ("ledger/acme", "ledger/acme/main", "ledger/größe")
GATEWAYS: Final = ("deltas/shop", "deltas/depot")
Log = Path | str


def row_delta(
    hlc: int, row_id: str = "r1", op: Op = Op.UPDATE, client: str = "phone", table: str = "todos", **columns: str
) -> RowDelta:
    """Return a delta with its real id. Values are JSON."""
    listed = [{"column": name, "value": int(value)} for name, value in columns.items()]
    return RowDelta(
        op=op,
        table=table,
        row_id=row_id,
        client_id=client,
        hlc=hlc,
        columns=tuple((name, value.encode()) for name, value in columns.items()),
        delta_id=delta_id(client, format_hlc(hlc), table, row_id, listed),
    )


class Writer:
    """A store, and the last transaction sequence of each client."""

    def __init__(self, store: Store, clock: SetClock) -> None:
        self.store = store
        self.clock = clock
        self._sequences: dict[tuple[str, str], int] = {}

    async def commit(self, *items: Item) -> list[Verdict]:
        """Commit items in one batch, each in a separate request."""
        decided = await self.store.commit([Request((item,)) for item in items])
        return [verdict for (verdict,) in decided.verdicts]

    async def transact(self, scope: str, *operations: Operation, client: str = "billing") -> Verdict:
        """Write a transaction with the client's next sequence, or with 1 if the client was forgotten."""
        sequence = self._sequences.get((scope, client), 0) + 1
        (verdict,) = await self.commit(transaction(scope, client, sequence, operations))
        if isinstance(verdict, Refused) and verdict.field == "client_sequence":
            sequence = verdict.current + 1
            (verdict,) = await self.commit(transaction(scope, client, sequence, operations))
        if isinstance(verdict, Committed):
            self._sequences[scope, client] = sequence
        return verdict

    async def push(self, gateway: str, *changes: RowDelta) -> list[Verdict]:
        """Commit deltas."""
        return await self.commit(*[delta(gateway, change) for change in changes])


def write(log: Log, work: Callable[[Writer], Coroutine[Any, Any, None]], now_ms: int = START_MS) -> None:
    """Open the log, run `work` with a writer, and close the log."""

    async def run() -> None:
        clock = SetClock(now_ms)
        store = open_store(log, clock)
        await store.open()
        try:
            await store.declare(list(BUILT_IN_POLICIES))
            await work(Writer(store, clock))
        finally:
            await store.close()

    asyncio.run(run())


async def write_sample(writer: Writer) -> None:
    """Write every kind of entity, relationship, row and client sequence that the records determine."""
    for number in range(1, 13):
        await writer.transact(
            "ledger/acme",
            SetEntity(f"invoice/{number}", b"%d" % number),
            Relate(f"invoice/{number}", "owner", "ann"),
            client=f"till{number % 3}",
        )
    await writer.transact("ledger/acme", DeleteEntity("invoice/3"), Unrelate("invoice/4", "owner", "ann"))
    await writer.transact("ledger/acme", Relate("invoice/5", "owner", "ann"), SetEntity("invoice/5", b"paid"))
    await writer.transact("ledger/acme", SetEntity("gone", b"x", START_MS + HOUR_MS))
    await writer.transact("ledger/acme", SetEntity("later", b"x", START_MS + 1000 * HOUR_MS))
    for number in range(6):
        hlc = (START_MS + number) << 16
        await writer.push("deltas/shop", row_delta(hlc, f"r{number}", Op.INSERT, title="1", done="0"))
        await writer.push("deltas/shop", row_delta(hlc + 1, f"r{number}", done="1", client="laptop"))
    await writer.push("deltas/shop", row_delta((START_MS + 99) << 16, "r5", Op.DELETE))
    writer.clock.now_ms += 2 * HOUR_MS
    await writer.transact("ledger/acme", SetEntity("last", b"x"))


def verify(log: Log, options: VerifyOptions = DEFAULT_OPTIONS) -> VerificationSummary | Inconsistency:
    """Verify a log, and return the last finding."""
    *_, last = verify_log(log, None, options)
    assert isinstance(last, (VerificationSummary, Inconsistency))
    return last


class RandomHistory:
    """Random transactions and deltas, with refusals, retries, expiry, eviction, erasure and dropped tombstones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def write(self, writer: Writer, steps: int) -> None:
        """Perform `steps` random actions."""
        for _ in range(steps):
            writer.clock.now_ms += self._random.choice((0, 1, 50, HOUR_MS, 7 * HOUR_MS))
            act = self._random.choices(
                (self._transact, self._push, self._erase, self._compact), weights=(12, 12, 1, 1)
            )[0]
            await act(writer)

    async def _transact(self, writer: Writer) -> None:
        operations = [self._random_operation(writer.clock.now_ms) for _ in range(self._random.randint(1, 4))]
        client = self._random.choice(("till", "billing", "web"))
        await writer.transact(self._random.choice(SCOPES), *operations, client=client)

    def _random_operation(self, now_ms: int) -> Operation:
        key, subject = self._random.choice("abcdé"), self._random.choice(("ann", "bob"))
        kind = self._random.randrange(6)
        if kind == 0:
            return DeleteEntity(key)
        if kind == 1:
            return Relate(key, "owner", subject)
        if kind == 2:
            return Unrelate(key, "owner", subject)
        expires_at_ms = self._random.choice((None, None, now_ms + 10, now_ms + 20 * HOUR_MS))
        conditions = (
            None,
            None,
            Condition(Must.NOT_EXIST),
            Condition(Must.EXIST),
            Condition(Must.HAVE_VALUE, value=b"1"),
        )
        return SetEntity(key, b"%d" % self._random.randrange(4), expires_at_ms, self._random.choice(conditions))

    async def _push(self, writer: Writer) -> None:
        changes = [self._random_delta(writer.clock.now_ms) for _ in range(self._random.randint(1, 3))]
        await writer.push(self._random.choice(GATEWAYS), *changes)

    def _random_delta(self, now_ms: int) -> RowDelta:
        hlc = (now_ms - self._random.choice((0, 0, HOUR_MS, 30 * HOUR_MS)) << 16) + self._random.randrange(4)
        op = self._random.choice((Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE))
        names = () if op is Op.DELETE else self._random.sample(("a", "b", "c"), self._random.randrange(4))
        columns = {name: str(self._random.randrange(9)) for name in names}
        return row_delta(hlc, self._random.choice(("r1", "r2", "r3")), op, self._random.choice(("x", "y")), **columns)

    async def _erase(self, writer: Writer) -> None:
        heads = await heads_of(writer.store)
        if heads:
            lane = self._random.choice(sorted(heads))
            await writer.store.erase(lane, [self._random.randint(1, heads[lane]) for _ in range(3)])

    async def _compact(self, writer: Writer) -> None:
        gateway = self._random.choice(GATEWAYS)
        newest = (await writer.store.read(Query(stream=gateway, limit=500))).upto
        if newest:
            has_folds = self._random.random() < 0.7  # earlier versions did not commit digests
            await compact(writer, gateway, self._random.randint(1, newest), has_folds=has_folds)


async def compact(writer: Writer, gateway: str, upto: int, *, has_folds: bool = True) -> int:
    """Erase the deltas up to a sequence and drop their tombstones. Return the number of dropped tombstones."""
    page = await writer.store.read(Query(stream=gateway, upto=upto, limit=500))
    full = [record for record in page.records if not record.erased]
    if full and has_folds:
        await writer.commit(build_fold(gateway, full))
    await writer.store.erase(page.records[0].lane, [record.position for record in full])
    await writer.commit(SetCursor(COMPACTION_CONSUMER, upto, gateway))

    async def submit(item: Item) -> Verdict:
        return (await writer.commit(item))[0]

    sweep = await sweep_tombstones(writer.store, submit, gateway, upto=upto, age_ms=0, after=("", ""), rows_max=1000)
    return sweep.dropped


async def heads_of(store: Store) -> dict[int, int]:
    """Return the newest position of every lane."""
    return {lane: head.position for lane, head in (await store.heads()).items()}
