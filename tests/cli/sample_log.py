"""Sample log that covers lanes, policies, erased records, sealed keys, evictions and leases."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from core.item_builders import delta, event, key, message, result, transaction
from oncelog.core.identity import normal_partitions
from oncelog.core.operations import SetEntity
from oncelog.core.policy import BUILT_IN_POLICIES, OnReuse, Order, Policy, kept_for
from oncelog.core.values import (
    Acknowledge,
    Claim,
    Item,
    Rate,
    Request,
    SetCursor,
    SetMember,
    Settings,
    Submission,
)
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import BatchResult, Store

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
NOTES = Policy(
    name="notes", key_bytes=(1, 64), order=Order.STREAM, on_reuse=OnReuse.REPLAY, retention=kept_for(hours=1)
)
SEAL_KEYS = 8


class SetClock:
    """A clock that a test sets. Wall clock and elapsed time advance together."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def elapsed_ms(self) -> int:
        return self.now_ms - START_MS + 1000

    def boot(self) -> str:
        return "the only one"


def note(number: int, scope: str, text: str = "note") -> Submission:
    return Submission(policy=NOTES, scope=scope, key=key(number, 4), fingerprint=text.encode(), body=text.encode())


def full_event(number: int, partitions: Sequence[str]) -> Submission:
    body = f'{{"type":"tick","n":{number}}}'
    partitions = normal_partitions(partitions)
    rate = Rate(1, burst=100)
    return event(number, f"fp{number}", partitions=partitions, body=body.encode(), actor="user:zoë", rate=rate)


def batches(rounds: int) -> list[list[Item]]:
    """Return batches of about eleven records per round, under five policies and in eight streams."""
    made: list[list[Item]] = [
        [SetMember(f"chat/{chat}", "user:ann") for chat in range(3)],
        [SetMember("empty", "user:bob")],
        [transaction(1, 1, client="c3", content="first")],
    ]
    for turn in range(1, rounds + 1):
        ledger = [
            transaction(
                None if client == "c2" else turn * 10,
                turn,
                SetEntity("balance", b"%d" % turn),
                client=client,
                content=f"t{turn}",
                body=b"{}",
                actor=client,
            )
            for client in ("c1", "c2")
        ]
        partitions = ["orders", f"customer/{turn % 5}"] if turn % 3 else ["größe", "orders", 'with "quotes"']
        made.append([full_event(turn * 2, partitions), full_event(turn * 2 + 1, ["orders"]), *ledger])
        made.append([message(turn, f"hello {turn}", scope=f"chat/{turn % 3}"), note(turn, f"notes/{turn % 2}")])
        made.append([result(turn, scope=f"campaign/{turn % 2}"), delta(turn, hlc=START_MS << 16, title=f"t{turn}")])
        made.append([note(7_000, "notes/again", f"again {turn}")])  # the same key every hour
    made.append([transaction(1, 1, client="c3", content="forgotten, and new again")])
    made.append([Acknowledge("chat/1", "user:ann", 3), SetCursor("mailer", 5), SetCursor("mirror", 2, "chat/1")])
    made.append(
        [Claim(policy=BUILT_IN_POLICIES[3], scope="campaign/1", key=key(9_999), fingerprint=b"", holder="worker")]
    )
    return made


def open_store(log: Path | str, clock: SetClock, seal_keys: int = SEAL_KEYS) -> Store:
    """Return the store of a file or of a database address."""
    settings = Settings(lanes=4, eviction_interval=16)
    draw = random.Random(7).randbytes
    if isinstance(log, str):
        return PostgresStore(log, settings, clock=clock, draw=draw, keep_clock_ms=0)
    return SqliteStore(log, settings, clock=clock, draw=draw, seal_keys=seal_keys)


async def _write(log: Path | str, rounds: int, seal_keys: int, each: Callable[[], None] | None) -> list[BatchResult]:
    clock = SetClock()
    store = open_store(log, clock, seal_keys)
    await store.open()
    try:
        await store.declare([*BUILT_IN_POLICIES, NOTES])
        decided = []
        for items in batches(rounds):
            clock.now_ms += HOUR_MS // 4
            decided.append(await store.commit([Request((item,)) for item in items]))
            if each is not None:
                each()
        for lane in range(5):
            await store.erase(lane, [2, 5])
        return decided
    finally:
        await store.close()


def make_log(
    log: Path | str, rounds: int = 30, seal_keys: int = SEAL_KEYS, each: Callable[[], None] | None = None
) -> list[BatchResult]:
    """Write the sample log, and call `each` after every commit."""
    return asyncio.run(_write(log, rounds, seal_keys, each))


def append(log: Path | str, *items: Item, now_ms: int = START_MS + 100 * HOUR_MS) -> None:
    """Commit more items to a log."""

    async def write() -> None:
        store = open_store(log, SetClock(now_ms))
        await store.open()
        try:
            await store.commit([Request(items)])
        finally:
            await store.close()

    asyncio.run(write())
