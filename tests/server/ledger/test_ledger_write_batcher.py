"""The gRPC write batcher submits the writes of many concurrent calls to the log together."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadlines import soon, until
from oncelog.engine.committer import Committer
from oncelog.server.ledger import grpc_codec, write_batcher
from oncelog.server.ledger.write_batcher import BATCHING_THRESHOLD, RATE_WINDOW_S, WriteBatcher
from oncelog.server.limits import LONG_FRAME_BYTES
from server.ledger.ledger_servers import LedgerServer, run_server
from server.ledger.ledger_transports import GRPC, code, expect_refusal, put

LONG_WAIT_S = 1000.0


@pytest.fixture
def hold_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold every write, as if many calls were waiting for their commit, until the test releases them."""
    monkeypatch.setattr(write_batcher, "BATCHING_THRESHOLD", 0)
    monkeypatch.setattr(write_batcher, "BATCH_WRITES_MAX", 1000)
    monkeypatch.setattr(write_batcher, "BATCH_WAIT_S", LONG_WAIT_S)


def count_held_writes(server: LedgerServer) -> int:
    assert server.server.grpc_service is not None
    return len(server.server.grpc_service._write_batcher._queue)


def start_write(server: LedgerServer, number: int, *operations: Any) -> "asyncio.Task[Any]":
    """Send a write from a client that is unique to the number."""
    ledger = server.ledger(client_id=f"client-{number}")
    return asyncio.ensure_future(ledger.write(1, *(operations or (put(f"entity/{number}", b"v"),))))


@pytest.mark.usefixtures("hold_writes")
async def test_each_of_many_concurrent_writes_gets_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    hand_over = WriteBatcher.flush

    def count_submission(self: WriteBatcher) -> None:
        submitted.append(len(self._queue))
        hand_over(self)
        monkeypatch.setattr(write_batcher, "BATCH_WAIT_S", 0.001)

    monkeypatch.setattr(WriteBatcher, "flush", count_submission)
    monkeypatch.setattr(write_batcher, "BATCH_WRITES_MAX", 50)
    async with run_server(tmp_path, GRPC) as server:
        wrong = range(0, 300, 10)
        calls = {number: start_write(server, number) for number in range(300) if number not in wrong}
        errors = {
            number: asyncio.ensure_future(expect_refusal(start_write(server, number, put("")))) for number in wrong
        }
        answers = {number: await call for number, call in calls.items()}
        assert {code(answer) for answer in answers.values()} == {"OK"}
        assert len({answer["committed_tx_id"] for answer in answers.values()}) == len(calls)
        for number in wrong:
            assert (await errors[number]).field == "operations[0].set_entity.key"
        for number in calls:
            again = await server.ledger(client_id=f"client-{number}").get_client_state()
            assert again["last_committed_sequence"] == 1
        assert submitted[0] == 50
        assert sum(submitted) == 300


async def test_single_write_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_batcher, "BATCH_WAIT_S", LONG_WAIT_S)
    async with run_server(tmp_path, GRPC) as server:
        assert code(await soon(start_write(server, 1))) == "OK"


@pytest.mark.usefixtures("hold_writes")
async def test_held_writes_are_submitted_when_the_batch_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_batcher, "BATCH_WRITES_MAX", 3)
    async with run_server(tmp_path, GRPC) as server:
        first = [start_write(server, 1), start_write(server, 2, put(""))]
        await until(lambda: count_held_writes(server) == 2)
        assert code(await soon(start_write(server, 3))) == "OK"
        assert code(await soon(first[0])) == "OK"
        assert (await soon(expect_refusal(first[1]))).status == "INVALID_ARGUMENT"


@pytest.mark.usefixtures("hold_writes")
async def test_held_writes_are_submitted_after_the_maximum_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_batcher, "BATCH_WAIT_S", 0.001)
    async with run_server(tmp_path, GRPC) as server:
        for number in (1, 2):
            assert code(await soon(start_write(server, number))) == "OK"


@pytest.mark.usefixtures("hold_writes")
async def test_held_writes_are_submitted_when_another_write_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = asyncio.Event()
    commit = Committer._commit

    async def gated(self: Committer, batch: Any) -> None:
        await may_go.wait()
        await commit(self, batch)

    monkeypatch.setattr(Committer, "_commit", gated)
    async with run_server(tmp_path, GRPC) as server:
        monkeypatch.setattr(write_batcher, "BATCHING_THRESHOLD", 1)  # the first write is not held
        first = start_write(server, 1)
        await until(lambda: server.server.log.queue_length == 1)
        others = [start_write(server, number) for number in (2, 3)]
        await until(lambda: count_held_writes(server) == 2)
        may_go.set()
        for call in [first, *others]:
            assert code(await soon(call)) == "OK"


@pytest.mark.usefixtures("hold_writes")
async def test_held_write_of_a_cancelled_call_is_still_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_batcher, "BATCH_WRITES_MAX", 2)
    made: list[Any] = []
    answer = grpc_codec.encode_answer

    def record_answer(given: Any) -> Any:
        made.append(given)
        return answer(given)

    monkeypatch.setattr(grpc_codec, "encode_answer", record_answer)
    async with run_server(tmp_path, GRPC) as server:
        assert server.server.grpc_service is not None
        calls = server.server.grpc_service._calls
        gone = start_write(server, 1)
        await until(lambda: count_held_writes(server) == 1)
        gone.cancel()
        await until(lambda: not calls)
        assert code(await soon(start_write(server, 2))) == "OK"
        assert await server.ledger().value("entity/1") == b"v"
        assert len(made) == 1  # the server builds no answer for the cancelled call


@pytest.mark.usefixtures("hold_writes")
async def test_long_write_is_not_held(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC) as server:
        assert code(await soon(start_write(server, 1, put("a", bytes(LONG_FRAME_BYTES))))) == "OK"


def test_write_that_follows_many_answers_is_held() -> None:
    """gRPC admits calls only as earlier ones end, so the number of waiting calls is not known in advance."""
    server: Any = SimpleNamespace(log=SimpleNamespace(queue_length=0))
    held = WriteBatcher(server)
    now_s = 1000.0
    held._count_answers(BATCHING_THRESHOLD - 1, now_s)
    seen = [held._is_busy(now_s)]
    held._count_answers(1, now_s)
    seen += [held._is_busy(now_s + later_s) for later_s in (0, RATE_WINDOW_S, 1.9 * RATE_WINDOW_S, 4 * RATE_WINDOW_S)]
    assert seen == [False, True, True, True, False]


@pytest.mark.usefixtures("hold_writes")
async def test_long_write_does_not_overtake_held_writes(tmp_path: Path) -> None:
    """A long write that overtakes an earlier write of its client gets a sequence gap."""
    async with run_server(tmp_path, GRPC) as server:
        ledger = server.ledger(client_id="till")
        first = asyncio.ensure_future(ledger.write(1, put("a", b"v")))
        await until(lambda: count_held_writes(server) == 1)
        second = asyncio.ensure_future(ledger.write(2, put("b", bytes(LONG_FRAME_BYTES))))
        assert [code(await soon(first)), code(await soon(second))] == ["OK", "OK"]
