"""`oncelog doctor --url` and the ports of `--config`: health, TLS, clock, token and other programs."""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cli.doctor.checks import create_key, doctor, write_certificate, write_settings
from cli.scripted_server import answer, scripted
from cli.server_process import ServerProcess, serving
from deadlines import WAIT_S
from oncelog.cli.doctor import server
from oncelog.cli.doctor.server import judge_readiness

READY = {"status": "ok", "epoch": "00000000000000aa", "last_committed_id": 3}


@contextmanager
def scripted_paths(answers: dict[str, tuple[int, Any]], **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a server with these answers, and 404 for other paths."""

    def handle(handler: BaseHTTPRequestHandler, _: int) -> None:
        status, body = answers.get(handler.path.partition("?")[0], (404, {"error": "not found"}))
        handler.date_time_string = lambda *_: headers.get("Date", formatdate(usegmt=True))  # type: ignore[method-assign]
        answer(handler, status, body)

    with scripted(handle) as served:
        yield served


@contextmanager
def listening() -> Iterator[int]:
    """Listen on a port, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        yield bound.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than the default."""
    monkeypatch.setattr(server, "TIMEOUT_S", WAIT_S)


# --- a URL


def test_running_server_and_its_token(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json")
    options = (f"--set=api_keys.file={tmp_path}/keys.json",)
    with serving(tmp_path, *options) as running:
        found = doctor("--url", running.url, env={"ONCELOG_TOKEN": key})
        assert found.status == 0
        assert "is ready: epoch" in found.get("ok", "server")
        assert "accepts the token" in found.get("ok", "token")
        assert "agree" in found.get("ok", "clock")
        (tmp_path / "token").write_text(key[:-1] + ("A" if key[-1] != "A" else "E"))
        (tmp_path / "token").chmod(0o600)
        found = doctor("--url", running.url, "--token-file", tmp_path / "token")
        assert "refuses the token" in found.get("problem", "token")
        assert key[:30] not in found.text


def test_key_without_grants_is_accepted(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json")
    with serving(tmp_path, f"--set=api_keys.file={tmp_path}/keys.json") as running:
        doctor("--url", running.url, "--token", key).get("ok", "token")


def test_server_of_the_environment_or_a_profile_is_checked(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.toml"
    with serving(tmp_path, "--development", "--quiet") as running:
        profiles.write_text(f'[profiles.shop]\nurl = "{running.url}"\n', encoding="utf-8")
        profiles.chmod(0o600)
        environment = {"ONCELOG_PROFILES_FILE": str(profiles)}
        assert running.url in doctor("--profile", "shop", env=environment).get("ok", "server")
        assert running.url in doctor(env={**environment, "ONCELOG_URL": running.url}).get("ok", "server")


def test_unreachable_server_is_a_problem() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        said = doctor("--url", f"http://127.0.0.1:{bound.getsockname()[1]}").get("problem", "server")
    assert "cannot be reached: Connection refused" in said
    assert "Start the server, or correct the URL" in said


def test_unknown_host_is_a_problem() -> None:
    found = doctor("--url", "http://no-such-host.invalid")
    assert "cannot be reached" in found.get("problem", "server")
    assert "is not encrypted" in found.get("warning", "tls")


def test_silent_server_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 0.2)
    with listening() as port:
        said = doctor("--url", f"http://127.0.0.1:{port}").get("problem", "server")
    assert "did not respond within 0.2 s" in said


def test_other_program_at_the_url_is_a_problem() -> None:
    with scripted_paths({}) as (url, _):
        said = doctor("--url", url).get("problem", "server")
    assert "does not answer like an Oncelog server (HTTP status 404)" in said


def test_token_is_sent_only_to_an_oncelog_server() -> None:
    with scripted_paths({"/readyz": (200, {"status": "ok"})}) as (url, received):
        doctor("--url", url, "--token", "secret-token").get("problem", "server")
    assert [one["path"] for one in received] == ["/readyz"]


@pytest.mark.parametrize("body", [b"[1]", b"no json", b"\xff", b'{"epoch":'])
def test_malformed_answer_is_a_problem(body: bytes) -> None:
    with scripted_paths({"/readyz": (200, body)}) as (url, _):
        assert "does not answer like" in doctor("--url", url).get("problem", "server")


def test_server_that_is_not_ready_is_a_problem() -> None:
    with scripted_paths({"/readyz": (503, {"status": "the store cannot be read"})}) as (url, _):
        assert "is not ready: the store cannot be read" in doctor("--url", url).get("problem", "server")


def test_read_only_server_is_a_warning(tmp_path: Path) -> None:
    with serving(tmp_path, "--development", "--quiet", "--read-only") as running:
        said = doctor("--url", running.url).get("warning", "server")
    assert "refuses new writes: " in said


def test_other_clock_is_a_warning() -> None:
    with scripted_paths({"/readyz": (200, READY)}, Date="Mon, 01 Jan 2024 00:00:00 GMT") as (url, _):
        said = doctor("--url", url).get("warning", "clock")
    assert " behind this machine" in said
    assert "NTP" in said


def test_other_protocol_version_is_a_problem() -> None:
    with scripted_paths({"/readyz": (200, READY), "/": (200, {"oncelog": 99})}) as (url, _):
        assert "uses protocol 99" in doctor("--url", url).get("problem", "versions")


def test_failing_token_check_is_a_warning() -> None:
    with scripted_paths({"/readyz": (200, READY), "/v1/events": (429, {})}) as (url, _):
        assert "HTTP status 429" in doctor("--url", url, "--token", "x").get("warning", "token")


@pytest.mark.parametrize(
    ("end_days", "is_trusted", "level", "message"),
    [
        (-1, True, "problem", "cannot be trusted: certificate has expired"),
        (60, False, "problem", "cannot be trusted: self-signed certificate"),
        (3.5, True, "warning", "expires in 3 d "),
        (60.5, True, "ok", "expires in 60 d "),
    ],
)
def test_certificate_of_the_server(
    end_days: float, is_trusted: bool, level: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = write_certificate(tmp_path, -2, end_days)
    if is_trusted:
        monkeypatch.setattr(ssl, "create_default_context", trust(chain))
    options = ("--development", "--quiet", f"--set=tls.certificate={chain}", f"--set=tls.private_key={key}")
    with serving(tmp_path, *options) as running:
        found = doctor("--url", running.url.replace("127.0.0.1", "localhost"))
        assert message in found.get(level, "server" if level == "problem" else "tls")
        config = write_settings(
            tmp_path, f"port = {running.port}", f'[tls]\ncertificate = "{chain}"\nprivate_key = "{key}"'
        )
        assert "is ready" in doctor("--config", config).get("ok", "server")


def trust(chain: Path) -> Callable[[], ssl.SSLContext]:
    create = ssl.create_default_context
    return lambda: create(cafile=str(chain))


def test_plain_http_at_a_tls_port_is_a_problem(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        said = doctor("--url", running.url.replace("http:", "https:")).get("problem", "server")
    assert "no TLS connection" in said


# --- the ports of the settings


def test_running_server_of_the_settings(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        config = write_settings(tmp_path, f"port = {running.port}")
        found = doctor("--config", config)
        assert found.status == 0
        assert "is ready" in found.get("ok", "server")
        assert doctor("--config", config, "--url", running.url).text.count("is ready") == 1


def test_server_of_another_log_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with serving(tmp_path), serving(tmp_path / "other") as other:
        found = doctor("--config", write_settings(tmp_path, f"port = {other.port}"))
    assert "serves another log" in found.get("problem", "server")


def test_free_ports_are_not_a_problem(tmp_path: Path) -> None:
    stopped = ServerProcess(str(tmp_path / "log.db"))  # reserves a port without listening
    try:
        found = doctor("--config", write_settings(tmp_path, f"port = {stopped.port}"))
    finally:
        stopped.end()
    assert f"its ports are free (port {stopped.port})" in found.get("ok", "server")


@pytest.mark.parametrize("is_silent", [True, False])
def test_port_of_another_program_is_a_problem(is_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_silent:
        monkeypatch.setattr(server, "TIMEOUT_S", 0.5)
    if is_silent:
        with listening() as port:
            found = doctor("--config", write_settings(tmp_path, f"port = {port}"))
    else:
        with scripted_paths({}) as (url, _):
            port = int(url.rpartition(":")[2])
            found = doctor("--config", write_settings(tmp_path, f"port = {port}"))
    said = found.get("problem", "server")
    assert f"port: {port} on 127.0.0.1 is in use by another program" in said
    assert "choose another port" in said


@pytest.mark.parametrize("name", ["grpc_port", "metrics_port"])
def test_second_port_of_another_program_is_a_problem(name: str, tmp_path: Path) -> None:
    with listening() as port:
        config = write_settings(tmp_path, "grpc = true", "grpc_port = 0", f"{name} = {port}")
        config.write_text(
            config.read_text().replace("grpc_port = 0\n", "" if name == "grpc_port" else "grpc_port = 0\n")
        )
        said = doctor("--config", config).get("problem", "server")
    assert f"{name}: {port} on 127.0.0.1 is in use by another program" in said


def test_host_of_another_machine_is_a_problem(tmp_path: Path) -> None:
    config = write_settings(tmp_path, 'host = "192.0.2.1"', "port = 7171", 'trusted_proxies = ["192.0.2.2"]')
    said = doctor("--config", config).get("problem", "server")
    assert "this machine cannot listen on 192.0.2.1:7171" in said
    assert "Correct host" in said


def test_readiness_without_an_epoch_is_not_oncelog() -> None:
    assert judge_readiness("http://x", 200, {"status": "ok"}).level == "problem"
    assert judge_readiness("http://x", 200, READY).level == "ok"
