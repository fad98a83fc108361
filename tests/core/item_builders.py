"""Builders for the items that tests of `plan` submit, and assertions about the verdicts."""

from typing import Any

from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import DeleteEntity, Operation
from oncelog.core.plan import Validate
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, RUNS
from oncelog.core.values import (
    Claim,
    Item,
    Mode,
    Release,
    Renew,
    Request,
    Settings,
    Submission,
    Verdict,
)
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.memory_log import MemoryLog

__all__ = ["assert_committed", "assert_refused", "assert_replayed"]

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def key(number: int, length: int = 16) -> bytes:
    return number.to_bytes(length, "big")


def event(number: int, content: str = "x", **more: Any) -> Submission:
    return Submission(policy=EVENTS, scope="", key=key(number), fingerprint=content.encode(), **more)


def message(number: int, content: str = "x", actor: str = "user:ann", scope: str = "chat/1", **more: Any) -> Submission:
    return Submission(
        policy=CHAT,
        scope=scope,
        key=key(number),
        fingerprint=content.encode(),
        actor=actor,
        body=content.encode(),
        **more,
    )


def transaction(
    number: int | None,
    sequence: int,
    *operations: Operation,
    content: str = "x",
    client: str = "c1",
    scope: str = "org/1",
    **more: Any,
) -> Submission:
    """Build a ledger write. The number 0 means no key."""
    return Submission(
        policy=LEDGER,
        scope=scope,
        key=b"" if number is None else key(number),
        fingerprint=content.encode(),
        client=client,
        client_sequence=sequence,
        operations=operations or (DeleteEntity("nothing"),),
        **more,
    )


def delta(number: int, hlc: int = 0, op: Op = Op.UPDATE, scope: str = "gateway/1", **columns: str) -> Submission:
    change = RowDelta(
        op=op,
        table="todos",
        row_id="r1",
        client_id="c1",
        hlc=hlc,
        columns=tuple((name, value.encode()) for name, value in columns.items()),
        delta_id=key(number, 32),
    )
    return Submission(policy=DELTAS, scope=scope, key=key(number, 32), fingerprint=op.value.encode(), delta=change)


def result(number: int, body: str = "done", scope: str = "campaign/1", holder: str = "", fence: int = 0) -> Submission:
    return Submission(
        policy=RUNS, scope=scope, key=key(number), fingerprint=b"", body=body.encode(), holder=holder, fence=fence
    )


def claim(number: int, holder: str, **more: Any) -> Claim:
    return Claim(policy=RUNS, scope="campaign/1", key=key(number), fingerprint=b"", holder=holder, **more)


def many_columns(count: int) -> Any:
    return {f"c{number}": "1" for number in range(count)}


def renewal(number: int, fence: int, holder: str = "a", lease_ms: int = 30_000) -> Renew:
    return Renew(policy=RUNS, scope="campaign/1", key=key(number), holder=holder, fence=fence, lease_ms=lease_ms)


def release(number: int, fence: int, failure: bytes | None = None, holder: str = "a") -> Release:
    return Release(policy=RUNS, scope="campaign/1", key=key(number), holder=holder, fence=fence, failure=failure)


def done(number: int, holder: str, fence: int, body: str = "done") -> Submission:
    return result(number, body, holder=holder, fence=fence)


class Log(MemoryLog):
    """A log in memory, with zero salts, that accepts one item or several."""

    def __init__(self, **settings: int) -> None:
        super().__init__(Settings(**settings), draw=bytes)
        self.now_ms = 1_000_000

    def __call__(self, item: Item, validate: Validate | None = None) -> Verdict:
        return self.submit([Request((item,))], self.now_ms, validate)[0][0]

    def submit_request(self, *items: Item, mode: Mode = Mode.EACH, is_admitted_whole: bool = False) -> list[Verdict]:
        return self.submit([Request(items, mode, is_admitted_whole)], self.now_ms)[0]

    def submit_separately(self, *items: Item) -> list[Verdict]:
        """Submit items of separate callers in one group commit."""
        return [verdict for (verdict,) in self.submit([Request((item,)) for item in items], self.now_ms)]
