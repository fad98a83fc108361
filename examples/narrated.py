"""A narrated tour: what becomes of a write that is sent twice, under each of the built-in policies.

Run it with `make run`. Everything happens in memory, on a clock that the story sets.
"""

import io
import os
import sys
import uuid
from hashlib import sha256
from textwrap import fill

from msgspec.structs import replace

from oncelog import (
    CHAT,
    DELTAS,
    EVENTS,
    LEDGER,
    RUNS,
    Applied,
    Claim,
    Committed,
    Condition,
    Granted,
    MemoryLog,
    Must,
    Receipt,
    Refused,
    Replayed,
    Request,
    SetEntity,
    SetMember,
    Submission,
    Verdict,
    canonical,
    extract,
    fingerprint,
    request_hash,
    run_key,
)
from oncelog.core.proof import encode_record_header, hash_body, hash_leaf, prove, verify

DAY_MS = 86_400_000


class Story:
    """A log in memory, a clock, and a voice."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.now_ms = 1_800_000_000_000

    def title(self, text: str) -> None:
        """Starts a chapter."""
        print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")

    def say(self, text: str) -> None:
        """Tells something."""
        print(fill(text, 92, initial_indent="  ", subsequent_indent="  "))

    def submit(self, what: str, item: Submission | Claim | SetMember) -> Verdict:
        """Submits one item and prints what became of it."""
        [[verdict]] = self.log.submit([Request((item,))], self.now_ms)
        print(f"  {what:<58} → {in_words(verdict)}")
        return verdict


def place(receipt: Receipt | None) -> str:
    """Where a write stands, in the order its policy gives."""
    if receipt is None:
        return "a place long forgotten"
    return f"sequence {receipt.sequence}" if receipt.sequence else f"position {receipt.position}"


def in_words(verdict: Verdict) -> str:
    """A verdict for people."""
    match verdict:
        case Committed(receipt):
            return f"committed as {place(receipt)}"
        case Replayed(receipt, mismatch):
            return f"known: {place(receipt)} again" + (", and the content differs" if mismatch else "")
        case Granted(fence, _):
            return f"may run, under fencing number {fence}"
        case Applied(_):
            return "done"
        case Refused(reason, message):
            return f"refused ({reason.value}): {message}"


def events(story: Story) -> None:
    """An id chosen by the caller, remembered for ever."""
    story.title("1. An event log: the caller chooses an id")
    body = canonical({"type": "order.placed", "order": 17, "total": 99.0})
    order = Submission(
        policy=EVENTS,
        scope="",
        key=uuid.UUID("0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10").bytes,
        fingerprint=fingerprint(("orders",), body),
        partitions=("orders",),
        body=body,
    )
    story.submit("an order is placed", order)
    story.submit("the answer was lost, so it is sent again", order)
    changed = canonical({"type": "order.placed", "order": 17, "total": 990})
    story.submit(
        "another order under the same id",
        Submission(policy=EVENTS, scope="", key=order.key, fingerprint=fingerprint(("orders",), changed), body=changed),
    )
    story.say("99.0 and 99 are one number in canonical JSON: who sends 99 retries, who sends 990 is told so.")


def chat(story: Story) -> None:
    """The first content wins, for seven days."""
    story.title("2. A chat: the first content wins, and an id is remembered for seven days")
    story.submit("Ann joins", SetMember("chat/42", "user:ann"))

    def message(text: str, actor: str = "user:ann") -> Submission:
        return Submission(
            policy=CHAT,
            scope="chat/42",
            key=uuid.UUID("550e8400-e29b-41d4-a716-446655440000").bytes,
            fingerprint=sha256(f"{actor}\n{text}".encode()).digest(),
            actor=actor,
            body=text.encode(),
        )

    story.submit("Ann says hello", message("hello"))
    story.submit("her phone retries in the tunnel", message("hello"))
    story.submit("a bug reuses the id for other words", message("good night"))
    story.submit("Eve, who is no member, tries the same id", message("hello", "user:eve"))
    story.now_ms += 7 * DAY_MS
    story.submit("seven days later the id is free again", message("hello"))


def ledger(story: Story) -> None:
    """A dense sequence for each client, and conditions."""
    story.title("3. A ledger: each client numbers its writes, and conditions guard them")

    def write(number: int, balance: bytes, condition: Condition | None = None) -> Submission:
        operations = (SetEntity("account:7", balance, condition=condition),)
        return Submission(
            policy=LEDGER,
            scope="org/acme",
            key=number.to_bytes(16, "big"),
            fingerprint=request_hash(operations),
            client="billing",
            client_sequence=number,
            operations=operations,
        )

    story.submit("write 1 opens the account", write(1, b"100"))
    story.submit("write 3 comes before write 2", write(3, b"80"))
    story.submit("write 2, if the balance is still 90", write(2, b"80", Condition(Must.HAVE_VALUE, value=b"90")))
    story.submit("write 2 again, if it is 100", write(2, b"80", Condition(Must.HAVE_VALUE, value=b"100")))


def runs(story: Story) -> None:
    """A tool that must not run twice."""
    story.title("4. A tool run: one caller runs it, the others get its result")
    key = run_key("plan-1", 7, "tool.execute", "send_invoice", "v1", {"customer": 12})

    def claim(holder: str) -> Claim:
        return Claim(policy=RUNS, scope="campaign/7", key=key, fingerprint=b"", holder=holder)

    story.submit("worker A asks to send the invoice", claim("A"))
    story.submit("worker B asks for the same", claim("B"))
    story.now_ms += 30_000
    story.submit("A has died; after its lease B may", claim("B"))

    def result(holder: str, fence: int) -> Submission:
        return Submission(
            policy=RUNS, scope="campaign/7", key=key, fingerprint=b"", body=b'"sent"', holder=holder, fence=fence
        )

    story.submit("A was not dead, only slow, and reports its result", result("A", 1))
    story.submit("B reports its result", result("B", 2))
    story.submit("worker C asks once more", claim("C"))


def deltas(story: Story) -> None:
    """Rows that converge whatever the order of arrival."""
    story.title("5. Offline rows: an identity made from the content, the last writer wins")

    def change(client: str, ahead_ms: int, before: dict[str, object], after: dict[str, object]) -> Submission:
        delta = extract(
            before, after, client_id=client, hlc=(story.now_ms + ahead_ms) << 16, table="todos", row_id="milk"
        )
        assert delta is not None
        return Submission(
            policy=DELTAS, scope="gateway/home", key=delta.delta_id, fingerprint=delta.op.value.encode(), delta=delta
        )

    before: dict[str, object] = {"done": False, "litres": 1, "note": ""}
    phone = change("phone", 2, before, {**before, "done": True, "litres": 2})
    laptop = change("laptop", 1, before, {**before, "litres": 6, "note": "organic"})
    story.submit("the phone's edit, made later, arrives first", phone)
    story.submit("the laptop's edit, made earlier, arrives second", laptop)
    story.submit("the phone pushes its whole queue again", phone)
    row = story.log.snapshot.rows["gateway/home", "todos", "milk"]
    story.say(f"The row, on every replica: { ({name: value.decode() for name, value in row.values.items()}) }")


def proof(story: Story) -> None:
    """Every record can be proven to stand where it stands."""
    story.title("6. And nobody can change what has been written")
    log = story.log
    block = log.blocks[0]
    leaf = hash_leaf(encode_record_header(log.records[0]), hash_body(log.salts[0], log.records[0].body))
    inclusion = prove([leaf], 0)
    story.say(f"The order stands in block {block.height} of lane {block.lane}, hash {block.hash.hex()[:16]}…")
    forged = replace(log.records[0], body=log.records[0].body.replace(b"99", b"10"))
    for what, record in (("as it was written", log.records[0]), ("with another total", forged)):
        print(f"  does the proof hold, {what}? {verify(record, log.salts[0], inclusion, block)}")


def main() -> None:
    """Tells the whole story, to whoever listens for how long they like."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        tell()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"cannot go on: {error.strerror}")


def tell() -> None:
    """All chapters."""
    story = Story()
    for chapter in (events, chat, ledger, runs, deltas, proof):
        chapter(story)
    print(
        """
What to try next:

  echo '{"b": 1.0, "a": [1e0, -0]}' | .venv/bin/oncelog key jcs
  echo '{"partitions": ["orders"], "event": {"type": "order.placed"}}' | .venv/bin/oncelog key fingerprint
  .venv/bin/oncelog --help
  less docs/architecture.md
"""
    )


if __name__ == "__main__":
    main()
