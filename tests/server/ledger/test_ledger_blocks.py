"""Block streams of the Ledger API over both wires."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from databases import BOTH_STORES
from deadlines import soon
from oncelog.testing.clock import ManualClock
from server.ledger.ledger_servers import SharedServer, key, prepare, run_server
from server.ledger.ledger_transports import (
    GRPC,
    BlockStream,
    Json,
    Ledger,
    expect_refusal,
    expect_success,
    put,
    read_blocks,
)
from server.ledger.write_answers import block_of, write_transactions

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")


async def read_blocks_until(watching: BlockStream, upto: set[str]) -> list[Json]:
    """Read the stream until it has delivered all of these transactions, and return the blocks."""
    found = []
    left = set(upto)
    while left:
        block = await watching.next()
        assert block is not None
        found.append(block)
        left -= set(block["tx_ids"])
    await watching.close()
    return found


def check_order(found: Sequence[Json], first: int) -> None:
    """Check that heights are consecutive from `first`, and that each block contains the hash of the previous one."""
    assert [block["header"]["height"] for block in found] == list(range(first, first + len(found)))
    for one, next_one in pairwise(found):
        assert next_one["header"]["previous_hash"] == block_of(one["header"]).hash


@pytest.mark.rule("LG-18", "CO-13")
async def test_block_stream_starts_after_any_height(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        empty = await ledger.watch_blocks()
        answers = await write_transactions(ledger, 3)
        heights = await read_blocks(empty, 3)
        assert [block["tx_ids"] for block in heights] == [[answer["committed_tx_id"]] for answer in answers]
        assert [block["header"] for block in heights] == [answer["block_header"] for answer in answers]
        for after in range(4):
            watching = await ledger.watch_blocks(after)
            assert await read_blocks(watching, 3 - after) == heights[after:]
            await watching.close()
        resumed = await ledger.watch_blocks(last_event_id="2")
        assert await read_blocks(resumed, 1) == heights[2:]
        fourth = expect_success(await ledger.write(4, SET))
        for watching in (empty, resumed):
            (block,) = await read_blocks(watching, 1)
            assert block == {
                "header": fourth["block_header"],
                "tx_ids": [fourth["committed_tx_id"]],
                "epoch": block["epoch"],
            }
            await watching.close()


@pytest.mark.rule("LG-18", "CO-13")
async def test_blocks_of_other_scopes_of_the_lane_hide_their_transactions(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    await prepare(tmp_path, clock)
    async with run_server(tmp_path, wire, clock=clock) as server:
        ledger, other = server.ledger(client_id="app"), server.ledger("other", client_id="app")
        watching = await ledger.watch_blocks()
        first = expect_success(await ledger.write(1, SET))
        second = expect_success(await other.write(1, SET))
        found = await read_blocks(watching, 2)
        assert [block["tx_ids"] for block in found] == [[first["committed_tx_id"]], []]
        assert found[1]["header"] == second["block_header"]
        await watching.close()


@pytest.mark.rule("LG-18", "CO-13")
async def test_block_streams_are_complete_and_ordered_while_two_servers_write(tmp_path: Path, wire: str) -> None:
    writers, each = 6, 5

    async def write(ledger: Ledger) -> list[str]:
        return [expect_success(await ledger.write(n, SET, key=key(n)))["committed_tx_id"] for n in range(1, each + 1)]

    async with run_server(tmp_path, wire) as one, run_server(tmp_path, wire) as other:
        servers = (one, other)
        early = [await server.ledger().watch_blocks() for server in servers]
        writing = [
            asyncio.ensure_future(write(servers[number % 2].ledger(client_id=f"client-{number}")))
            for number in range(writers)
        ]
        begun = [await read_blocks(watching, 3) for watching in early]
        assert begun[0] == begun[1]
        late = [await server.ledger().watch_blocks(3) for server in servers]
        ids = {tx_id for several in await asyncio.gather(*writing) for tx_id in several}
        assert len(ids) == writers * each
        seen = {tx_id for block in begun[0] for tx_id in block["tx_ids"]}
        rest = await asyncio.gather(*[read_blocks_until(watching, ids - seen) for watching in (*early, *late)])
        for found in rest:
            assert found == rest[0]
            check_order([*begun[0], *found], 1)
        listed = [tx_id for block in (*begun[0], *rest[0]) for tx_id in block["tx_ids"]]
        assert listed == sorted(ids)


@pytest.mark.rule("LG-18")
async def test_block_stream_ends_at_shutdown_and_resumes_on_the_next_server(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        await write_transactions(ledger, 2)
        watching = await ledger.watch_blocks()
        await read_blocks(watching, 2)
        stopping = asyncio.ensure_future(server.server.stop())
        if wire == GRPC:
            error = await expect_refusal(watching.next())
            assert (error.status, error.code, error.retry_after_ms) == ("UNAVAILABLE", "server_busy", 1000)
        else:
            assert await watching.next() is None
        await soon(stopping)
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        watching = await ledger.watch_blocks(last_event_id="2")
        third = expect_success(await ledger.write(3, SET))
        (block,) = await read_blocks(watching, 1)
        assert block["tx_ids"] == [third["committed_tx_id"]]
        await watching.close()


@pytest.mark.rule("CO-40")
async def test_height_of_another_history_is_refused(shared_server: SharedServer) -> None:
    ledger = shared_server.ledger()
    height = (await ledger.write(1, SET))["block_height"]
    block = await ledger.get_block(height)
    assert block["epoch"] == shared_server.server.log.epoch
    scoped = ledger._scoped(after_height=height)
    watching = await ledger.wire.watch({**scoped, "epoch": block["epoch"]}, None)
    await ledger.write(2, SET)
    assert [one["header"]["height"] for one in await read_blocks(watching, 1)] == [height + 1]
    await watching.close()

    async def open_stream() -> None:
        other = await ledger.wire.watch({**scoped, "epoch": "0123456789abcdef"}, None)
        await other.next()

    error = await expect_refusal(open_stream())
    assert (error.status, error.field) == ("FAILED_PRECONDITION", "after_height")
