"""Ledger API proofs and the hash chain over both wires."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES, is_postgres, log_at, query
from deadlines import soon, until
from oncelog import proof as documents
from oncelog.core.identity import request_hash
from oncelog.core.operations import Operation, SetEntity
from oncelog.core.policy import LEDGER
from oncelog.core.proof import NO_HASH, Proof, verify
from oncelog.core.transactions import encode_operations, ledger_scope
from oncelog.core.values import Record
from oncelog.testing.clock import ManualClock
from server.cli_commands import oncelog
from server.ledger.ledger_servers import LedgerServer, SharedServer, key, prepare, run_server
from server.ledger.ledger_transports import GRPC, Json, code, expect_refusal, expect_success, put
from server.ledger.write_answers import block_of, write_transactions
from server.shared_servers import pool_fixture

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
SIZES: Final = (1, 2, 3, 7, 8, 9, 64)


@asynccontextmanager
async def run_server_with_one_lane(directory: Path, wire: str) -> AsyncIterator[LedgerServer]:
    """Run a server on a new log with one lane, so that concurrent writes of all scopes share a block."""
    clock = ManualClock()
    await prepare(directory, clock)
    async with run_server(directory, wire, clock=clock) as ledger_server:
        yield ledger_server


server_pool = pool_fixture(lambda directory: run_server_with_one_lane(directory, GRPC))


def record_of(answer: Json, scope: str, client: str, idempotency_key: bytes, operations: Sequence[Operation]) -> Record:
    """Return the record that the sender can compute from the request and the answer."""
    header, index = answer["block_header"], answer["transaction_proof"]["index"]
    return Record(
        header["lane"],
        header["first_position"] + index,
        answer["version"],
        answer["timestamp_ms"],
        answer["block_height"],
        LEDGER.name,
        scope,
        idempotency_key,
        request_hash(operations),
        answer["actor"],
        client,
        answer["assigned_sequence"],
        (),
        encode_operations(operations),
    )


def document_of(found: Json) -> documents.ProofDocument:
    """Convert the answer of `get_proof` to a document for the public verifier."""

    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, list):
            return tuple(text(one) for one in value)
        return value

    body = found.get("body")
    members = {name: text(value) for name, value in found.items() if name not in ("record", "block", "body")}
    record = documents.RecordHeader(**{name: text(value) for name, value in found["record"].items()})
    block = documents.BlockHeader(**{name: text(value) for name, value in found["block"].items()})
    salt = members.pop("salt", None)
    return documents.ProofDocument(**{**members, "record": record, "block": block, "salt": salt, "body": body})


async def in_one_block(server: SharedServer, patch: pytest.MonkeyPatch, sent: Sequence[Any]) -> list[Json]:
    """Commit the writes in one block and return their answers."""
    with patch.context() as context:
        gate = server.server.served.hold_commits(context)
        plug = asyncio.ensure_future(server.ledger("plug", vault="plug").write(1, SET))
        await soon(gate.reached.wait())
        gathered = asyncio.gather(*sent)
        await until(lambda: server.server.log.queue_length == len(sent) + 1)
        gate.open()
        assert code(await plug) == "OK"
        return await gathered


@pytest.mark.rule("LG-18", "LG-10")
@pytest.mark.parametrize("size", SIZES)
async def test_proofs_of_all_transactions_of_a_block_verify(
    shared_server: SharedServer, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = [shared_server.ledger(f"client-{n}", "" if n % 3 else "v") for n in range(size)]
    sent = [one.write(1, put(one.client_id, b"x" * n), key=key(n)) for n, one in enumerate(ledgers)]
    answers = [expect_success(answer) for answer in await in_one_block(shared_server, monkeypatch, sent)]
    headers = [answer["block_header"] for answer in answers]
    assert headers == [headers[0]] * size
    assert headers[0]["count"] == size
    block = block_of(headers[0])
    assert sorted(answer["transaction_proof"]["index"] for answer in answers) == list(range(size))
    for number, (ledger, answer) in enumerate(zip(ledgers, answers, strict=True)):
        given = answer["transaction_proof"]
        operations = [SetEntity(ledger.client_id, b"x" * number)]
        scope = ledger_scope(shared_server.name, ledger.vault)
        record = record_of(answer, scope, ledger.client_id, key(number), operations)
        proof = Proof(given["index"], given["count"], tuple(given["path"]))
        assert verify(record, given["salt"], proof, block)
        other = record_of(answer, scope, ledger.client_id, key(number), [SetEntity("other", b"")])
        assert not verify(other, given["salt"], proof, block)
        document = document_of(await ledger.get_proof(answer["committed_tx_id"]))
        assert documents.verify(document, block_hash=block.hash).findings == ()
        assert documents.verify(document, block_hash=NO_HASH).findings
        assert (document.salt, document.index, document.count) == (given["salt"].hex(), given["index"], size)
    for vault in ("", "v"):
        found = await shared_server.ledger(vault=vault).get_block(block.height)
        expected = [
            answer["committed_tx_id"] for ledger, answer in zip(ledgers, answers, strict=True) if ledger.vault == vault
        ]
        assert found == {"header": headers[0], "tx_ids": sorted(expected), "epoch": found["epoch"]}


@pytest.mark.rule("LG-18")
async def test_blocks_form_a_hash_chain(tmp_path: Path, wire: str) -> None:
    async with run_server_with_one_lane(tmp_path, wire) as ledger_server:
        ledger = ledger_server.ledger(client_id="app")
        answers = await write_transactions(ledger, 4)
        previous = NO_HASH
        for height, answer in enumerate(answers, 1):
            block = await ledger.get_block(height)
            assert block == {
                "header": answer["block_header"],
                "tx_ids": [answer["committed_tx_id"]],
                "epoch": block["epoch"],
            }
            header = block["header"]
            assert (header["height"], header["count"], header["first_position"]) == (height, 1, height)
            assert header["previous_hash"] == previous
            previous = block_of(header).hash
            found = await ledger.get_proof(answer["committed_tx_id"])
            assert found["body_hash"] == sha256(found["salt"] + found["body"]).digest()
            assert found["body"] == encode_operations([SetEntity("a", b"%d" % height)])
        missing = ("NOT_FOUND", "height: the scope's lane has no such block", "height")
        for height in (5, 2**53 - 1, *([2**64 - 1] if wire == GRPC else [])):
            assert (await expect_refusal(ledger.get_block(height))).summary == missing


@pytest.mark.rule("LG-18", "CO-41")
async def test_proof_of_an_erased_transaction_covers_its_header(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as ledger_server:
        ledger = ledger_server.ledger(client_id="app")
        answers = await write_transactions(ledger, 3)
        tx_id = answers[1]["committed_tx_id"]
        before = await ledger.get_proof(tx_id)
        assert await ledger_server.log.erase(key=key(2), policy=LEDGER, scope=ledger_scope("acme"), client="app") == 1
        found = await ledger.get_proof(tx_id)
        assert found == {name: value for name, value in before.items() if name not in ("salt", "body")}
        verification = documents.verify(document_of(found), block_hash=answers[1]["block_header"]["hash"])
        assert (verification.findings, verification.is_erased) == ((), True)
        fourth = expect_success(await ledger.write(4, SET, key=key(4)))
        erasure = fourth["block_header"]["height"] - 1  # the block of the audit record
        assert erasure == answers[2]["block_header"]["height"] + 1
    assert (await oncelog("verify", log_at(tmp_path / "events.db"))).exit_code == 0


@pytest.mark.rule("LG-18")
async def test_verify_command_finds_a_changed_record_and_a_lost_newest_block(tmp_path: Path, wire: str) -> None:
    path = tmp_path / "events.db"

    async def write(numbers: range) -> None:
        async with run_server(tmp_path, wire) as ledger_server:
            await write_transactions(ledger_server.ledger(client_id="app"), len(numbers), numbers.start)

    await write(range(1, 4))
    if not is_postgres():
        shutil.copy(path, tmp_path / "older.db")
    await write(range(4, 6))
    store = log_at(path)
    head = tmp_path / "head.json"
    head.write_text((await oncelog("head", store)).stdout)
    assert (await oncelog("verify", store, "--head", str(head))).exit_code == 0
    if not is_postgres():
        older = str(tmp_path / "older.db")
        assert (await oncelog("verify", older)).exit_code == 0
        assert (await oncelog("verify", older, "--head", str(head))).exit_code == 1
        with closing(sqlite3.connect(path)) as connection, connection:
            (body,) = connection.execute("SELECT body FROM oncelog_records WHERE client_sequence = 2").fetchone()
            changed = bytes(body).replace(b'"a"', b'"b"')
            connection.execute("UPDATE oncelog_records SET body = ? WHERE client_sequence = 2", (changed,))
    else:
        ((body,),) = query(store, "SELECT body FROM oncelog_records WHERE client_sequence = 2")
        changed = bytes(body).replace(b'"a"', b'"b"')
        query(store, "UPDATE oncelog_records SET body = $1 WHERE client_sequence = 2", changed)
    assert changed != body
    assert (await oncelog("verify", store)).exit_code == 1
