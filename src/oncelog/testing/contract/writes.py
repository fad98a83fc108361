"""Builders for the items that the contract tests submit."""

from typing import Any, Final

from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import DeleteEntity, Operation
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, RUNS
from oncelog.core.values import Claim, KeyIdentity, Submission, key_identity

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS

CHANNEL: Final = "chat/1"
ORGANISATION: Final = "org/1"
GATEWAY: Final = "gateway/1"
CAMPAIGN: Final = "campaign/1"


def key(number: int, length: int = 16) -> bytes:
    """Return the key for a number."""
    return number.to_bytes(length, "big")


def event(number: int, content: str = "x", **more: Any) -> Submission:
    """Build a write to lane 0."""
    fields: dict[str, Any] = {"scope": "", "body": content.encode(), **more}
    return Submission(policy=EVENTS, key=key(number), fingerprint=content.encode(), **fields)


def message(number: int, content: str = "x", actor: str = "user:ann", scope: str = CHANNEL, **more: Any) -> Submission:
    """Build a write to a stream with members."""
    text = content.encode()
    return Submission(policy=CHAT, scope=scope, key=key(number), fingerprint=text, actor=actor, body=text, **more)


def transaction(number: int, sequence: int, *operations: Operation, content: str = "x", **more: Any) -> Submission:
    """Build a write to a ledger with a client sequence. The number 0 means no key."""
    fields: dict[str, Any] = {"scope": ORGANISATION, "client": "c1", "body": content.encode(), **more}
    return Submission(
        policy=LEDGER,
        key=key(number) if number else b"",
        fingerprint=content.encode(),
        client_sequence=sequence,
        operations=operations or (DeleteEntity("nothing"),),
        **fields,
    )


def delta(number: int, clock: int, op: Op = Op.UPDATE, **columns: str) -> Submission:
    """Build a change to a row. The change with the highest clock wins."""
    values = tuple((name, value.encode()) for name, value in columns.items())
    change = RowDelta(op, "todos", "r1", "c1", clock, values, key(number, 32))
    return Submission(policy=DELTAS, scope=GATEWAY, key=key(number, 32), fingerprint=b"", delta=change)


def claim(number: int, holder: str, **more: Any) -> Claim:
    """Build a claim of a run."""
    return Claim(policy=RUNS, scope=CAMPAIGN, key=key(number), fingerprint=b"", holder=holder, **more)


def result(number: int, holder: str = "", fence: int = 0) -> Submission:
    """Build the result of a run."""
    return Submission(
        policy=RUNS, scope=CAMPAIGN, key=key(number), fingerprint=b"", body=b"done", holder=holder, fence=fence
    )


def identity(item: Submission | Claim) -> KeyIdentity:
    """Return the identity under which an item is stored."""
    return key_identity(item)
