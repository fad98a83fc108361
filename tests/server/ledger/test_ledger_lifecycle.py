"""Operation of the Ledger API: health, reflection, shutdown, TLS and store failures."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from databases import BOTH_STORES
from deadlines import WAIT_S, soon, until
from oncelog.errors import StoreUnavailableError
from oncelog.server.ledger import grpc_service
from oncelog.server.settings import TlsSettings
from server.ledger.ledger_servers import LedgerServer, key, run_server
from server.ledger.ledger_transports import (
    GRPC,
    HTTP,
    CallError,
    GrpcWire,
    Ledger,
    code,
    expect_refusal,
    expect_success,
    put,
)
from server.running_server import serving
from server.test_server_app import make_certificate

pytestmark = BOTH_STORES

ONLY_GRPC: Final = pytest.mark.parametrize("wire", [GRPC], indirect=True)
SERVICE: Final = "oncelog.ledger.v1.Ledger"
SHUTDOWN_MS: Final = 600_000
"""Longer than any wait in a test. A server that stops only at this deadline therefore fails the test."""
SET: Final = put("a", b"1")
SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(server: LedgerServer) -> Any:
    return health_pb2_grpc.HealthStub(server.wire(GRPC).channel)


# --- health and reflection ---------------------------------------------------------------------------------------


@ONLY_GRPC
async def test_health_covers_the_server_and_the_service(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, tokens=True) as server:  # health requires no credential
        for name in ("", SERVICE):
            answer = await health_of(server).Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
            assert answer.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health_of(server).Check(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_S)
        assert raised.value.code().name == "NOT_FOUND"


@ONLY_GRPC
async def test_stopping_server_reports_not_serving_and_answers_accepted_writes(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS) as server:
        ledger = server.ledger(client_id="app")
        watched = health_of(server).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await soon(watched.read())).status == SERVING
        gate = server.served.hold_commits(monkeypatch)
        held = asyncio.ensure_future(ledger.write(1, SET, key=key(1)))
        await soon(gate.reached.wait())
        stopping = asyncio.ensure_future(server.server.stop())
        assert (await soon(watched.read())).status == NOT_SERVING
        watched.cancel()
        assert not stopping.done()
        assert (await expect_refusal(ledger.write(2, SET, key=key(2)))).status == "UNAVAILABLE"
        gate.open()
        assert code(await soon(held)) == "OK"
        await soon(stopping)
    async with run_server(tmp_path, wire) as server:
        assert await server.ledger(client_id="app").last_sequence() == 1


@ONLY_GRPC
async def test_calls_during_shutdown_fail_as_unavailable(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once stopped, gRPC answers calls with CANCELLED. The server therefore first waits until calls stop arriving."""
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS) as server:
        began = asyncio.Event()
        service: Any = server.server.grpc_service
        sleep = asyncio.sleep

        async def sleep_until_called(delay_s: float, *given: Any) -> Any:
            """Wait for the next call rather than for a quiet period, which might never come on a busy machine."""
            if delay_s == grpc_service.QUIET_S:
                came = service._call_count
                await until(lambda: service._call_count != came or all(caller.done() for caller in callers))
                delay_s = 0
            return await sleep(delay_s, *given)

        monkeypatch.setattr(grpc_service, "STOP_NOTICE_S", WAIT_S)
        monkeypatch.setattr(asyncio, "sleep", sleep_until_called)

        async def called(number: int) -> str | None:
            ledger = server.ledger(client_id=f"app-{number}")
            for sequence in count(1):
                try:
                    await ledger.write(sequence, SET)
                except CallError as error:
                    return error.status
                began.set()
            return None

        callers = [asyncio.ensure_future(called(number)) for number in range(60)]
        await soon(began.wait())
        await soon(server.server.stop())
        statuses = await soon(asyncio.gather(*callers))
        assert set(statuses) == {"UNAVAILABLE"}


@pytest.mark.parametrize("wire", [HTTP], indirect=True)
async def test_stopping_server_refuses_requests_on_open_connections_with_a_retry_delay(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS) as server:
        ledger, other = server.ledger(client_id="app"), server.ledger(client_id="other")
        await asyncio.gather(ledger.last_sequence(), other.last_sequence())  # open two connections, which remain open
        gate = server.served.hold_commits(monkeypatch)
        held = asyncio.ensure_future(ledger.write(1, SET, key=key(1)))
        await soon(gate.reached.wait())
        stopping = asyncio.ensure_future(server.server.stop())
        await until(lambda: server.server.is_closing)
        error = await expect_refusal(other.write(1, SET, key=key(1)))
        assert (error.http_status, error.code, error.retry_after_ms) == (503, "server_busy", 1000)
        assert error.message == "the server is stopping"
        gate.open()
        assert code(await soon(held)) == "OK"
        await soon(stopping)
    async with run_server(tmp_path, wire) as server:
        assert await server.ledger(client_id="other").last_sequence() == 0


@ONLY_GRPC
async def test_health_watch_does_not_delay_shutdown(tmp_path: Path, wire: str) -> None:
    """gRPC clients with health checking keep such a watch open."""
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS) as server:
        watched = health_of(server).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await soon(watched.read())).status == SERVING
        stopping = asyncio.ensure_future(server.server.stop())
        assert (await soon(watched.read())).status == NOT_SERVING
        await soon(stopping)
        watched.cancel()


@ONLY_GRPC
async def test_closed_stream_does_not_count_as_a_failed_authentication(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        await ledger.write(1, SET)
        watching = await ledger.watch_blocks()
        await watching.next()
        await watching.close()
        await until(lambda: server.server._reader_count == 0)
        assert server.server.counts.requests == {("ledger", "grpc", "ok"): 2}


@pytest.mark.rule("CO-11")
async def test_writes_accepted_before_shutdown_are_answered_and_stored(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire, shutdown_ms=SHUTDOWN_MS) as server:
        gate = server.served.hold_commits(monkeypatch)
        ledgers = [server.ledger(client_id=f"client-{number}") for number in range(5)]
        held = [asyncio.ensure_future(ledger.write(1, SET, key=key(1))) for ledger in ledgers]
        await until(lambda: server.log.queue_length == 5)
        stopping = asyncio.ensure_future(server.server.stop())
        await until(lambda: server.server.is_closing)
        gate.open()
        answers = [expect_success(answer) for answer in await asyncio.gather(*held)]
        await soon(stopping)
    async with run_server(tmp_path, wire) as server:
        for number, answer in enumerate(answers):
            again = await server.ledger(client_id=f"client-{number}").write(1, SET, key=key(1))
            assert again["error"]["committed_tx_id"] == answer["committed_tx_id"]


async def reflect(server: LedgerServer, **asked: Any) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(server.wire(GRPC).channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**asked)]))
    return await soon(call.read())


@ONLY_GRPC
async def test_reflection_describes_the_service(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        listed = await reflect(server, list_services="")
        names = {one.name for one in listed.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        found = await reflect(server, file_containing_symbol=SERVICE)
        (data,) = found.file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        (service,) = file.service
        assert {method.name for method in service.method} == {
            "Write",
            "BatchWrite",
            "StreamWrites",
            "GetClientState",
            "GetEntity",
            "ListEntities",
            "ListRelationships",
            "CheckRelationship",
            "GetTransaction",
            "GetBlock",
            "GetProof",
            "WatchBlocks",
        }


@ONLY_GRPC
async def test_disabling_openapi_also_disables_reflection(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire, openapi=False) as server:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reflect(server, list_services="")
        assert raised.value.code().name == "UNIMPLEMENTED"
        assert code(await server.ledger(client_id="app").write(1, SET, key=key(1))) == "OK"


async def test_grpc_can_be_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path, grpc=False) as served:
        assert served.server.grpc_address == ""
        body = {"organization": "acme", "sequence": 1, "operations": [{"delete_entity": {"key": "a"}}]}
        assert (await served.request("POST", "/v1/ledger/write", json=body)).status == 200


# --- store failures ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-16")
async def test_write_during_a_store_failure_has_an_unknown_outcome(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        store: Any = server.log._store

        async def fail_commit(*_: Any, **__: Any) -> Any:
            raise StoreUnavailableError("the disk is gone")

        commit = store.commit

        async def commit_and_fail(*given: Any, **named: Any) -> Any:
            await commit(*given, **named)
            raise StoreUnavailableError("the disk is gone")

        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", fail_commit)
            error = await expect_refusal(ledger.write(1, SET, key=key(1)))
            assert (error.status, error.code, error.retry_after_ms) == ("UNAVAILABLE", "server_error", 1000)
            assert error.message == "the outcome is unknown; send the request again with the same id"
            for name in ("side_state", "entities", "heads"):
                patched.setattr(store, name, fail_commit)
            for call in (ledger.get_client_state(), ledger.get_entity("a"), ledger.list_entities()):
                assert (await expect_refusal(call)).status == "UNAVAILABLE"
        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", commit_and_fail)
            assert (await expect_refusal(ledger.write(1, SET, key=key(1)))).status == "UNAVAILABLE"
        again = await ledger.write(1, SET, key=key(1))
        assert (code(again), again["error"]["assigned_sequence"]) == ("ALREADY_COMMITTED", 1)
        assert await ledger.transaction_ids() == [again["error"]["committed_tx_id"]]


# --- TLS ---------------------------------------------------------------------------------------------------------


def certificate_of(tls: TlsSettings) -> bytes:
    return Path(str(tls.certificate)).read_bytes()


def open_secure_client(server: LedgerServer, certificate: bytes) -> Ledger:
    """Return a client with its own connection, because gRPC would reuse an open one."""
    credentials = grpc.ssl_channel_credentials(certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.secure_channel(f"localhost:{server.rpc_port}", credentials, options)
    return Ledger(GrpcWire(channel), "acme", client_id="app")


@ONLY_GRPC
@pytest.mark.rule("CO-24")
async def test_grpc_uses_tls_and_reloads_the_certificate(tmp_path: Path, wire: str) -> None:
    tls = make_certificate(tmp_path, "first")
    first = certificate_of(tls)
    async with run_server(tmp_path, wire, tls=tls) as server:
        ledger = open_secure_client(server, first)
        answer = expect_success(await ledger.write(1, SET, key=key(1)))
        error = await expect_refusal(server.ledger(client_id="app").write(2, SET, key=key(2)))  # a client without TLS
        assert error.status == "UNAVAILABLE"
        make_certificate(tmp_path, "second")
        second = certificate_of(tls)
        server.server.reload()
        other = open_secure_client(server, second)
        assert await other.write(1, SET, key=key(1)) == answer
        # Open connections remain usable. A new client that trusts only the old certificate is refused.
        assert code(await ledger.write(2, SET, key=key(2))) == "OK"
        late = open_secure_client(server, first)
        assert (await expect_refusal(late.last_sequence())).status == "UNAVAILABLE"
        for one in (ledger, other, late):
            await one.wire.close()


@ONLY_GRPC
@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("bad", ["chain.pem", "key.pem", "missing", "both"])
@pytest.mark.parametrize("is_reloaded", [True, False], ids=["reloaded", "written"])
async def test_grpc_keeps_the_certificate_when_the_new_one_is_invalid(
    tmp_path: Path, wire: str, bad: str, is_reloaded: bool
) -> None:
    tls: TlsSettings = make_certificate(tmp_path, "first")
    first = certificate_of(tls)
    async with run_server(tmp_path, wire, tls=tls) as server:
        before = open_secure_client(server, first)
        assert await before.last_sequence() == 0
        if bad == "missing":
            (tmp_path / "key.pem").unlink()
        elif bad == "both":  # the valid key of a different certificate
            kept = (tmp_path / "key.pem").read_bytes()
            make_certificate(tmp_path, "second")
            (tmp_path / "key.pem").write_bytes(kept)
        else:
            (tmp_path / bad).write_bytes(b"nothing")
        if is_reloaded:
            server.server.reload()
        after = open_secure_client(server, first)
        assert code(await after.write(1, SET, key=key(1))) == "OK"
        for one in (before, after):
            await one.wire.close()


@ONLY_GRPC
@pytest.mark.rule("CO-24")
async def test_grpc_uses_a_new_certificate_only_after_a_reload(tmp_path: Path, wire: str) -> None:
    """As over HTTP, a reload reads all files or none, and files are not read while they are being written."""
    tls: TlsSettings = make_certificate(tmp_path, "first")
    first = certificate_of(tls)
    async with run_server(tmp_path, wire, tls=tls) as server:
        make_certificate(tmp_path, "second")
        ledger = open_secure_client(server, first)
        assert code(await ledger.write(1, SET, key=key(1))) == "OK"
        await ledger.wire.close()
