"""The server as operators meet it: health, metrics, TLS, reload, stop; and as a process."""

import asyncio
import datetime as dt
import json
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import curl
from cli.served import ENVIRONMENT
from databases import BOTH_STORES, log_at
from doors.serving import Serving, SocketClient, api_key, item, numbers, run, serving, soon, until
from oncelog.doors import server as server_module
from oncelog.doors.server import Server, _place
from oncelog.doors.settings import ServerSettings, TlsSettings
from oncelog.errors import OncelogError, SettingsError, StoreUnavailableError
from oncelog.testing.clock import ManualClock

HANDBOOK: Final = Path(__file__).parent.parent.parent / "docs" / "http.md"
SHUTDOWN_MS: Final = 600_000
"""How long a server may wait for what was accepted."""
SHUTDOWN_S: Final = 50.0
"""A stop in order takes milliseconds; this is for a slow machine, and far less than what a server may wait."""


# --- for operators ---------------------------------------------------------------------------------------


@BOTH_STORES
def test_it_says_what_it_is_and_that_it_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            assert (await served.get("/")).json == {
                "oncelog": "1.0",
                "events": "/v1/events",
                "ledger": "/v1/ledger",
                "deltas": "/v1/sync",
                "chat": "/v1/chat",
                "health": "/readyz",
            }
            assert (await served.get("/healthz")).json == {"status": "ok"}
            await served.commit(item(1), item(2))
            ready = await served.get("/readyz")
            expected = {"status": "ok", "epoch": served.server.log.epoch, "last_committed_id": 2}
            assert (ready.status, ready.json) == (200, expected)

    run(main())


@BOTH_STORES
def test_it_is_not_ready_when_the_log_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:

            async def broken() -> None:
                raise StoreUnavailableError("the disk is gone")

            with monkeypatch.context() as patched:
                patched.setattr(served.server.log._store, "heads", broken)
                answer = await served.get("/readyz")
                assert (answer.status, answer.json) == (503, {"status": "the store cannot be read"})
                assert (await served.get("/healthz")).status == 200
            assert (await served.get("/readyz")).status == 200

    run(main())


def test_a_store_that_does_not_answer_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READY_S", 0.01)

    async def main() -> None:
        async with serving(tmp_path) as served:
            with monkeypatch.context() as patched:
                patched.setattr(served.server.log, "heads", asyncio.Event().wait)
                answer = await served.get("/readyz")
                assert (answer.status, answer.json) == (503, {"status": "the store does not answer"})
            assert (await served.get("/healthz")).status == 200

    run(main())


def test_operators_are_asked_for_no_credential(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True) as served:
            for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json"):
                assert (await served.get(path)).status == 200
            assert served.server.counts.auth_failures == 0

    run(main())


@BOTH_STORES
def test_metrics_count_what_has_happened(tmp_path: Path) -> None:
    async def main() -> None:
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
                "oncelog_last_committed_position 2.0",
                "oncelog_queue_items 0.0",
                "oncelog_deliveries_total 4.0",
            } <= lines
            await client.close()

    run(main())


@pytest.mark.rule("CO-21", "CO-33")
def test_what_is_no_http_is_not_quoted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            port = int(served.url.rpartition(":")[2])
            for end in (b"\x01", b"x" * 100_000):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer SECRET" + end + b"\r\n\r\n")
                assert (await soon(reader.readline())).startswith(b"HTTP/1.0 400 ")
                writer.close()
            assert await served.commit(item(1)) == [1]

    run(main())
    assert caplog.text.count("could not be read as HTTP") == 2
    assert "SECRET" not in caplog.text


# --- TLS -------------------------------------------------------------------------------------------------


def make_certificate(directory: Path, name: str) -> TlsSettings:
    """A certificate for localhost that signs itself, in the files that are there in place of an older one."""
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
    (directory / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return TlsSettings(certificate=str(directory / "chain.pem"), private_key=str(directory / "key.pem"))


async def name_served(served: Serving) -> str:
    """The name in the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = int(served.url.rpartition(":")[2])
    _, writer = await soon(asyncio.open_connection("127.0.0.1", port, ssl=context))
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    (name,) = x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


@pytest.mark.rule("CO-24")
def test_it_speaks_tls_and_takes_a_new_certificate(tmp_path: Path) -> None:
    async def main() -> None:
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
            assert await name_served(served) == "first"
            make_certificate(tmp_path, "second")
            served.server.reload()
            assert await name_served(served) == "second"
            # Who is connected stays.
            assert numbers(await client.submit(item(2))) == [2]
            assert await served.commit(item(3)) == [3]
            await client.close()

    run(main())


@pytest.mark.parametrize("bad", ["chain.pem", "key.pem", "both", "encrypted"])
def test_a_bad_certificate_is_not_taken(tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path, tls=make_certificate(tmp_path, "first")) as served:
            kept = (tmp_path / "key.pem").read_bytes()
            make_certificate(tmp_path, "second")
            if bad == "encrypted":
                key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
                protection = serialization.BestAvailableEncryption(b"password")
                forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
                (tmp_path / "key.pem").write_bytes(key.private_bytes(*forms, protection))
            elif bad == "both":
                (tmp_path / "key.pem").write_bytes(kept)  # good, but of another certificate
            else:
                (tmp_path / bad).write_bytes(b"nothing")
            served.server.reload()
            assert "nothing was reloaded: tls.certificate and tls.private_key cannot be used" in caplog.text
            assert await name_served(served) == "first"

    run(main())


def test_a_server_does_not_start_with_a_bad_certificate(tmp_path: Path) -> None:
    async def main() -> None:
        tls = TlsSettings(certificate=str(tmp_path / "none"), private_key=str(tmp_path / "none"))
        with pytest.raises(SettingsError, match=r"tls\.certificate"):
            async with serving(tmp_path, tls=tls):
                pytest.fail("it started")

    run(main())


# --- reload ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-22", "CO-23")
def test_a_reload_ends_revoked_keys_and_changes_grants(tmp_path: Path) -> None:
    async def main() -> None:
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
            # Nothing changes before the server is told.
            assert numbers(await ending.submit(item(2))) == [2]
            served.server.reload()
            error = await ending.receive()
            assert (error["type"], error["payload"]["code"]) == ("error", "auth_failed")
            assert await ending.closed() == 1008
            (refused, taken) = await staying.submit(item(3), item(4, "b"))
            assert (refused["reason"], taken["committed_id"]) == ("forbidden", 3)
            assert (await served.page("a", credential=revoked.text)).refusal == (401, "auth_failed")
            assert (await served.page("b", credential=changed.text)).status == 200

    run(main())


@pytest.mark.rule("CO-21")
def test_a_reload_of_a_bad_file_keeps_what_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True) as served:
            key = api_key(served, "a", ["a"], ["a"])
            client = await served.connected("a", key.text)
            (tmp_path / "keys.json").write_text("{")
            served.server.reload()
            assert "nothing was reloaded" in caplog.text
            assert numbers(await client.submit(item(1))) == [1]
            assert (await served.page("a", credential=key.text)).status == 200

    run(main())


def test_a_reload_takes_all_files_or_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True, tls=make_certificate(tmp_path, "first")) as served:
            key = api_key(served, "a", ["a"], ["a"])
            assert served.api_keys is not None
            served.api_keys.revoke(key.key.id)
            (tmp_path / "key.pem").write_bytes(b"nothing")
            served.server.reload()
            assert served.server._authenticator.authenticate(key.text).actor == "client:a"

    run(main())


# --- stop ------------------------------------------------------------------------------------------------


async def stopped(server: Server) -> float:
    """How long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await soon(server.stop())
    return loop.time() - began


@BOTH_STORES
@pytest.mark.rule("CO-11")
def test_what_was_accepted_is_answered_before_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            client = await served.connected()
            gate = served.hold_commits(monkeypatch)
            posted = asyncio.ensure_future(served.submit(item(1)))
            await soon(gate.reached.wait())
            await client.send("submit_events", {"events": [item(2)]})
            await until(lambda: served.server.log.queued == 2)
            stopping = asyncio.ensure_future(stopped(served.server))
            await until(lambda: served.server._door.is_closing)
            assert not stopping.done()
            gate.open()
            assert (await soon(posted)).json["results"][0]["status"] == "committed"
            answer = await client.receive()
            assert answer["payload"]["results"][0]["status"] == "committed"
            assert await client.closed() == 1001
            assert await stopping < SHUTDOWN_S
        async with serving(tmp_path) as served:
            assert numbers((await served.page("a")).json["events"]) == [1, 2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-11")
def test_while_it_stops_it_takes_no_new_events_from_those_who_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients that never pause would keep it from stopping."""

    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            client = await served.connected()
            gate = served.hold_commits(monkeypatch)
            await client.send("submit_events", {"events": [item(1)]}, "accepted")
            await soon(gate.reached.wait())
            stopping = asyncio.ensure_future(stopped(served.server))
            await until(lambda: served.server._door.is_closing)
            for name, kept_off in (("single", [item(2)]), ("several", [item(3), item(4)])):
                await client.send("submit_events", {"events": kept_off}, name)
                refused = await client.receive()
                assert (refused["type"], refused["msg_id"]) == ("error", name)
                assert refused["payload"]["code"] == "server_busy"
                assert refused["payload"]["details"]["retry_after_ms"] == 1000
            assert not stopping.done()
            gate.open()
            answer = await client.receive()
            assert (answer["type"], answer["msg_id"]) == ("submit_events_result", "accepted")
            assert numbers(answer["payload"]["results"]) == [1]
            assert await client.closed() == 1001
            assert await stopping < SHUTDOWN_S
        async with serving(tmp_path) as served:
            assert [one["event"]["number"] for one in (await served.page("a")).json["events"]] == [1]
            # What was refused can be sent again.
            assert await served.commit(item(2), item(3)) == [2, 3]

    run(main())


@BOTH_STORES
def test_while_it_stops_it_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            await served.get("/healthz")  # a connection that stays open
            gate = served.hold_commits(monkeypatch)
            # Two at a time take two connections: the one that is there is free again for what follows.
            posted = asyncio.ensure_future(served.submit(item(1)))
            other = asyncio.ensure_future(served.get("/healthz"))
            await soon(gate.reached.wait())
            await soon(other)
            stopping = asyncio.ensure_future(stopped(served.server))
            await until(lambda: served.server._door.is_closing)
            ready = await served.get("/readyz")
            assert (ready.status, ready.json) == (503, {"status": "stopping"})
            gate.open()
            assert (await soon(posted)).status == 200
            assert await stopping < SHUTDOWN_S
            with pytest.raises(aiohttp.ClientConnectionError):
                await served.get("/healthz")

    run(main())


@pytest.mark.parametrize("is_reading", [True, False])
def test_open_connections_do_not_keep_it_from_stopping(tmp_path: Path, is_reading: bool) -> None:
    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            clients = [await served.connected() for _ in range(10)]
            for client in clients:
                await client.sync("a")
            silent = await served.socket()  # has not said who it is
            reading = [asyncio.ensure_future(client.closed()) for client in [*clients, silent] if is_reading]
            stream = await served.stream("a")
            await stream.connected()
            await served.get("/healthz")
            assert await stopped(served.server) < SHUTDOWN_S
            assert [await one for one in reading] == [1001] * len(reading)

    run(main())


def test_one_who_does_not_read_holds_it_up_no_longer_than_is_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=300, outbox_bytes_max=100_000_000) as served:
            reading = await served.connected()
            await reading.sync("a")
            connection = reading.socket._response.connection
            assert connection is not None
            assert connection.transport is not None
            connection.transport.pause_reading()
            for number in range(1, 151):
                large = {**item(number), "event": {"type": "large", "text": "x" * 100_000}}
                await served.commit(large)
            assert await stopped(served.server) < SHUTDOWN_S
            connection.transport.resume_reading()

    run(main())


@BOTH_STORES
def test_a_stopped_server_can_be_stopped_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.server.stop()
            await served.server.stop()

    run(main())


def test_two_servers_do_not_share_a_port(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "other").mkdir()
        async with serving(tmp_path) as served:
            port = int(served.url.rpartition(":")[2])
            with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: "):
                async with serving(tmp_path / "other", port=port):
                    pytest.fail("it started")
            assert await served.commit(item(1)) == [1]

    run(main())


def test_a_store_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(OncelogError):
            async with serving(tmp_path, store=str(tmp_path / "none" / "events.db")):
                pytest.fail("it started")

    run(main())


@pytest.mark.parametrize(
    ("address", "place"),
    [
        (("127.0.0.1", 80), "127.0.0.1:80"),
        (("::1", 7171, 0, 0), "[::1]:7171"),
        (("fe80::1%eth0", 7171, 0, 2), "[fe80::1%eth0]:7171"),
    ],
)
def test_ipv6_has_its_brackets(address: Any, place: str) -> None:
    assert _place(address) == place


def loopback_addresses() -> dict[str, str]:
    """Those that this machine has, and how they stand in a URL. All have the first."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return {"127.0.0.1": "127.0.0.1", "::1": "[::1]"}
    except OSError:
        return {"127.0.0.1": "127.0.0.1"}


@pytest.mark.parametrize(("host", "shown"), loopback_addresses().items())
def test_its_address_is_one_to_connect_to(tmp_path: Path, host: str, shown: str) -> None:
    async def main() -> None:
        async with serving(tmp_path, host=host) as served:
            assert re.fullmatch(rf"http://{re.escape(shown)}:\d+", served.url)
            assert (await served.get("/healthz")).status == 200

    run(main())


def test_it_is_a_server_on_a_clock(tmp_path: Path) -> None:
    """`Server` takes its settings alone; the clock is the machine's unless a test has another."""
    settings = ServerSettings(development=True, store=str(tmp_path / "events.db"))
    assert Server(settings).urls == []
    assert Server(settings, ManualClock()).settings is settings


# --- the handbook ----------------------------------------------------------------------------------------


async def curled(command: str, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit status, and what was printed. A stream does not end by itself."""
    limited = command.replace("curl ", "curl --fail --max-time 1 ", 1)
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_shell(limited, stdout=pipe, env=environment)
    text, _ = await soon(started.communicate())
    return started.returncode, text.decode()


@pytest.mark.parametrize("kind", curl.kinds())
def test_the_examples_of_the_handbook_work(tmp_path: Path, kind: str) -> None:
    environment = curl.environment_with(kind, ENVIRONMENT, tmp_path)
    page = HANDBOOK.read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ (curl .*?)```", page, re.DOTALL)
    found = [re.fullmatch(r"(curl [^\n]* -d '[^']*'|[^\n]*)\n(.*)", block, re.DOTALL) for block in blocks]
    assert len(found) == page.count("$ curl") == 5

    def as_in_the_page(text: str, epoch: str) -> str:
        text = re.sub(r'"status_updated_at":\d+', '"status_updated_at":1794808200000', text)
        return text.replace(epoch, "d532c440b69ab0ff").strip()

    async def main() -> None:
        async with serving(tmp_path) as served:
            place = served.url.removeprefix("http://")
            for number, example in enumerate(found):
                assert example is not None
                command, shown = example.groups()
                status, text = await curled(command.replace("127.0.0.1:7171", place), environment)
                assert status == (curl.TOO_LATE if "-sN" in command else 0), text
                if number == 1:
                    await served.commit(*(item(one, "orders/1") for one in range(2, 251)))  # for the page from 100 on
                elif number == 2:
                    assert numbers(json.loads(text)["events"]) == list(range(101, 201))
                if number < 2:
                    assert as_in_the_page(text, served.server.log.epoch) == shown.strip()
                elif number == 3:
                    assert (
                        as_in_the_page(text, served.server.log.epoch)
                        .replace('id":250', 'id":1')
                        .startswith(shown.strip())
                    )
                elif number == 4:
                    assert "\nid: 2\n" in text
                    assert "\nid: 1\n" not in text

    run(main())


@pytest.mark.parametrize("kind", curl.kinds())
def test_curl_fails_where_it_is_told_to(tmp_path: Path, kind: str) -> None:
    """Otherwise an example that does not work any more would go by."""
    environment = curl.environment_with(kind, ENVIRONMENT, tmp_path)

    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            assert await curled(f"curl -s {served.url}/nowhere", environment) == (curl.REFUSED, "")
            status, text = await curled(f"curl -s {served.url}/healthz", environment)
            assert (status, json.loads(text)) == (0, {"status": "ok"})
        assert await curled(f"curl -s {served.url}/healthz", environment) == (curl.CANNOT_CONNECT, "")

    run(main())


# --- a process -------------------------------------------------------------------------------------------


class Process:
    """`oncelog serve` and what it writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def line(self, message: str) -> dict[str, Any]:
        """The next record of its log with this message."""
        assert self.process.stderr is not None
        while True:
            text = await soon(self.process.stderr.readline())
            assert text, self.lines
            self.lines.append(json.loads(text))
            if self.lines[-1]["message"].startswith(message):
                return self.lines[-1]


@asynccontextmanager
async def process(directory: Path, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A process that listens, and where."""
    command = ("-m", "oncelog", "serve", "--port", "0", "--store", log_at(directory / "events.db"))
    started = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, *command, "--set", "log.format=json", *arguments, stderr=asyncio.subprocess.PIPE
        )
    )
    try:
        yield started, (await started.line("listening"))["urls"]
    finally:
        if started.process.returncode is None:
            started.process.kill()
        await started.process.wait()


@BOTH_STORES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_stops_in_order_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        async with process(tmp_path, "--development") as (served, url), aiohttp.ClientSession() as session:
            clients = [SocketClient(await soon(session.ws_connect(f"{url}/v1/events"))) for _ in range(5)]
            for client in clients:
                await client.connect()
            assert numbers(await clients[0].submit(item(1))) == [1]
            served.process.send_signal(signal.SIGHUP)
            await served.line("keys, grants and certificates were reloaded")
            assert numbers(await clients[0].submit(item(2))) == [2]
            loop = asyncio.get_running_loop()
            began = loop.time()
            served.process.send_signal(number)
            for client in clients:
                assert await client.closed() == 1001
            await served.line("stopped")
            assert await soon(served.process.wait()) == 0
            assert loop.time() - began < SHUTDOWN_S

    run(main())


def test_a_process_that_cannot_listen_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            arguments = ("--development", "--port", str(port), "--store", str(tmp_path / "events.db"))
            refused = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "oncelog", "serve", *arguments, stderr=asyncio.subprocess.PIPE
            )
            _, told = await soon(refused.communicate())
            assert refused.returncode not in (0, None)
            assert f"cannot listen on 127.0.0.1:{port}".encode() in told
            assert b"Traceback" not in told

    run(main())
