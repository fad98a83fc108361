"""gRPC connections of unauthenticated clients, and of clients that send or read nothing or too much."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from deadlines import WAIT_S, soon, until
from oncelog.core import transactions
from oncelog.core.limits import OPERATIONS_MAX
from oncelog.core.operations import SetEntity
from oncelog.core.transactions import ledger_scope, transaction
from oncelog.ledger import operation_codec
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.server.errors import ApiError
from oncelog.server.ledger import codec, grpc_codec, grpc_service, reads
from oncelog.server.limits import LONG_FRAME_BYTES
from server.auth.auth_material import token
from server.ledger.ledger_servers import LedgerServer, run_server
from server.ledger.ledger_transports import GRPC, HTTP, code, expect_refusal, put, read_blocks
from server.ledger.write_answers import Unchanged, read_to_end

WRITE: Final = f"/{grpc_codec.SERVICE}/Write"
GOOD: Final = token(grants={"read": ["*"], "write": ["*"]})
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
MIB: Final = 1024 * 1024


@asynccontextmanager
async def run_authenticated_server(directory: Path, **options: Any) -> AsyncIterator[LedgerServer]:
    """Run a server that requires credentials."""
    async with run_server(directory, GRPC, tokens=True, **options) as server:
        yield server


def channel_to(server: LedgerServer, *options: tuple[str, int]) -> Any:
    """Return a channel with its own connection."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.rpc_port}", [("grpc.use_local_subchannel_pool", 1), *options])


@contextmanager
def read_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the lengths of the messages that the server reads."""
    taken: list[int] = []
    message = grpc_service.LedgerGrpcService._read_message

    async def record_length(service: grpc_service.LedgerGrpcService, kind: Any, context: Any) -> Any:
        found = await message(service, kind, context)
        taken.append(found.ByteSize())
        return found

    monkeypatch.setattr(grpc_service.LedgerGrpcService, "_read_message", record_length)
    yield taken


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21", "CO-30")
async def test_call_without_a_credential_is_refused_before_its_message(tmp_path: Path) -> None:
    """A server that waited for the message first would keep waiting for clients that send only half of it."""
    async with run_authenticated_server(tmp_path) as server:
        channel = server.wire().channel
        names = [method.name for method in pb.DESCRIPTOR.services_by_name["Ledger"].methods]
        assert len(names) == 12
        for name in names:
            silent = channel.stream_stream(f"/{grpc_codec.SERVICE}/{name}")()
            assert await soon(asyncio.ensure_future(silent.code())) is grpc.StatusCode.UNAUTHENTICATED, name


@pytest.mark.rule("CO-21", "CO-30")
async def test_long_message_without_a_credential_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.WriteRequest(organization="acme", sequence=1, idempotency_key=bytes(MIB)).SerializeToString()
    async with run_authenticated_server(tmp_path) as server:
        with read_by(monkeypatch) as taken:
            error = await expect_refusal(server.wire().raw("Write", request))
            assert error.status == "UNAUTHENTICATED"
            assert taken == []
            error = await expect_refusal(server.wire(credential=GOOD).raw("Write", request))
            assert (error.status, error.field) == ("INVALID_ARGUMENT", "idempotency_key")
            assert taken == [len(request)]


@pytest.mark.rule("CO-30")
async def test_call_without_a_message_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "MESSAGE_TIMEOUT_S", 0.01)
    async with run_authenticated_server(tmp_path) as server:
        way = server.wire(credential=GOOD)
        for name in ("Write", "WatchBlocks"):
            silent = way.channel.stream_stream(f"/{grpc_codec.SERVICE}/{name}")(metadata=way.metadata)
            assert await soon(asyncio.ensure_future(silent.code())) is grpc.StatusCode.INVALID_ARGUMENT
            assert "within" in str(await silent.details())


# --- connections -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(server: LedgerServer, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.rpc_port)
    try:
        writer.write(data)
        await writer.drain()
        yield reader
    finally:
        writer.close()


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("said", [b"", PREFACE[:5], PREFACE])
async def test_connection_without_a_handshake_is_closed(tmp_path: Path, said: bytes) -> None:
    async with run_authenticated_server(tmp_path, connect_timeout_ms=50) as server, connected(server, said) as reader:
        await soon(reader.read())  # until the connection closes


@pytest.mark.rule("CO-30")
async def test_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "IDLE_MS", 50)
    async with run_authenticated_server(tmp_path) as server, connected(server, PREFACE + SETTINGS) as reader:
        await soon(reader.read())


@pytest.mark.rule("CO-27", "CO-30")
@pytest.mark.parametrize("limit", ["connections_max", "grpc_connections_max"])
async def test_number_of_grpc_connections_is_limited(tmp_path: Path, limit: str) -> None:
    async with run_authenticated_server(tmp_path, **{limit: 2}) as server:
        async with AsyncExitStack() as held:
            for _ in range(2):
                reader = await held.enter_async_context(connected(server, PREFACE + SETTINGS))
                assert await soon(reader.readexactly(9))  # the server accepts the connection and sends SETTINGS
            async with connected(server, PREFACE + SETTINGS) as reader:
                with suppress(ConnectionError):
                    assert await soon(reader.read()) == b""

        async def is_accepted() -> bool:
            channel = channel_to(server)
            try:
                call = channel.unary_unary(WRITE)(b"", timeout=WAIT_S)
                return await call.code() is grpc.StatusCode.UNAUTHENTICATED
            finally:
                await channel.close()

        while not await soon(is_accepted()):  # gRPC detects the closed connection later
            pass


@pytest.mark.rule("CO-30")
async def test_metadata_length_is_limited(tmp_path: Path) -> None:
    async with run_authenticated_server(tmp_path) as server:
        call = server.wire().channel.unary_unary(WRITE)
        for length, status in (
            (16_384, grpc.StatusCode.UNAUTHENTICATED),  # the metadata is accepted, but the token is invalid
            (grpc_service.METADATA_BYTES_MAX, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            made = call(b"", metadata=(("authorization", "Bearer " + "a" * length),), timeout=WAIT_S)
            assert await made.code() is status
        assert code(await server.ledger(credential=GOOD).write(1, put("a"))) == "OK"  # the connection is still usable


@pytest.mark.rule("CO-30")
async def test_concurrent_calls_per_connection_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "CALLS_MAX", 3)
    async with run_authenticated_server(tmp_path) as server:
        assert server.server.grpc_service is not None
        calls = server.server.grpc_service._calls
        way = server.wire(credential=GOOD)
        silent = [way.channel.stream_unary(WRITE)(metadata=way.metadata) for _ in range(6)]
        await until(lambda: len(calls) == 3)
        other = channel_to(server)  # on a separate connection
        assert await soon(other.unary_unary(WRITE)(b"").code()) is grpc.StatusCode.UNAUTHENTICATED
        await until(lambda: len(calls) == 3)  # the call on the other connection has ended
        await other.close()
        for one in silent:
            one.cancel()


# --- memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def disable_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counting frees objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Request:
    """A message that supports weak references."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


@pytest.mark.usefixtures("disable_garbage_collector")
@pytest.mark.parametrize("status", ["OK", "INVALID_ARGUMENT"])
async def test_answered_message_is_freed(tmp_path: Path, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC keeps the exception that ends a call, and the exception keeps the local variables of its frames."""
    made: list[Any] = []
    message = grpc_service.LedgerGrpcService._read_message

    async def keep_reference(service: grpc_service.LedgerGrpcService, kind: Any, context: Any) -> Any:
        found = Request(await message(service, kind, context))
        made.append(weakref.ref(found))
        return found

    async with run_authenticated_server(tmp_path) as server:
        monkeypatch.setattr(grpc_service.LedgerGrpcService, "_read_message", keep_reference)
        ledger = server.ledger(credential=GOOD)
        for sequence in (1, 2):
            asked = ledger.write(0 if status == "INVALID_ARGUMENT" else sequence, put("a", bytes(1000)))
            assert (code(await asked) if status == "OK" else (await expect_refusal(asked)).status) == status
        await until(lambda: [one() for one in made] == [None, None])


# --- long messages ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30", "LG-2")
@pytest.mark.parametrize("method", ["Write", "BatchWrite"])
async def test_message_with_too_many_operations_is_refused_before_decoding_them(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0
    operation_of = operation_codec.decode_operation

    def count_operation(message: Any, index: int) -> Any:
        nonlocal looked_at
        looked_at += 1
        return operation_of(message, index)

    async with run_authenticated_server(tmp_path) as server:
        monkeypatch.setattr(grpc_codec, "decode_operation", count_operation)
        many = [pb.Operation(delete_entity=pb.DeleteEntity(key="a"))] * OPERATIONS_MAX
        way = server.wire(credential=GOOD)
        for given in ([*many, many[0]], many):
            if method == "Write":
                request = pb.WriteRequest(organization="acme", sequence=1, operations=given)
                made = way.stub.Write(request, metadata=way.metadata)
            else:
                writes = [pb.BatchedWrite(operations=given[:9]), pb.BatchedWrite(operations=given[9:])]
                batch = pb.BatchWriteRequest(organization="acme", sequence=1, writes=writes)
                made = way.stub.BatchWrite(batch, metadata=way.metadata)
            if len(given) > OPERATIONS_MAX:
                assert await soon(made.code()) is grpc.StatusCode.INVALID_ARGUMENT
                assert (
                    await made.details() == f"operations: must have at most {OPERATIONS_MAX} entries, not {len(given)}"
                )
                assert looked_at == 0
            else:
                assert (await soon(made)).success.assigned_sequence == 1
                assert looked_at == OPERATIONS_MAX


@pytest.mark.parametrize("method", ["Write", "BatchWrite"])
async def test_long_message_is_decoded_in_another_thread(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    operation_of = operation_codec.decode_operation
    loop_thread = threading.current_thread()

    def record_thread(message: Any, index: int) -> Any:
        threads.append(threading.current_thread() is loop_thread)
        return operation_of(message, index)

    def _batched(ledger: Any) -> Any:
        return lambda sequence, one: ledger.batch_write(sequence, [one])

    async with run_authenticated_server(tmp_path) as server:
        monkeypatch.setattr(grpc_codec, "decode_operation", record_thread)
        ledger = server.ledger(credential=GOOD)
        write = ledger.write if method == "Write" else _batched(ledger)
        assert code(await write(1, put("a", bytes(LONG_FRAME_BYTES)))) == "OK"
        assert code(await write(2, put("a", bytes(1000)))) == "OK"
        assert threads == [False, True]


@pytest.mark.rule("CO-30", "LG-2")
def test_json_with_too_many_operations_is_refused_before_decoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(transactions, "_operation_from_json", lambda *given: looked_at.append(given))
    many = [{"delete_entity": {"key": "a"}}] * (OPERATIONS_MAX + 1)
    common = {"organization": "acme", "sequence": 1}
    for read, members in (
        (codec.decode_write, {"operations": many}),
        (codec.decode_batch, {"writes": [{"operations": many[:5]}, {"operations": many[5:]}]}),
    ):
        with pytest.raises(ApiError, match=f"operations: must have at most {OPERATIONS_MAX} entries, not {len(many)}"):
            read(json.dumps({**common, **members}).encode())
    assert looked_at == []


@pytest.mark.parametrize("path", ["write", "batch-write"])
async def test_long_body_is_decoded_in_another_thread(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    loop_thread = threading.current_thread()
    name = "decode_write" if path == "write" else "decode_batch"
    read = getattr(codec, name)

    def record_thread(body: bytes) -> Any:
        threads.append(threading.current_thread() is loop_thread)
        return read(body)

    monkeypatch.setattr(codec, name, record_thread)
    async with run_server(tmp_path, HTTP) as server:
        ledger = server.ledger(client_id="app")
        for sequence, length in ((1, LONG_FRAME_BYTES), (2, 1000)):
            one = put("a", bytes(length))
            made = ledger.write(sequence, one) if path == "write" else ledger.batch_write(sequence, [one])
            assert code(await made) == "OK"
        assert threads == [False, True]


# --- readers ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31")
async def test_slow_reader_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0
    to_block_members = reads.to_block_members

    def count_block(block: Any, epoch: str) -> Any:
        nonlocal sent
        sent += 1
        return to_block_members(block, epoch)

    async with run_authenticated_server(tmp_path) as server:
        assert server.server.grpc_service is not None
        service = server.server.grpc_service._service
        reader = server.ledger(credential=GOOD)
        await reader.write(1, put("a"))
        watching = await reader.watch_blocks()
        await watching.next()
        with monkeypatch.context() as patched:
            patched.setattr(grpc_service, "CLOSE_TIMEOUT_S", 0.05)
            patched.setattr(service, "limits", replace(service.limits, heartbeat_ms=200))
            patched.setattr(reads, "to_block_members", count_block)
            scope = ledger_scope("acme")
            for number in range(12):
                submissions = [transaction(scope, f"{number}-{n}", 1, [SetEntity("a", b"")]) for n in range(1000)]
                await server.log.submit_many(submissions)
            await until(Unchanged(lambda: sent))
            await until(lambda: server.server.counts.slow_readers_closed == 1)
            await until(lambda: len(server.server.grpc_service or ()) == 0)
        assert await read_to_end(watching) == "UNAVAILABLE"
        # A client that reads gets all blocks and remains connected.
        again = await reader.watch_blocks()
        assert len(await read_blocks(again, 13)) == 13
        await again.close()
        assert server.server.counts.slow_readers_closed == 1
