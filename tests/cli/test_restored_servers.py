"""Servers whose log has a leap: chats page over the gap, and the ledger's block chain continues."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import UUID

import pytest

from cli.server_process import oncelog, serving
from databases import BOTH_STORES, POSTGRES, log_at, query
from oncelog.client.ledger import BlockingLedgerClient, LedgerBlock, UnverifiedError, Written, set_entity
from oncelog.client.ledger.scope import _check_next_block
from oncelog.core.proof import Block
from server.chat.chat_servers import run_server, sequences
from server.cli_commands import oncelog as run_command

ABOVE = 1000


@BOTH_STORES
@pytest.mark.rule("CO-12", "CH-2", "CH-8")
async def test_chat_pages_over_a_leap_and_accepts_acknowledgements_only_of_messages(tmp_path: Path) -> None:
    async with run_server(tmp_path) as chat_server:
        await chat_server.create("tea", "ann", "bob")
        ann = await chat_server.connect("ann")
        assert [await ann.send_committed("tea", number) for number in range(1, 4)] == [1, 2, 3]
    renewed = await run_command("epoch", log_at(tmp_path / "events.db"), "--renew", f"--above={ABOVE}")
    assert renewed.exit_code == 0, renewed.output
    async with run_server(tmp_path) as chat_server:
        ann, bob = await chat_server.connect("ann"), await chat_server.connect("bob")
        assert await bob.expect_refusal("ack", chat_id="tea", last_acked_sequence=4) == "INVALID_ACK"
        assert await ann.send_committed("tea", 3) == 3
        assert [await ann.send_committed("tea", number) for number in (4, 5)] == [ABOVE + 1, ABOVE + 2]
        assert sequences(await bob.wait_for_frames(2, "message")) == [ABOVE + 1, ABOVE + 2]
        assert sequences(await bob.sync_all("tea", 1, limit=1)) == [2, 3, ABOVE + 1, ABOVE + 2]
        await bob.acknowledge("tea", ABOVE + 2)
        await chat_server.wait_for_watermark("tea", "bob", ABOVE + 2)
        page = (await chat_server.http("GET", "/v1/chats/tea/messages?limit=3", "ann")).json
        assert (sequences(page["messages"]), page["has_more"]) == ([3, ABOVE + 1, ABOVE + 2], True)
        page = (
            await chat_server.http("GET", f"/v1/chats/tea/messages?limit=3&before={page['next_before']}", "ann")
        ).json
        assert (sequences(page["messages"]), page["has_more"]) == ([1, 2], False)
    verified = await run_command("verify", log_at(tmp_path / "events.db"))
    assert verified.exit_code == 0, verified.output


@pytest.mark.rule("CO-12", "LG-18")
def test_ledger_client_follows_the_chain_over_a_leap(tmp_path: Path) -> None:
    def write(address: str, number: int) -> Written:
        options: dict[str, Any] = {"path": tmp_path / "client.db", "organization": "acme", "client_id": "c1"}
        with BlockingLedgerClient(address, **options) as ledger:
            outcome = ledger.write(set_entity("k", b"%d" % number), key=UUID(int=number), timeout_s=60)
            assert isinstance(outcome, Written)
            blocks: list[int] = []
            for found in ledger.watch_blocks():
                blocks.append(found.block.height)
                if found.block.height == outcome.height:
                    break
            heights.append(blocks)
            assert outcome.tx_id is not None
            lost = f"{int(outcome.tx_id, 16) + 5:016x}"
            assert (ledger.get_transaction(lost), ledger.get_proof(lost)) == (None, None)
            return outcome

    heights: list[list[int]] = []
    with serving(tmp_path, grpc=True) as server:
        first = write(server.rpc_address, 1)
        assert server.stop() == 0
    assert oncelog("epoch", server.store, "--renew", f"--above={ABOVE}").returncode == 0
    with serving(tmp_path, grpc=True) as server:
        second = write(server.rpc_address, 2)
    assert (first.sequence, second.sequence) == (1, 2)
    assert (first.version, second.version) == (1, ABOVE + 1)
    assert heights == [[1], [1, ABOVE + 1, ABOVE + 2]]


@pytest.mark.rule("CO-12", "CO-40", "LG-18")
@pytest.mark.parametrize("above", [2, ABOVE])
def test_watcher_of_lost_blocks_gets_an_error_with_the_new_epoch(tmp_path: Path, above: int) -> None:
    options: dict[str, Any] = {"path": tmp_path / "client.db", "organization": "acme", "client_id": "c1"}
    backup = str(tmp_path / "backup.db")
    with serving(tmp_path, grpc=True) as server, BlockingLedgerClient(server.rpc_address, **options) as ledger:
        ledger.write(set_entity("k", b"1"), key=UUID(int=1), timeout_s=60)
        assert oncelog("backup", server.store, backup).returncode == 0
        ledger.write(set_entity("k", b"2"), key=UUID(int=2), timeout_s=60)
        watching = ledger.watch_blocks()
        first, second = next(watching), next(watching)
        assert (first.block.height, second.block.height) == (1, 2)
        assert server.stop() == 0
        restored = oncelog("restore", backup, server.store, "--force", f"--above={above}")
        assert restored.returncode == 0, restored.stderr
        server.start()
        with pytest.raises(UnverifiedError) as caught:
            next(watching)
        (new,) = re.findall(r"new epoch: (\w+)", restored.stdout)
        assert f"block {above + 1} does not follow block 2: the server reports a new history" in str(caught.value)
        assert f"(its epoch is {new}, but was {second.epoch})" in str(caught.value)
        assert "watch from the last block that get_block still returns" in str(caught.value)
        found = ledger.get_block(first.block.height)
        assert found is not None
        assert found.hash == first.hash
        assert ledger.get_block(second.block.height) is None
        again = ledger.watch_blocks(first.block.height, previous_hash=first.hash)
        assert next(again).block.height == above + 1


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-12", "CO-40")
def test_running_server_refuses_writes_after_its_epoch_was_renewed(tmp_path: Path) -> None:
    def submit(number: int) -> None:
        item = {"id": str(UUID(int=number)), "partitions": ["p"], "event": {"type": "t"}}
        headers = {"Content-Type": "application/json"}
        request = Request(f"{server.url}/v1/events", json.dumps({"events": [item]}).encode(), headers)  # noqa: S310
        with urlopen(request) as answer:  # noqa: S310
            assert json.load(answer)["results"][0]["status"] == "committed"

    with serving(tmp_path) as server:
        submit(1)
        assert oncelog("epoch", server.store, "--renew", f"--above={ABOVE}").returncode == 0
        with pytest.raises(HTTPError, match="500"):
            submit(2)
        assert server.stop() == 0
        assert any("restart this process" in line for line in server.log_lines)
    assert query(server.store, "SELECT max(position) FROM oncelog_records") == [(ABOVE + 1,)]
    with serving(tmp_path) as server:
        submit(2)
    assert query(server.store, "SELECT max(position) FROM oncelog_records") == [(ABOVE + 2,)]


@pytest.mark.rule("LG-18")
def test_gap_before_an_ordinary_block_is_not_accepted() -> None:
    previous = bytes(32)
    for count, position in ((2, 9), (1, 8)):
        block = Block(1, 9, position, count, 0, previous, bytes(32))
        with pytest.raises(UnverifiedError, match="after block 3"):
            _check_next_block(_ledger_block(block), 3, previous)
    leap = Block(1, 9, 9, 1, 0, previous, bytes(32))
    _check_next_block(_ledger_block(leap), 3, previous)
    with pytest.raises(UnverifiedError, match="block 9 does not follow block 3: the server reports a new history"):
        _check_next_block(_ledger_block(leap), 3, bytes([1]) * 32)
    with pytest.raises(UnverifiedError, match=r"block 9 does not follow the block before it$"):
        _check_next_block(_ledger_block(leap), 8, bytes([1]) * 32)
    with pytest.raises(UnverifiedError, match="after block 9"):
        _check_next_block(_ledger_block(leap), 9, previous)


def _ledger_block(block: Block) -> LedgerBlock:
    return LedgerBlock(block, block.hash, ())
