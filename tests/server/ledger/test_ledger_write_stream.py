"""Streams of writes over gRPC: order of the answers, errors of single writes, limits, and the end of a stream."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES, log_at
from deadlines import soon, until
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.errors import ApiError
from oncelog.server.ledger import grpc_codec, grpc_write_stream
from oncelog.server.ledger.write_batcher import WriteBatcher
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.testing.clock import ManualClock
from scripts import read_line, start_script
from server.auth import auth_material
from server.ledger.ledger_servers import Connections, LedgerServer, run_server, token
from server.ledger.ledger_transports import GRPC, CallError, Json, code, expect_refusal, expect_success, put
from server.ledger.test_ledger_servers import WORKER
from server.ledger.write_answers import outcome
from server.ledger.write_streams import open_stream, streamed_write, write_of
from server.running_server import api_key

SHUTDOWN_MS: Final = 600_000
"""Longer than any wait in a test. A server that stops only at this deadline therefore fails the test."""


def summaries(answers: Sequence[Json | CallError]) -> list[str]:
    """Return the sequence, the error code or the status of each answer."""
    return [
        one.status if isinstance(one, CallError) else str(one.get("assigned_sequence", "")) or code(one)
        for one in answers
    ]


def unary_of(server: LedgerServer, write: Json, credential: str | None = None) -> Any:
    """Send the same write as a separate call."""
    return server.wire(GRPC, credential).call("Write", write)


def retry_on(server: LedgerServer, *writes: Json) -> Any:
    """Send the same writes as separate calls, one after the other, and return their outcomes."""

    async def retry() -> list[tuple[Any, ...]]:
        return [outcome(await unary_of(server, write)) for write in writes]

    return soon(retry())


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-11", "LG-10")
async def test_answers_arrive_in_the_order_of_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a retry that is in memory nor a malformed write overtakes a write that waits for its commit."""
    async with run_server(tmp_path, GRPC) as server:
        stream = open_stream(server)
        (first,) = await stream.request(write_of(1))
        gate = server.served.hold_commits(monkeypatch)
        await stream.send(write_of(2))
        await stream.send(write_of(1), write_of(0), write_of(3))
        await until(lambda: server.log.queue_length == 2)
        reading = asyncio.ensure_future(stream.answers(4))
        assert await unary_of(server, write_of(1)) == first
        assert not reading.done()
        gate.open()
        answers = await soon(reading)
        assert summaries(answers) == ["2", "1", "INVALID_ARGUMENT", "3"]
        assert answers[1] == first
        await stream.finish()
        assert await stream.end() is None


@pytest.mark.rule("LG-20", "CO-33")
async def test_failed_write_has_the_error_of_a_call_and_does_not_end_the_stream(tmp_path: Path) -> None:
    writes = [
        write_of(0),
        write_of(2, put("")),
        write_of(2, organization=""),
        write_of(2, organization="other"),
        write_of(2, idempotency_key=bytes(16)),
        write_of(9),
        write_of(1, put("x")),
        write_of(2, put("entity/1", condition={"must_not_exist": True})),
        write_of(2, put("none", condition={"must_exist": True})),
    ]
    async with run_server(tmp_path, GRPC, tokens=True) as server:
        credential = token(write=["ledger/acme"])
        stream = open_stream(server, credential)
        assert summaries(await stream.request(write_of(1, client_id=""))) == ["1"]
        for write in writes:
            asked = {**write, "client_id": "user:ada"}
            (streamed,) = await stream.request(asked)
            if isinstance(streamed, CallError):
                called = await expect_refusal(unary_of(server, asked, credential))
                assert (streamed.summary, streamed.code) == (called.summary, called.code)
                assert streamed.details == called.details
            else:
                assert streamed == await unary_of(server, asked, credential)
        assert summaries(await stream.request(write_of(2, client_id=""))) == ["2"]
        assert server.server.counts.requests["ledger", "grpc", "forbidden"] == 2
        await stream.finish()
        assert await stream.end() is None


async def test_many_answers_share_a_message_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, GRPC) as server:
        stream = open_stream(server)
        assert summaries(await stream.request(*map(write_of, range(1, 201)))) == [str(n) for n in range(1, 201)]
        assert len(stream.message_sizes) < 100
        stream.message_sizes.clear()
        monkeypatch.setattr(grpc_write_stream, "ANSWERS_BYTES", 1)
        assert len(await stream.request(*map(write_of, range(1, 6)))) == 5
        assert stream.message_sizes == [1] * 5


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_383, 16_384, 2_100_000])
def test_spliced_answers_equal_those_of_the_protobuf_library(size: int) -> None:
    error = ApiError("bad_request", "no", field="sequence", limit=7)
    response = pb.WriteResponse(error=pb.WriteError(code="WRITE_ERROR_CODE_KEY_EXISTS", message="x" * size))
    message = grpc_codec.encode_streamed_response(response.SerializeToString()) + grpc_codec.encode_streamed_error(
        error
    )
    parsed = pb.StreamWritesResponse.FromString(message)
    details = {"field": "sequence", "limit": "7"}
    call_error = pb.CallError(code=3, message="no", reason="bad_request", details=details)
    assert parsed.answers == [pb.StreamedAnswer(response=response), pb.StreamedAnswer(error=call_error)]
    assert parsed.answers[0].SerializeToString() in message


async def test_long_write_is_decoded_in_a_thread_and_keeps_its_place(tmp_path: Path) -> None:
    long = put("a", bytes(LONG_FRAME_BYTES))
    async with run_server(tmp_path, GRPC) as server:
        stream = open_stream(server)
        answers = await stream.request(
            write_of(1), write_of(2, long), write_of(3), write_of(4, long, idempotency_key=b"short"), write_of(4)
        )
        assert summaries(answers) == ["1", "2", "3", "INVALID_ARGUMENT", "4"]


async def test_other_calls_run_while_a_long_message_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns_of_writes = 0, []
    write = WriteBatcher.write

    def record_turn(*arguments: Any) -> Any:
        turns_of_writes.append(turn)
        return write(*arguments)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(WriteBatcher, "write", record_turn)
    async with run_server(tmp_path, GRPC) as server:
        counting = asyncio.ensure_future(count_turns())
        half = put("a", bytes(LONG_FRAME_BYTES // 2 - 100))
        assert summaries(await open_stream(server).request(*(write_of(n, half) for n in range(1, 7)))) == list("123456")
        counting.cancel()
    first = turns_of_writes[0]
    assert [number - first for number in turns_of_writes] == [0, 0, 1, 1, 2, 2]


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30", "CO-32")
@pytest.mark.parametrize("limit", ["WRITES_IN_FLIGHT_MAX", "BYTES_IN_FLIGHT_MAX"])
async def test_server_stops_reading_while_too_many_writes_are_unanswered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    size, count = 60_000, 120
    read = sent = 0
    submit = grpc_write_stream.GrpcWriteStream._submit_message

    async def count_message(self: Any, message: Any) -> None:
        nonlocal read
        read += 1
        await submit(self, message)

    monkeypatch.setattr(grpc_write_stream.GrpcWriteStream, "_submit_message", count_message)
    monkeypatch.setattr(grpc_write_stream, limit, 3 if limit == "WRITES_IN_FLIGHT_MAX" else 3 * size + 1000)
    async with run_server(tmp_path, GRPC) as server:
        stream = open_stream(server)
        gate = server.served.hold_commits(monkeypatch)

        async def send_all() -> None:
            nonlocal sent
            for number in range(1, count + 1, 2):
                await stream.send(*(write_of(n, put("a", bytes(size))) for n in (number, number + 1)))
                sent += 2

        sending = asyncio.ensure_future(send_all())
        await until(lambda: server.log.queue_length == 3)
        assert await server.ledger(client_id="app").last_sequence() == 0  # other calls of the connection are answered
        assert (server.log.queue_length, read) == (3, 2)
        assert sent < count, "flow control stops the client"
        gate.open()
        assert summaries(await stream.answers(count)) == [str(number) for number in range(1, count + 1)]
        await soon(sending)


@pytest.mark.rule("CO-30")
async def test_write_above_the_byte_limit_is_accepted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_write_stream, "BYTES_IN_FLIGHT_MAX", 10)
    async with run_server(tmp_path, GRPC) as server:
        assert summaries(await open_stream(server).request(*map(write_of, range(1, 6)))) == list("12345")


@pytest.mark.rule("CO-30", "CO-33")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "the request must be a message of type oncelog.ledger.v1.StreamWritesRequest"),
        (b"", "writes: must have 1 to 3 entries, not 0"),
        (
            pb.StreamWritesRequest(writes=[streamed_write(write_of(n)) for n in (2, 3, 4, 5)]).SerializeToString(),
            "writes: must have 1 to 3 entries, not 4",
        ),
    ],
)
async def test_invalid_message_ends_the_stream_after_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    async with run_server(tmp_path, GRPC, request_events_max=3) as server:
        gate = server.served.hold_commits(monkeypatch)
        stream = open_stream(server)
        stream.call = server.wire(GRPC).channel.stream_stream(
            "/oncelog.ledger.v1.Ledger/StreamWrites", response_deserializer=pb.StreamWritesResponse.FromString
        )()
        await stream.call.write(pb.StreamWritesRequest(writes=[streamed_write(write_of(1))]).SerializeToString())
        await stream.call.write(data)
        await until(lambda: server.log.queue_length == 1)
        gate.open()
        assert summaries(await stream.answers(1)) == ["1"]
        error = await stream.end()
        assert error is not None
        assert (error.status, error.message) == ("INVALID_ARGUMENT", message)
        assert await server.ledger(client_id="app").last_sequence() == 1


@pytest.mark.rule("CO-30")
async def test_each_message_counts_as_a_request_of_the_actor(tmp_path: Path) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, GRPC, tokens=True, clock=clock, requests_per_second_max=1) as server:
        stream = open_stream(server, token())  # the call itself counts, too; the burst is five
        for number in range(1, 5):
            assert summaries(await stream.request(write_of(number, client_id=""))) == [str(number)]
        for refused in await stream.request(write_of(5, client_id=""), write_of(1, client_id="")):
            assert isinstance(refused, CallError)
            assert (refused.status, refused.code, refused.retry_after_ms) == (
                "RESOURCE_EXHAUSTED",
                "rate_limited",
                1000,
            )
        clock.advance(1000)
        assert summaries(await stream.request(write_of(5, client_id=""))) == ["5"]


@pytest.mark.rule("CO-15", "CO-30")
async def test_rate_of_new_writes_is_limited_per_write(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, tokens=True, new_events_per_second_max=2) as server:
        stream = open_stream(server, token())
        writes = [write_of(number, client_id="") for number in (1, 2, 3, 1)]
        answers = await stream.request(*writes)
        assert summaries(answers) == ["1", "2", "RESOURCE_EXHAUSTED", "1"]
        assert answers[3] == answers[0]


@pytest.mark.rule("CO-31")
async def test_client_that_does_not_read_its_answers_is_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, heartbeat_ms=200) as server:
        stream = open_stream(server)
        await stream.request(write_of(1, put("a", bytes(1_000_000))))
        refused = write_of(2, put("a", condition={"version_is": 9}))  # the answer has the value of the entity
        await stream.send(*[refused] * 50)
        await until(lambda: server.server.counts.slow_readers_closed == 1)
        await until(lambda: server.server._reader_count == 0)
        assert await server.ledger(client_id="app").last_sequence() == 1
        await stream.cancel()


@pytest.mark.rule("CO-30")
async def test_unread_answers_are_limited_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, count, limit = 1_000_000, 100, 4_000_000
    refused = write_of(2, put("a", condition={"must_not_exist": True}))  # the answer has the value of the entity
    monkeypatch.setattr(grpc_write_stream, "BYTES_IN_FLIGHT_MAX", limit)
    async with run_server(tmp_path, GRPC, heartbeat_ms=600_000) as server:
        stream = open_stream(server)
        await stream.request(write_of(1, put("a", bytes(size))))
        (open_call,) = server.server.grpc_service.connections
        assert isinstance(open_call, grpc_write_stream.GrpcWriteStream)
        gate = server.served.hold_commits(monkeypatch)
        await stream.send(*[refused] * count)
        await until(lambda: len(open_call._unanswered) == count)
        gate.open()
        await until(lambda: all(future.done() for future, _ in open_call._unanswered))
        held = [future.result() for future, _ in open_call._unanswered if not future.exception()]
        assert sum(map(len, held)) < limit + 2 * size
        await stream.send(write_of(2), write_of(3))
        answers = await stream.answers(count + 2)
        assert summaries(answers[-2:]) == ["2", "3"]
        values = [one for one in answers[:count] if not isinstance(one, CallError)]
        errors = [one for one in answers[:count] if isinstance(one, CallError)]
        assert {len(one["error"]["current_value"]) for one in values} == {size}
        assert {(one.status, one.code) for one in errors} == {("UNAVAILABLE", "server_busy")}
        assert "exceed 4000000 bytes; read them, and send the write again" in errors[0].message
        assert open_call._ready_bytes == 0


# --- credentials --------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-22", "CO-23")
@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_stream_ends_after_its_answers_when_the_credential_becomes_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, GRPC, tokens=True, api_keys=True, clock=clock) as server:
        shown = api_key(server.served, "app", ["*"], ["*"])
        credential = token("app", client_id="app", exp=auth_material.NOW_S + 100) if how == "expired" else shown.text
        busy, idle = open_stream(server, credential), open_stream(server, credential)
        assert summaries(await busy.request(write_of(1))) == ["1"]
        await until(lambda: server.server._reader_count == 2)
        gate = server.served.hold_commits(monkeypatch)
        await busy.send(write_of(2))
        await until(lambda: server.log.queue_length == 1)
        if how == "expired":
            clock.advance(200_000)
        else:
            assert server.served.api_keys is not None
            server.served.api_keys.revoke(shown.key.id)
            server.server.reload()
        server.server.run_checks()
        error = await idle.end()
        assert error is not None
        assert (error.status, error.code) == ("UNAUTHENTICATED", "auth_failed")
        gate.open()
        assert summaries(await busy.answers(1)) == ["2"]
        error = await busy.end()
        assert error is not None
        assert (error.status, error.message) == ("UNAUTHENTICATED", "the token has expired, or its rights have changed")
        await until(lambda: server.server._reader_count == 0)


@pytest.mark.rule("CO-22", "CO-23")
async def test_credential_is_checked_again_for_each_message(tmp_path: Path) -> None:
    """Without waiting for the check that runs every second."""
    clock = ManualClock(auth_material.NOW_MS)
    async with run_server(tmp_path, GRPC, tokens=True, clock=clock) as server:
        stream = open_stream(server, token(exp=auth_material.NOW_S + 100))
        assert summaries(await stream.request(write_of(1, client_id=""))) == ["1"]
        clock.advance(200_000)
        await stream.send(write_of(1, client_id=""))
        error = await stream.end()
        assert error is not None
        assert (error.status, error.code) == ("UNAUTHENTICATED", "auth_failed")


@pytest.mark.rule("CO-22")
async def test_narrowed_key_may_continue_to_write_to_other_scopes(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, api_keys=True) as server:
        shown = api_key(server.served, "app", [], ["ledger/acme", "ledger/other"])
        stream = open_stream(server, shown.text)
        assert summaries(await stream.request(write_of(1))) == ["1"]
        path = tmp_path / "keys.json"
        path.write_text(path.read_text().replace('"ledger/acme"', '"ledger/third"'))
        server.server.reload()
        answers = await stream.request(write_of(1), write_of(1, organization="other"), write_of(2))
        assert summaries(answers) == ["PERMISSION_DENIED", "1", "PERMISSION_DENIED"], "also for a retry"


@pytest.mark.rule("CO-27")
async def test_streams_count_as_connections_of_their_principal(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, tokens=True, connections_per_principal_max=1) as server:
        stream = open_stream(server, token())
        await until(lambda: server.server._reader_count == 1)
        error = await open_stream(server, token()).end()
        assert error is not None
        assert (error.status, error.code) == ("UNAVAILABLE", "server_busy")
        assert "connections_per_principal_max is 1" in error.message
        await stream.finish()
        assert await stream.end() is None
        await until(lambda: not server.server._limiter._by_principal)
        assert summaries(await open_stream(server, token()).request(write_of(1, client_id=""))) == ["1"]


# --- the end of a stream ------------------------------------------------------------------------------------------


async def test_half_closed_stream_ends_after_all_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, GRPC) as server:
        gate = server.served.hold_commits(monkeypatch)
        stream = open_stream(server)
        await stream.send(write_of(1), write_of(2))
        await stream.finish()
        await until(lambda: server.log.queue_length == 2)
        gate.open()
        assert summaries(await stream.answers(2)) == ["1", "2"]
        assert await stream.end() is None
        await until(lambda: server.server._reader_count == 0)


async def test_cancelled_stream_keeps_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, GRPC) as server:
        gate = server.served.hold_commits(monkeypatch)
        stream = open_stream(server)
        await stream.send(write_of(1), write_of(2))
        await until(lambda: server.log.queue_length == 2)
        (open_call,) = server.server.grpc_service.connections
        assert isinstance(open_call, grpc_write_stream.GrpcWriteStream)
        await stream.cancel()
        await until(lambda: server.server._reader_count == 0)
        assert not open_call._unanswered
        gate.open()


async def test_client_that_disconnects_during_an_answer_is_no_fault_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(tmp_path, GRPC) as server:
        gate = server.served.hold_commits(monkeypatch)
        stream = open_stream(server)
        await stream.send(write_of(1))
        await until(lambda: server.log.queue_length == 1)
        (open_call,) = server.server.grpc_service.connections
        assert isinstance(open_call, grpc_write_stream.GrpcWriteStream)

        async def fail(write: Awaitable[None]) -> None:
            await write
            raise RuntimeError("the call has ended")

        monkeypatch.setattr(open_call, "wait_bounded", fail)
        gate.open()
        await until(lambda: server.server._reader_count == 0)
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert server.server.counts.requests["ledger", "grpc", "server_error"] == 0
        await stream.cancel()


async def test_stream_that_opens_while_the_server_stops_is_refused(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC) as server:
        server.server._auth_gate.is_closing = True
        error = await open_stream(server).end()
        server.server._auth_gate.is_closing = False
        assert error is not None
        assert (error.status, error.code) == ("UNAVAILABLE", "server_busy")


@BOTH_STORES
@pytest.mark.rule("CO-10", "CO-15")
async def test_writes_of_a_cancelled_stream_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, GRPC) as server:
        gate = server.served.hold_commits(monkeypatch)
        stream = open_stream(server)
        writes = list(map(write_of, range(1, 6)))
        await stream.send(*writes)
        await until(lambda: server.log.queue_length == 5)
        await stream.cancel()
        await until(lambda: server.server._reader_count == 0)
        gate.open()
        ledger = server.ledger(client_id="app")
        await until(lambda: server.log.queue_length == 0)
        assert await ledger.last_sequence() == 5
        stored = await ledger.transaction_ids()
        assert [tx_id for _, tx_id, _ in await retry_on(server, *writes)] == stored
        again = open_stream(server)
        assert [outcome(one)[1] for one in await again.request(*writes) if not isinstance(one, CallError)] == stored


@pytest.mark.rule("CO-11")
async def test_stopping_server_answers_submitted_writes_and_ends_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_write_stream, "WRITES_IN_FLIGHT_MAX", 2)
    writes = list(map(write_of, range(1, 6)))
    async with run_server(tmp_path, GRPC, shutdown_ms=SHUTDOWN_MS) as server:
        gate = server.served.hold_commits(monkeypatch)
        busy, idle = open_stream(server), open_stream(server)
        await busy.send(*writes)
        await until(lambda: server.log.queue_length == 2)
        await until(lambda: server.server._reader_count == 2)
        stopping = asyncio.ensure_future(server.server.stop())
        error = await idle.end()
        assert error is not None
        assert (error.status, error.code, error.retry_after_ms) == ("UNAVAILABLE", "server_busy", 1000)
        gate.open()
        answers = await busy.answers(2)
        assert summaries(answers) == ["1", "2"]
        error = await busy.end()
        assert error is not None
        assert error.status == "UNAVAILABLE"
        await soon(stopping)
    async with run_server(tmp_path, GRPC) as server:
        again = await open_stream(server).request(*writes)
        assert [outcome(one)[1] for one in again[:2] if not isinstance(one, CallError)] == [
            expect_success(one)["committed_tx_id"] for one in answers if not isinstance(one, CallError)
        ]
        assert summaries(again[2:]) == ["3", "4", "5"]


@BOTH_STORES
@pytest.mark.rule("CO-10", "CO-16", "LG-11", "LG-13")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_retries_after_a_kill_in_the_middle_of_a_stream_get_the_same_positions(
    tmp_path: Path, moment: str
) -> None:
    writes = list(map(write_of, range(1, 9)))
    with start_script(WORKER, log_at(tmp_path / "events.db"), moment) as process:
        url, port = (await asyncio.to_thread(read_line, process)).split()
        ways = Connections(GRPC, url, int(port))
        stream = open_stream(ways)
        await stream.send(*writes)
        assert await asyncio.to_thread(read_line, process) == "there"
        process.kill()
        process.wait()
        error = await stream.end()
        assert error is not None
        assert error.status == "UNAVAILABLE"
        await ways.close()
    async with run_server(tmp_path, GRPC) as server:
        ledger = server.ledger(client_id="app")
        stored = await ledger.transaction_ids()
        assert (len(stored) > 0) is (moment == "after")
        first = await open_stream(server).request(*writes)
        found = [outcome(one) for one in first if not isinstance(one, CallError)]
        assert [sequence for sequence, _, _ in found] == list(range(1, 9))
        ids = [tx_id for _, tx_id, _ in found]
        assert ids[: len(stored)] == stored
        assert await ledger.transaction_ids() == ids
