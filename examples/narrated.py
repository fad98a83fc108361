"""A tour of the built-in policies: the outcomes of writes that are sent twice.

Run it with `make tour`. The log is in memory, and the program sets its clock.
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


class Tour:
    """An in-memory log with its own clock. Prints what it does."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.now_ms = 1_800_000_000_000

    def print_title(self, text: str) -> None:
        """Print the title of a chapter."""
        print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")

    def print_text(self, text: str) -> None:
        """Print a paragraph."""
        print(fill(text, 92, initial_indent="  ", subsequent_indent="  "))

    def submit(self, description: str, item: Submission | Claim | SetMember) -> Verdict:
        """Submit one item, and print its description and its outcome."""
        [[verdict]] = self.log.submit([Request((item,))], self.now_ms)
        print(f"  {description:<58} → {format_verdict(verdict)}")
        return verdict


def format_place(receipt: Receipt | None) -> str:
    """Return the sequence of a write or, without one, its position."""
    if receipt is None:
        return "a position that was evicted"
    return f"sequence {receipt.sequence}" if receipt.sequence else f"position {receipt.position}"


def format_verdict(verdict: Verdict) -> str:
    """Return a verdict as text."""
    match verdict:
        case Committed(receipt):
            return f"committed as {format_place(receipt)}"
        case Replayed(receipt, mismatch):
            return f"known: {format_place(receipt)} again" + (", and the content differs" if mismatch else "")
        case Granted(fence, _):
            return f"may run, under fencing number {fence}"
        case Applied(_):
            return "done"
        case Refused(reason, message):
            return f"refused ({reason.value}): {message}"


def show_events(tour: Tour) -> None:
    """Submit events. The caller chooses the id, which the log never forgets."""
    tour.print_title("1. An event log: the caller chooses an id")
    body = canonical({"type": "order.placed", "order": 17, "total": 99.0})
    order = Submission(
        policy=EVENTS,
        scope="",
        key=uuid.UUID("0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10").bytes,
        fingerprint=fingerprint(("orders",), body),
        partitions=("orders",),
        body=body,
    )
    tour.submit("an order is placed", order)
    tour.submit("the answer was lost, so it is sent again", order)
    changed = canonical({"type": "order.placed", "order": 17, "total": 990})
    tour.submit(
        "another order under the same id",
        Submission(policy=EVENTS, scope="", key=order.key, fingerprint=fingerprint(("orders",), changed), body=changed),
    )
    tour.print_text(
        "99.0 and 99 are the same number in canonical JSON. A client that sends 99 retries; 990 is refused."
    )


def show_chat(tour: Tour) -> None:
    """Send chat messages. The first content under an id wins, and the log forgets the id after seven days."""
    tour.print_title("2. A chat: the first content wins, and the log remembers an id for seven days")
    tour.submit("Ann joins", SetMember("chat/42", "user:ann"))

    def message(text: str, actor: str = "user:ann") -> Submission:
        return Submission(
            policy=CHAT,
            scope="chat/42",
            key=uuid.UUID("550e8400-e29b-41d4-a716-446655440000").bytes,
            fingerprint=sha256(f"{actor}\n{text}".encode()).digest(),
            actor=actor,
            body=text.encode(),
        )

    tour.submit("Ann says hello", message("hello"))
    tour.submit("her phone retries in the tunnel", message("hello"))
    tour.submit("a bug reuses the id for another message", message("good night"))
    tour.submit("Eve is not a member, and tries the same id", message("hello", "user:eve"))
    tour.now_ms += 7 * DAY_MS
    tour.submit("seven days later the id is free again", message("hello"))


def show_ledger(tour: Tour) -> None:
    """Write transactions. Each client has a sequence without gaps, and operations have conditions."""
    tour.print_title("3. A ledger: each client numbers its writes, and conditions guard them")

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

    tour.submit("write 1 opens the account", write(1, b"100"))
    tour.submit("write 3 arrives before write 2", write(3, b"80"))
    tour.submit("write 2, if the balance is still 90", write(2, b"80", Condition(Must.HAVE_VALUE, value=b"90")))
    tour.submit("write 2 again, if the balance is 100", write(2, b"80", Condition(Must.HAVE_VALUE, value=b"100")))


def show_runs(tour: Tour) -> None:
    """Run a tool that must not run twice."""
    tour.print_title("4. A tool run: one caller runs it, the others get its result")
    key = run_key("plan-1", 7, "tool.execute", "send_invoice", "v1", {"customer": 12})

    def claim(holder: str) -> Claim:
        return Claim(policy=RUNS, scope="campaign/7", key=key, fingerprint=b"", holder=holder)

    tour.submit("worker A claims the run that sends the invoice", claim("A"))
    tour.submit("worker B claims the same run", claim("B"))
    tour.now_ms += 30_000
    tour.submit("A does not answer; B claims it after A's lease expires", claim("B"))

    def result(holder: str, fence: int) -> Submission:
        return Submission(
            policy=RUNS, scope="campaign/7", key=key, fingerprint=b"", body=b'"sent"', holder=holder, fence=fence
        )

    tour.submit("A was only slow, and reports its result", result("A", 1))
    tour.submit("B reports its result", result("B", 2))
    tour.submit("worker C claims the same run", claim("C"))


def show_deltas(tour: Tour) -> None:
    """Merge row edits, which give the same rows regardless of the order in which they arrive."""
    tour.print_title("5. Offline rows: the identity is a hash of the content, and the last writer wins")

    def change(client: str, ahead_ms: int, before: dict[str, object], after: dict[str, object]) -> Submission:
        delta = extract(
            before, after, client_id=client, hlc=(tour.now_ms + ahead_ms) << 16, table="todos", row_id="milk"
        )
        assert delta is not None
        return Submission(
            policy=DELTAS, scope="gateway/home", key=delta.delta_id, fingerprint=delta.op.value.encode(), delta=delta
        )

    before: dict[str, object] = {"done": False, "litres": 1, "note": ""}
    phone = change("phone", 2, before, {**before, "done": True, "litres": 2})
    laptop = change("laptop", 1, before, {**before, "litres": 6, "note": "organic"})
    tour.submit("the phone's edit, which is later, arrives first", phone)
    tour.submit("the laptop's edit, which is earlier, arrives second", laptop)
    tour.submit("the phone pushes its whole queue again", phone)
    row = tour.log.snapshot.rows["gateway/home", "todos", "milk"]
    tour.print_text(f"The row, on every replica: { ({name: value.decode() for name, value in row.values.items()}) }")


def show_proof(tour: Tour) -> None:
    """Prove that a record is in its block, and that a changed record is not."""
    tour.print_title("6. A proof detects every change of a record")
    log = tour.log
    block = log.blocks[0]
    leaf = hash_leaf(encode_record_header(log.records[0]), hash_body(log.salts[0], log.records[0].body))
    inclusion = prove([leaf], 0)
    tour.print_text(f"The order is in block {block.height} of lane {block.lane}, hash {block.hash.hex()[:16]}…")
    forged = replace(log.records[0], body=log.records[0].body.replace(b"99", b"10"))
    for name, record in (("as it was written", log.records[0]), ("with another total", forged)):
        print(f"  does the proof hold, {name}? {verify(record, log.salts[0], inclusion, block)}")


def main() -> None:
    """Print the tour. Stop without an error if the reader closes the pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        print_chapters()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"cannot write the output: {error.strerror}")


def print_chapters() -> None:
    """Print all chapters, and commands to try next."""
    tour = Tour()
    for show_chapter in (show_events, show_chat, show_ledger, show_runs, show_deltas, show_proof):
        show_chapter(tour)
    print(
        """
Try next:

  echo '{"b": 1.0, "a": [1e0, -0]}' | .venv/bin/oncelog key jcs
  echo '{"partitions": ["orders"], "event": {"type": "order.placed"}}' | .venv/bin/oncelog key fingerprint
  .venv/bin/oncelog --help
  less docs/architecture.md
"""
    )


if __name__ == "__main__":
    main()
