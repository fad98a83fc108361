"""The writes that the processes of the crash tests submit, which are the same in every process.

This module imports quickly. A round consists of the writes of SUBMITTERS submitters. Each submitter makes one kind of
write, in order: events, messages to a chat that several submitters share, or transactions with a dense client sequence.
"""

from collections.abc import Iterator
from typing import Final

from oncelog.core.operations import DeleteEntity
from oncelog.core.policy import CHAT, EVENTS, LEDGER
from oncelog.core.values import Committed, Receipt, Replayed, SetMember, Submission, Verdict

SUBMITTERS: Final = 64
WRITES: Final = 4
"""Number of writes per submitter and round."""
CHATS: Final = 5
LEDGERS: Final = 3


def members() -> list[SetMember]:
    """Return the memberships that the chat messages require."""
    return [SetMember(f"chat/{submitter % CHATS}", f"user:{submitter}") for submitter in range(1, SUBMITTERS, 3)]


def write(round_number: int, submitter: int, step: int) -> Submission:
    """Return a write. `find_write` finds it by its key."""
    key = b"once" + bytes(4) + b"".join(number.to_bytes(2, "big") for number in (0, round_number, submitter, step + 1))
    content = f"{round_number}/{submitter}/{step}".encode()
    if submitter % 3 == 0:
        partitions = ("all", f"submitter {submitter}")
        return Submission(
            policy=EVENTS,
            scope="",
            key=key,
            fingerprint=content,
            body=content,
            partitions=partitions,
            actor="system:load",
        )
    if submitter % 3 == 1:
        actor = f"user:{submitter}"
        scope = f"chat/{submitter % CHATS}"
        return Submission(policy=CHAT, scope=scope, key=key, fingerprint=content, body=content, actor=actor)
    return Submission(
        policy=LEDGER,
        scope=f"org/{submitter % LEDGERS}",
        key=key,
        fingerprint=content,
        body=content,
        client=f"client {submitter}",
        client_sequence=round_number * WRITES + step + 1,
        operations=(DeleteEntity("nothing"),),
    )


def iterate_round(round_number: int) -> Iterator[Submission]:
    """Yield all writes of a round. The writes of each submitter are in order."""
    for step in range(WRITES):
        for submitter in range(SUBMITTERS):
            yield write(round_number, submitter, step)


def find_write(key: bytes) -> Submission:
    """Return the write with this key."""
    numbers = [int.from_bytes(key[start : start + 2], "big") for start in (10, 12, 14)]
    return write(numbers[0], numbers[1], numbers[2] - 1)


def format_answer(key: bytes, verdict: Verdict) -> bytes:
    """Format an answer as a line, which `parse_answer` parses."""
    if not isinstance(verdict, Committed | Replayed) or verdict.receipt is None:
        return b"? %s %r\n" % (key.hex().encode(), repr(verdict).encode())
    receipt = verdict.receipt
    place = (receipt.lane, receipt.position, receipt.sequence, receipt.log_time_ms, receipt.height)
    numbers = b" ".join(b"%d" % number for number in (*place, receipt.client_sequence))
    return b"%s %s %s\n" % (b"C" if isinstance(verdict, Committed) else b"R", key.hex().encode(), numbers)


def parse_answer(line: str) -> tuple[Submission, Verdict]:
    """Parse a write and its verdict from a line that `format_answer` formatted."""
    kind, key, *numbers = line.split()
    assert kind in {"C", "R"}, line
    receipt = Receipt(*map(int, numbers))
    return find_write(bytes.fromhex(key)), Committed(receipt) if kind == "C" else Replayed(receipt)
