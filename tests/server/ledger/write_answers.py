"""Writes that several ledger tests send, and the parts of the answers that they compare."""

from collections.abc import Callable
from typing import Any

import aiohttp

from oncelog.core.proof import Block
from server.ledger.ledger_servers import key
from server.ledger.ledger_transports import (
    BlockStream,
    CallError,
    Json,
    Ledger,
    code,
    expect_failure,
    expect_success,
    put,
)


async def write_transactions(ledger: Ledger, count: int, start: int = 1) -> list[Json]:
    """Commit transactions with consecutive sequences. The sequence determines each idempotency key."""
    return [expect_success(await retry_write(ledger, number)) for number in range(start, start + count)]


async def retry_write(ledger: Ledger, number: int, **members: Any) -> Json:
    """Send the write with this sequence again, as `write_transactions` has sent it."""
    return await ledger.write(number, put("a", b"%d" % number), key=members.pop("with_key", key(number)), **members)


def receipt_of(answer: Json) -> tuple[int, str, int]:
    """Return the sequence, id and height of a success."""
    return answer["assigned_sequence"], answer["committed_tx_id"], answer["block_height"]


def expect_already_committed(answer: Json) -> tuple[Any, ...]:
    """Check that the answer is ALREADY_COMMITTED and return its sequence, id and height."""
    error = expect_failure(answer)
    assert (error["code"], error["number"]) == ("ALREADY_COMMITTED", 5)
    assert error.keys() <= {"code", "number", "message", "committed_tx_id", "block_height", "assigned_sequence"}
    return error["assigned_sequence"], error.get("committed_tx_id"), error.get("block_height")


def outcome(answer: Json) -> tuple[Any, ...]:
    """Return the sequence, id and height of a write that was committed now or earlier."""
    return receipt_of(answer) if code(answer) == "OK" else expect_already_committed(answer)


def block_of(header: Json) -> Block:
    """Check the hash of a header and return its block."""
    block = Block(
        header["lane"],
        header["height"],
        header["first_position"],
        header["count"],
        header["timestamp_ms"],
        header["previous_hash"],
        header["merkle_root"],
    )
    assert block.hash == header["hash"]
    return block


class Unchanged:
    """Condition that a positive number has had the same value for a hundred polls.

    Tests use it to wait while a server fills the buffers of a client that does not read. Their assertions hold whether
    or not the buffers are full.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._last = 0
        self._polls = 0

    def __call__(self) -> bool:
        number = self._number()
        self._polls = self._polls + 1 if number == self._last else 0
        self._last = number
        return number > 0 and self._polls >= 100


async def read_to_end(watching: BlockStream) -> str:
    """Read a block stream to its end and return its final status."""
    try:
        while await watching.next() is not None:
            pass
    except CallError as error:
        return error.status
    except aiohttp.ClientError:  # a stopping server aborts the connection of a slow reader
        pass
    return "OK"
