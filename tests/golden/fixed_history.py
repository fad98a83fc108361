"""Script: write a fixed history to a log and print verdicts, heads, proofs and identities.

    fixed_history.py PLACE

PLACE is `:memory:`, a file or a database address. With fixed sources (`golden.fixed_sources`), the output is the same
on every store.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import oncelog
from oncelog import proof

START_MS: Final = 1_767_225_600_000
STEP_MS: Final = 20 * 60_000
HLC: Final = START_MS << 16
NOTES: Final = oncelog.Policy(
    name="notes",
    key_bytes=(1, 64),
    order=oncelog.Order.STREAM,
    on_reuse=oncelog.OnReuse.REPLAY,
    retention=oncelog.kept_for(hours=1),
)
SHOP: Final = oncelog.deltas_scope("shop")
ACME: Final = oncelog.ledger_scope("acme")
VAULT: Final = oncelog.ledger_scope("acme", "vault/1")


@dataclass
class SteppedClock:
    """A clock that the script advances by 20 minutes before every commit."""

    now_ms: int = START_MS

    def wall_ms(self) -> int:
        return self.now_ms

    def elapsed_ms(self) -> int:
        return self.now_ms - START_MS + 1000

    def boot(self) -> str:
        return "one"


def print_line(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def event(number: int, *partitions: str, **more: Any) -> oncelog.Submission:
    body = {"type": "counted", "number": number, "text": "größe \u0000 𝄞", "value": 1e21}
    return oncelog.event(UUID(int=number), body, partitions or ("a",), actor="user:ann", client="laptop", **more)


def message(number: int, text: str, sender: str = "user:ann") -> oncelog.Submission:
    content = {"content": text, "content_type": "text/plain"}
    return oncelog.write(oncelog.CHAT, "chat/tea", UUID(int=number), content, actor=sender)


def note(number: int, text: str) -> oncelog.Submission:
    return oncelog.write(NOTES, f"notes/{number % 2}", f"note {number}", {"text": text}, actor="user:ben")


def transaction(sequence: int, *operations: Any, scope: str = ACME, number: int = 0) -> oncelog.Submission:
    return oncelog.transaction(scope, "till", sequence, operations, key=key(number or sequence), actor="client:till")


def change(before: Any, after: Any, counter: int, row_id: str = "tea") -> oncelog.Submission:
    found = oncelog.extract(before, after, client_id="till", hlc=HLC + counter, table="products", row_id=row_id)
    assert found is not None
    return oncelog.delta(SHOP, found, actor="client:till")


def result(fence: int) -> oncelog.Submission:
    return oncelog.Submission(
        policy=oncelog.RUNS,
        scope="campaign/7",
        key=RUN,
        fingerprint=b"",
        body=b'{"sent":3}',
        holder="worker",
        fence=fence,
    )


RUN: Final = oncelog.run_key("plan", 7, "mail", "send", "v1", {"to": ["ann", "ben"], "limit": 3})
LEASED: Final[dict[str, Any]] = {"policy": oncelog.RUNS, "scope": "campaign/7", "key": RUN, "holder": "worker"}
TEA: Final = {"name": "Tea", "price": 3.5, "tags": ["hot", None]}
SET: Final = oncelog.SetEntity
HISTORY: Final[Sequence[tuple[str, Sequence[Any], oncelog.Mode]]] = (
    ("events", [event(1), event(2, "b", "a", "b"), event(1)], oncelog.Mode.EACH),
    ("retried and conflicting events", [event(2, "a", "b"), oncelog.event(UUID(int=1), {"type": "other"}, ["a"])],
     oncelog.Mode.EACH),
    ("expected positions", [event(3, expected_position=2), event(4, expected_position=2)], oncelog.Mode.EACH),
    ("all or nothing", [event(5), event(6, expected_position=99)], oncelog.Mode.ALL),
    ("until refused", [event(7), event(8, expected_position=99), event(9)], oncelog.Mode.UNTIL_REFUSED),
    ("transaction", [transaction(1, SET("invoice/1", b"open"), oncelog.Relate("invoice/1", "owner", "ann"))],
     oncelog.Mode.EACH),
    ("transactions", [
        transaction(2, SET("invoice/1", b"paid", condition=oncelog.Condition(oncelog.Must.HAVE_VERSION, version=1))),
        transaction(2, SET("invoice/1", b"other"), number=22),
        transaction(4, SET("invoice/4", b"")),
        transaction(3, SET("invoice/1", b"x", condition=oncelog.Condition(oncelog.Must.NOT_EXIST))),
        transaction(3, oncelog.DeleteEntity("invoice/1"), oncelog.Unrelate("invoice/1", "owner", "ann")),
        transaction(1, SET("key", bytes(range(256)), expires_at_ms=START_MS + 10 * STEP_MS), scope=VAULT, number=31),
    ], oncelog.Mode.EACH),
    ("deltas", [change(None, TEA, 1), change(TEA, {**TEA, "price": 4}, 2), change(None, TEA, 1)], oncelog.Mode.ALL),
    ("late and deleting deltas",
     [change(TEA, {**TEA, "price": 2}, 0), change(TEA, None, 3), change(None, {}, 4, "milk")], oncelog.Mode.ALL),
    ("chat", [oncelog.OpenStream("chat/tea", "user:ann"), oncelog.SetMember("chat/tea", "user:ben", actor="user:ann"),
              message(1, "Hello"), message(2, "Hi", "user:ben"), message(3, "?", "user:eve"), message(1, "Hello"),
              message(1, "Bye"), oncelog.Acknowledge("chat/tea", "user:ben", 2),
              oncelog.Acknowledge("chat/tea", "user:ben", 9)], oncelog.Mode.EACH),
    ("notes", [note(1, "first"), note(2, "second")], oncelog.Mode.EACH),
    ("runs", [oncelog.Claim(**LEASED, fingerprint=b""), oncelog.Claim(**{**LEASED, "holder": "other"}, fingerprint=b""),
              oncelog.Renew(**LEASED, fence=1), result(9), result(1), result(1)], oncelog.Mode.EACH),
    ("failed run", [oncelog.Claim(**{**LEASED, "key": key(5)}, fingerprint=b""),
                    oncelog.Release(**{**LEASED, "key": key(5)}, fence=2, failure=b"broken")], oncelog.Mode.EACH),
    ("rates", [event(20), event(21)], oncelog.Mode.EACH),
    ("forgotten note", [note(1, "first, again")], oncelog.Mode.EACH),
    ("cursors", [oncelog.SetCursor("mirror", 3), oncelog.SetCursor("mirror", 1), oncelog.SetCursor("tea", 1, SHOP)],
     oncelog.Mode.EACH),
)  # fmt: skip


async def write_history(log: oncelog.Log, clock: SteppedClock) -> list[oncelog.Receipt]:
    receipts = []
    for title, items, mode in HISTORY:
        clock.now_ms += STEP_MS
        print_line(f"\n# {title}")
        for verdict in await log.submit_many(items, mode):
            print_line(verdict)
            if isinstance(verdict, oncelog.Committed):
                receipts.append(verdict.receipt)
    return receipts


async def change_history(log: oncelog.Log, clock: SteppedClock) -> None:
    clock.now_ms += STEP_MS
    print_line("\n# operations")
    print_line("erased", await log.erase(key=UUID(int=2), actor="user:ada"), await log.erase(partition="b"))
    compacted = await log.compact(SHOP, upto=2, actor="user:ada")
    print_line("compacted", compacted.deltas, compacted.upto, compacted.has_more, compacted.dropped, compacted.held_by)
    print_line("tenants", await log.set_tenants([oncelog.Tenant("ledger/acme", records_max=100)], actor="user:ada"))
    print_line("usage", await log.usage())
    print_line("consumers", await log.consumers())


async def print_state(log: oncelog.Log, receipts: Sequence[oncelog.Receipt]) -> None:
    print_line("\n# records")
    for lane in await log.heads():
        reading = await log.read(lane=lane)
        for record in reading.records:
            print_line(record)
    print_line("\n# heads")
    print_line("epoch", log.epoch)
    for lane, head in sorted((await log.heads()).items()):
        print_line(lane, head)
    print_line("\n# proofs")
    for receipt in receipts:
        document = proof.proof_document(await log.prove(receipt))
        print_line(proof.verify(document))
        print_line(proof.encode(document).decode())


def print_identities() -> None:
    print_line("# identities")
    print_line("run key", RUN.hex(), oncelog.run_key_v1("plan", 7, "mail", "request", 1, {"to": ["ann"]}).hex())
    print_line("canonical", oncelog.canonical(TEA), oncelog.canonical_args({"b": [1, 2], "a": {"x": None}}))
    print_line("scopes", ACME, VAULT, SHOP, oncelog.event_scope("acme"))
    for submission in (
        event(1),
        transaction(1, SET("a", b"b")),
        change(None, TEA, 1),
        message(1, "Hello"),
        note(1, "n"),
    ):
        print_line(submission.policy.name, submission.key.hex(), submission.fingerprint.hex(), submission.body)


async def main(place: str) -> None:
    print_identities()
    clock = SteppedClock()
    settings = oncelog.Settings(lanes=2, eviction_interval=8)
    async with oncelog.open(place, policies=[NOTES], settings=settings, clock=clock) as log:
        receipts = await write_history(log, clock)
        await change_history(log, clock)
        await print_state(log, receipts)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
