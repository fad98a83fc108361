"""Health and reflection require no credential, so their messages, calls and streams are limited."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from deadlines import soon, until
from oncelog.server.ledger import health_service
from oncelog.server.ledger.grpc_codec import SERVICE
from server.auth.auth_material import token
from server.ledger.ledger_servers import LedgerServer, run_server
from server.ledger.ledger_transports import GRPC, code, put

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
CHECK: Final = f"/{health.SERVICE_NAME}/Check"
WATCH: Final = f"/{health.SERVICE_NAME}/Watch"
REFLECT: Final = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
GOOD: Final = token(grants={"read": ["*"], "write": ["*"]})


@asynccontextmanager
async def run_authenticated_server(directory: Path) -> AsyncIterator[tuple[LedgerServer, Any, Any]]:
    """Run a server that requires credentials; yield it, a channel without a credential, and a health stub."""
    async with run_server(directory, GRPC, tokens=True) as server:
        channel = server.wire().channel
        yield server, channel, health_pb2_grpc.HealthStub(channel)


def health_in(server: LedgerServer) -> Any:
    assert server.server.grpc_service is not None
    return server.server.grpc_service._health


async def status_of(call: Any) -> grpc.StatusCode:
    status: grpc.StatusCode = await soon(asyncio.ensure_future(call.code()))
    return status


def check_request(name: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=name)


# --- health ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
async def test_number_of_health_watches_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "HEALTH_WATCHES_MAX", 2)
    async with run_authenticated_server(tmp_path) as (server, _, stub):
        watching = [stub.Watch(check_request()) for _ in range(2)]
        for one in watching:
            assert (await soon(one.read())).status == SERVING
        refused_one = stub.Watch(check_request())
        assert await status_of(refused_one) is EXHAUSTED
        assert "at most 2" in str(await refused_one.details())
        # Single checks and writes are still served.
        assert (await soon(stub.Check(check_request(SERVICE)))).status == SERVING
        assert code(await server.ledger(credential=GOOD).write(1, put("a"))) == "OK"
        watching[0].cancel()
        await until(lambda: health_in(server).watchers.count == 1)
        again = stub.Watch(check_request())
        assert (await soon(again.read())).status == SERVING


@pytest.mark.rule("CO-27", "CO-30")
@pytest.mark.parametrize("limit", ["READS_WAITING_MAX", "READS_WAITING_PER_ADDRESS_MAX"])
async def test_number_of_incomplete_health_requests_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(health_service, limit, 2)
    async with run_authenticated_server(tmp_path) as (server, channel, stub):
        silent = [channel.stream_unary(CHECK)(), channel.stream_stream(WATCH)()]
        await until(lambda: health_in(server)._waiting.total() == 2)
        for method in (CHECK, WATCH):
            assert await status_of(channel.unary_unary(method)(b"")) is EXHAUSTED
        assert code(await server.ledger(credential=GOOD).write(1, put("a"))) == "OK"
        for one in silent:
            one.cancel()
        await until(lambda: not health_in(server)._waiting)
        assert (await soon(stub.Check(check_request()))).status == SERVING


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_health_refuses_long_and_malformed_requests(tmp_path: Path, method: str) -> None:
    async with run_authenticated_server(tmp_path) as (server, channel, _):
        call = channel.unary_unary(method) if method == CHECK else channel.unary_stream(method)
        long = check_request("a" * health_service.MESSAGE_BYTES_MAX).SerializeToString()
        for bad in (long, b"\xff", b"\x0a\x01\xff"):
            assert await status_of(call(bad)) is INVALID
        await until(lambda: health_in(server).watchers.count == 0)
        assert not health_in(server)._server_watchers  # no watcher remains
        nothing = channel.stream_unary(method)
        assert await status_of(nothing(iter(()))) is INVALID


@pytest.mark.rule("CO-30")
async def test_health_reports_an_unknown_service(tmp_path: Path) -> None:
    async with run_authenticated_server(tmp_path) as (_, _, stub):
        assert await status_of(stub.Check(check_request("unknown"))) is grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(check_request("unknown"))
        assert (await soon(watched.read())).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.rule("CO-30")
async def test_concurrent_health_reads_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC buffers a message while reading it, so concurrent reads are limited as well as calls."""
    monkeypatch.setattr(health_service, "READS_PER_ADDRESS_MAX", 2)
    taking = most = 0
    read = health_service._read_message

    async def count_read(context: Any, seconds: float) -> bytes | None:
        nonlocal taking, most
        taking += 1
        most = max(most, taking)
        try:
            return await read(context, seconds)
        finally:
            taking -= 1

    monkeypatch.setattr(health_service, "_read_message", count_read)
    async with run_authenticated_server(tmp_path) as (_, channel, stub):
        silent = [channel.stream_unary(CHECK)() for _ in range(8)]
        await until(lambda: taking == 2)
        waiting = stub.Check(check_request())
        for one in silent:
            one.cancel()
        assert (await soon(waiting)).status == SERVING
        assert most == 2


@pytest.mark.rule("CO-30")
async def test_health_call_without_a_message_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "READ_TIMEOUT_S", 0.01)
    async with run_authenticated_server(tmp_path) as (_, channel, _):
        assert await status_of(channel.stream_unary(CHECK)()) is LATE


class Sending:
    """The context of a call that sends one overlong message."""

    async def read(self) -> bytes:
        return bytes(health_service.MESSAGE_BYTES_MAX + 1)

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.AbortError


@pytest.mark.rule("CO-30")
async def test_overlong_message_is_not_kept_in_memory() -> None:
    """gRPC keeps the exception that ends a call, and the exception keeps the local variables of its frames."""
    with pytest.raises(grpc.aio.AbortError) as raised:
        await health_service._read_message(Sending(), 1)
    kept = [value for entry in raised.traceback for value in entry.frame.f_locals.values()]
    assert not [value for value in kept if isinstance(value, bytes)]


# --- reflection ------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
async def test_reflection_limits_streams_and_message_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "REFLECTIONS_MAX", 1)
    async with run_authenticated_server(tmp_path) as (_, channel, _):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        first = stub.ServerReflectionInfo()
        for _ in range(2):
            await soon(first.write(reflection_pb2.ServerReflectionRequest(list_services="")))
            names = {one.name for one in (await soon(first.read())).list_services_response.service}
            assert names == {SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME}
        second = stub.ServerReflectionInfo()
        assert await status_of(second) is EXHAUSTED
        await soon(first.done_writing())
        assert await status_of(first) is grpc.StatusCode.OK
        long = reflection_pb2.ServerReflectionRequest(list_services="a" * health_service.MESSAGE_BYTES_MAX)
        for bad in (b"\xff", long.SerializeToString()):
            assert await status_of(channel.stream_stream(REFLECT)(iter([bad]))) is INVALID


@pytest.mark.rule("CO-30")
async def test_idle_reflection_stream_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_service, "REFLECTION_TIMEOUT_S", 0.01)
    async with run_authenticated_server(tmp_path) as (_, channel, _):
        assert await status_of(channel.stream_stream(REFLECT)()) is LATE
