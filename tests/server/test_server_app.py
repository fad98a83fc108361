"""Operation of the server: health, metrics, TLS, reload and shutdown."""

import asyncio
import datetime as dt
import re
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from databases import BOTH_STORES
from deadlines import soon, turns, until
from oncelog.errors import AuthError, OncelogError, SettingsError, StoreUnavailableError
from oncelog.server import operator_endpoints, websocket
from oncelog.server import tls as tls_module
from oncelog.server.app import Server
from oncelog.server.http_server import format_address
from oncelog.server.listen_address import ListenAddress
from oncelog.server.settings import ServerSettings, TlsSettings
from oncelog.testing.clock import ManualClock
from server.auth.auth_material import write_file
from server.running_server import Serving, api_key, item, numbers, serving

SHUTDOWN_MS: Final = 600_000
"""The time that a stopping server may wait for accepted requests."""
SHUTDOWN_S: Final = 60.0
"""Guards against a hang. It is less than `SHUTDOWN_MS`, because a normal stop takes milliseconds."""


# --- health and metrics ---------------------------------------------------------------------------------------


@BOTH_STORES
async def test_root_page_health_and_readiness_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert (await served.get("/")).json["health"] == "/readyz"
        assert (await served.get("/healthz")).json == {"status": "ok"}
        await served.commit(item(1), item(2))
        ready = await served.get("/readyz")
        expected = {"status": "ok", "epoch": served.server.log.epoch, "last_committed_id": 2}
        assert (ready.status, ready.json) == (200, expected)


@BOTH_STORES
async def test_server_is_not_ready_while_the_log_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as served:

        async def fail_read() -> None:
            raise StoreUnavailableError("the disk is gone")

        with monkeypatch.context() as patched:
            patched.setattr(served.server.log._store, "heads", fail_read)
            answer = await served.get("/readyz")
            assert (answer.status, answer.json) == (503, {"status": "the store cannot be read"})
            assert (await served.get("/healthz")).status == 200
        assert (await served.get("/readyz")).status == 200


async def test_readiness_reports_an_unresponsive_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_endpoints, "READY_TIMEOUT_S", 0.01)
    async with serving(tmp_path) as served:
        with monkeypatch.context() as patched:
            patched.setattr(served.server.log, "heads", asyncio.Event().wait)
            answer = await served.get("/readyz")
            assert (answer.status, answer.json) == (503, {"status": "the store does not answer"})
        assert (await served.get("/healthz")).status == 200


async def test_operator_endpoints_require_no_credential(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert (await served.get(path)).status == 200
        assert served.server.counts.auth_failures == 0


@BOTH_STORES
async def test_metrics_count_events_requests_and_connections(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1), item(2))
        await served.submit(item(1), {**item(3), "event": {}})
        await served.page("a")
        await served.page()
        client = await served.connected()
        stream = await served.stream("a")
        await stream.connected()
        await stream.events(2)
        answer = await served.get("/metrics")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = set(answer.body.decode().splitlines())
        assert {
            'oncelog_connections{kind="ws"} 1.0',
            'oncelog_connections{kind="sse"} 1.0',
            "oncelog_subscribers 2.0",
            'oncelog_events_total{outcome="committed"} 2.0',
            'oncelog_events_total{outcome="replayed"} 1.0',
            'oncelog_events_total{outcome="rejected_validation_failed"} 1.0',
            'oncelog_requests_total{door="events",kind="http",outcome="ok"} 4.0',
            'oncelog_requests_total{door="events",kind="http",outcome="bad_request"} 1.0',
            'oncelog_last_committed_position{lane="0"} 2.0',
            "oncelog_queue_items 0.0",
            "oncelog_deliveries_total 4.0",
        } <= lines
        await client.close()


@pytest.mark.rule("CO-21", "CO-33")
async def test_log_does_not_quote_malformed_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as served:
        port = served.port
        for end in (b"\x01", b"x" * 100_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer SECRET" + end + b"\r\n\r\n")
            assert (await soon(reader.readline())).startswith(b"HTTP/1.0 400 ")
            writer.close()
        assert await served.commit(item(1)) == [1]
    assert caplog.text.count("received data is not valid HTTP") == 2
    assert "SECRET" not in caplog.text


# --- TLS -------------------------------------------------------------------------------------------------


def make_certificate(directory: Path, name: str) -> TlsSettings:
    """Write a self-signed certificate for localhost, and overwrite an existing one."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (directory / "chain.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_file(
        directory / "key.pem",
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return TlsSettings(certificate=str(directory / "chain.pem"), private_key=str(directory / "key.pem"))


async def certificate_subject(served: Serving) -> str:
    """Return the subject name of the certificate that a new connection receives."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = served.port
    _, writer = await soon(asyncio.open_connection("127.0.0.1", port, ssl=context))
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    (name,) = x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


@pytest.mark.rule("CO-24")
async def test_tls_server_reloads_its_certificate(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path, "first")
    context = ssl.create_default_context(cafile=tls.certificate)
    connector = aiohttp.TCPConnector(ssl=context)
    async with serving(tmp_path, tls=tls, connector=connector) as served:
        served.server.urls = [served.url.replace("127.0.0.1", "localhost")]
        assert served.url.startswith("https://")
        assert await served.commit(item(1)) == [1]
        client = await served.connected()
        assert (await client.sync("a"))["events"][0]["committed_id"] == 1
        assert (await served.page("a", headers={"Origin": served.url})).status == 200
        assert (await served.page("a", headers={"Origin": served.url.replace("https", "http")})).status == 403
        assert await certificate_subject(served) == "first"
        make_certificate(tmp_path, "second")
        served.server.reload()
        assert await certificate_subject(served) == "second"
        # Existing connections remain open.
        assert numbers(await client.submit(item(2))) == [2]
        assert await served.commit(item(3)) == [3]
        await client.close()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("chain.pem", "{0}/chain.pem contains no PEM certificate"),
        ("key.pem", "{0}/key.pem contains no PEM private key"),
        ("both", "the private key in {0}/key.pem does not match the certificate in {0}/chain.pem"),
        ("encrypted", "the private key in {0}/key.pem is encrypted"),
    ],
)
async def test_reload_of_a_bad_certificate_reports_the_file_and_keeps_the_old_one(
    tmp_path: Path, bad: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, tls=make_certificate(tmp_path, "first")) as served:
        kept = (tmp_path / "key.pem").read_bytes()
        make_certificate(tmp_path, "second")
        if bad == "encrypted":
            key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
            protection = serialization.BestAvailableEncryption(b"password")
            forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
            (tmp_path / "key.pem").write_bytes(key.private_bytes(*forms, protection))
        elif bad == "both":
            (tmp_path / "key.pem").write_bytes(kept)  # a valid key, but for another certificate
        else:
            (tmp_path / bad).write_bytes(b"nothing")
        served.server.reload()
        expected = problem.format(tmp_path)
        assert f"not reloaded: tls.certificate and tls.private_key cannot be used: {expected}" in caplog.text
        assert await certificate_subject(served) == "first"


async def test_certificate_and_key_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are replaced while OpenSSL loads them cannot mix two certificates."""
    tls = make_certificate(tmp_path, "first")
    pem = (tmp_path / "key.pem").read_bytes(), (tmp_path / "chain.pem").read_bytes()
    new_context = tls_module._new_context

    def replace_files() -> ssl.SSLContext:
        make_certificate(tmp_path, "second")
        return new_context()

    monkeypatch.setattr(tls_module, "_new_context", replace_files)
    async with serving(tmp_path, tls=tls) as served:
        assert await certificate_subject(served) == "first"
        assert served.server._certificate.pem == pem


async def test_server_does_not_start_with_a_bad_certificate(tmp_path: Path) -> None:
    tls = TlsSettings(certificate=str(tmp_path / "none"), private_key=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"tls\.certificate"):
        async with serving(tmp_path, tls=tls):
            pytest.fail("the server started")


# --- reload ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-22", "CO-23")
async def test_reload_closes_revoked_keys_and_applies_changed_grants(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        revoked, changed = (api_key(served, name, ["a"], ["a"]) for name in ("revoked", "changed"))
        ending = await served.connected("revoked", revoked.text)
        staying = await served.connected("changed", changed.text)
        assert numbers(await staying.submit(item(1))) == [1]
        assert served.api_keys is not None
        served.api_keys.revoke(revoked.key.id)
        path = tmp_path / "keys.json"
        before, after = path.read_text().split('"changed"', 1)
        path.write_text(before + '"changed"' + after.replace('"a"', '"b"'))
        served.server.reload()
        error = await ending.receive()
        assert (error["type"], error["payload"]["code"]) == ("error", "auth_failed")
        assert await ending.wait_closed() == 1008
        (refused, taken) = await staying.submit(item(3), item(4, "b"))
        assert (refused["reason"], taken["status"]) == ("forbidden", "committed")
        assert (await served.page("a", credential=revoked.text)).refusal == (401, "auth_failed")
        assert (await served.page("b", credential=changed.text)).status == 200


@pytest.mark.rule("CO-21")
async def test_reload_of_a_bad_key_file_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "a", ["a"], ["a"])
        client = await served.connected("a", key.text)
        (tmp_path / "keys.json").write_text("{")
        served.server.reload()
        assert "not reloaded: " in caplog.text
        assert numbers(await client.submit(item(1))) == [1]
        assert (await served.page("a", credential=key.text)).status == 200


@pytest.mark.rule("CO-28")
async def test_bad_certificate_does_not_prevent_the_reload_of_api_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, api_keys=True, tls=make_certificate(tmp_path, "first")) as served:
        key = api_key(served, "a", ["a"], ["a"])
        assert served.api_keys is not None
        served.api_keys.revoke(key.key.id)
        (tmp_path / "key.pem").write_bytes(b"nothing")
        served.server.reload()
        assert caplog.text.count("not reloaded: tls.certificate and tls.private_key cannot be used") == 1
        with pytest.raises(AuthError):
            served.server._authenticator.authenticate(key.text)
        assert await certificate_subject(served) == "first"


# --- stop ------------------------------------------------------------------------------------------------


async def stop(server: Server) -> None:
    """Stop the server, and assert that it takes less time than it may wait for accepted requests."""
    await asyncio.wait_for(server.stop(), SHUTDOWN_S)


@BOTH_STORES
@pytest.mark.rule("CO-11")
async def test_stopping_server_answers_accepted_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
        client = await served.connected()
        gate = served.hold_commits(monkeypatch)
        posted = asyncio.ensure_future(served.submit(item(1)))
        await soon(gate.reached.wait())
        await client.send("submit_events", {"events": [item(2)]})
        await until(lambda: served.server.log.queue_length == 2)
        stopping = asyncio.ensure_future(stop(served.server))
        await until(lambda: served.server.is_closing)
        assert not stopping.done()
        gate.open()
        assert (await soon(posted)).json["results"][0]["status"] == "committed"
        answer = await client.receive()
        assert answer["payload"]["results"][0]["status"] == "committed"
        assert await client.wait_closed() == 1001
        await stopping
    async with serving(tmp_path) as served:
        assert numbers((await served.page("a")).json["events"]) == [1, 2]


@pytest.mark.rule("CO-11")
async def test_stopping_server_waits_until_accepted_submits_have_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is written only after earlier broadcasts, and therefore possibly some time after the commit."""
    async with serving(tmp_path) as served:
        client = await served.connected()
        gate = served.hold_commits(monkeypatch)
        await client.send("submit_events", {"events": [item(1)]})
        await soon(gate.reached.wait())
        replied = asyncio.ensure_future(served.server.apis.event_sessions.wait_for_replies())
        await turns()
        was_done = replied.done()
        gate.open()
        assert not was_done
        await soon(replied)
        assert (await client.receive())["payload"]["results"][0]["status"] == "committed"


@BOTH_STORES
@pytest.mark.rule("CO-11")
async def test_stopping_server_refuses_new_events_of_connected_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that submit continuously must not prevent the server from stopping."""
    async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
        client = await served.connected()
        gate = served.hold_commits(monkeypatch)
        await client.send("submit_events", {"events": [item(1)]}, "accepted")
        await soon(gate.reached.wait())
        stopping = asyncio.ensure_future(stop(served.server))
        await until(lambda: served.server.is_closing)
        for name, kept_off in (("single", [item(2)]), ("several", [item(3), item(4)])):
            await client.send("submit_events", {"events": kept_off}, name)
        await until(lambda: served.server.counts.requests["events", "websocket", "server_busy"] == 2)
        assert not stopping.done()
        gate.open()
        answer = await client.receive()
        assert (answer["type"], answer["msg_id"]) == ("submit_events_result", "accepted")
        assert numbers(answer["payload"]["results"]) == [1]
        for name in ("single", "several"):
            refused = await client.receive()
            assert (refused["type"], refused["msg_id"]) == ("error", name)
            assert refused["payload"]["code"] == "server_busy"
            assert refused["payload"]["details"]["retry_after_ms"] == 1000
        assert await client.wait_closed() == 1001
        await stopping
    async with serving(tmp_path) as served:
        assert [one["event"]["number"] for one in (await served.page("a")).json["events"]] == [1]
        # The client can send the refused events again.
        assert await served.commit(item(2), item(3)) == [2, 3]


@BOTH_STORES
async def test_stopping_server_is_not_ready_and_then_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
        await served.get("/healthz")  # a connection that remains open
        gate = served.hold_commits(monkeypatch)
        # Two concurrent requests use two connections, so one of them is idle for the next request.
        posted = asyncio.ensure_future(served.submit(item(1)))
        other = asyncio.ensure_future(served.get("/healthz"))
        await soon(gate.reached.wait())
        await soon(other)
        stopping = asyncio.ensure_future(stop(served.server))
        await until(lambda: served.server.is_closing)
        ready = await served.get("/readyz")
        assert (ready.status, ready.json) == (503, {"status": "stopping"})
        gate.open()
        assert (await soon(posted)).status == 200
        await stopping
        with pytest.raises(aiohttp.ClientConnectionError):
            await served.get("/healthz")


@pytest.mark.parametrize("is_reading", [True, False])
async def test_open_connections_do_not_prevent_the_server_from_stopping(
    tmp_path: Path, is_reading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_reading:  # clients do not answer the close frames
        monkeypatch.setattr(websocket, "CLOSE_WAIT_S", 0.1)
    async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
        clients = [await served.connected() for _ in range(10)]
        for client in clients:
            await client.sync("a")
        silent = await served.socket()  # a socket that has not sent `connect`
        reading = [asyncio.ensure_future(client.wait_closed()) for client in [*clients, silent] if is_reading]
        stream = await served.stream("a")
        await stream.connected()
        await served.get("/healthz")
        await stop(served.server)
        assert [await one for one in reading] == [1001] * len(reading)


async def test_slow_reader_delays_the_stop_for_a_bounded_time(tmp_path: Path) -> None:
    async with serving(tmp_path, shutdown_ms=300, outbox_bytes_max=100_000_000) as served:
        reading = await served.connected()
        await reading.sync("a")
        connection = reading.socket._response.connection
        assert connection is not None
        assert connection.transport is not None
        connection.transport.pause_reading()
        large = {"type": "large", "text": "x" * 100_000}
        for number in range(1, 151, 10):
            await served.commit(*({**item(one), "event": large} for one in range(number, number + 10)))
        await stop(served.server)
        connection.transport.resume_reading()


@BOTH_STORES
async def test_stop_is_idempotent(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.server.stop()
        await served.server.stop()


async def test_second_server_on_the_same_port_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with serving(tmp_path) as served:
        port = served.port
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: "):
            async with serving(tmp_path / "other", port=port):
                pytest.fail("the server started")
        assert await served.commit(item(1)) == [1]


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_host_that_no_name_server_accepts_is_reported(host: str) -> None:
    with pytest.raises(SettingsError, match=rf"^cannot listen on {host}:80: Name or service not known$"):
        await ListenAddress(host, 80).check()


async def test_server_does_not_start_without_its_store(tmp_path: Path) -> None:
    with pytest.raises(OncelogError):
        async with serving(tmp_path, store=str(tmp_path / "none" / "events.db")):
            pytest.fail("the server started")


@pytest.mark.parametrize(
    ("address", "place"),
    [
        (("127.0.0.1", 80), "127.0.0.1:80"),
        (("::1", 7171, 0, 0), "[::1]:7171"),
        (("fe80::1%eth0", 7171, 0, 2), "[fe80::1%eth0]:7171"),
    ],
)
def test_ipv6_address_is_shown_in_brackets(address: Any, place: str) -> None:
    assert format_address(address) == place


def loopback_addresses() -> dict[str, str]:
    """Return this machine's loopback addresses and their form in a URL."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return {"127.0.0.1": "127.0.0.1", "::1": "[::1]"}
    except OSError:
        return {"127.0.0.1": "127.0.0.1"}


@pytest.mark.parametrize(("host", "shown"), loopback_addresses().items())
async def test_shown_url_accepts_connections(tmp_path: Path, host: str, shown: str) -> None:
    async with serving(tmp_path, host=host) as served:
        assert re.fullmatch(rf"http://{re.escape(shown)}:\d+", served.url)
        assert (await served.get("/healthz")).status == 200


def test_server_requires_only_settings(tmp_path: Path) -> None:
    """The clock of `Server` is optional."""
    settings = ServerSettings(development=True, store=str(tmp_path / "events.db"))
    assert Server(settings).urls == []
    assert Server(settings, ManualClock()).settings is settings
