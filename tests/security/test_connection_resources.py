"""Memory and file descriptors that a server process uses for connections."""

import os
import re
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from cli.server_process import DEVELOPMENT, ServerProcess, reserve_port
from cli.server_process import serving as server_process
from deadlines import WAIT_S, wait_until
from oncelog.server import listener
from scripts import read_line, start_script
from server.auth import auth_material
from server.test_server_app import make_certificate

WORKER = Path(__file__).with_name("flood_worker.py")
MIB = 2**20
ANY_CERTIFICATE = ssl.create_default_context()
ANY_CERTIFICATE.check_hostname, ANY_CERTIFICATE.verify_mode = False, ssl.CERT_NONE


def memory_bytes(server: ServerProcess, name: str) -> int:
    """Return the resident memory of the server: current (`VmRSS`) or peak (`VmHWM`)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def metric(server: ServerProcess, name: str) -> float:
    """Return a metric. The first attempt may be refused, because the flood comes from the same address."""

    def scrape() -> str:
        try:
            with urlopen(f"{server.url}/metrics", timeout=WAIT_S, context=ANY_CERTIFICATE) as response:  # noqa: S310 - of this test
                return str(response.read().decode())
        except (ConnectionError, URLError):
            return ""

    found = re.search(rf"^{re.escape(name)} (\S+)$", wait_until(scrape), re.MULTILINE)
    return 0 if found is None else float(found[1])


@contextmanager
def server_with_tokens(directory: Path, *settings: str) -> Iterator[ServerProcess]:
    """Run a server that requires tokens."""
    key = auth_material.key_file(directory, "HS256")
    tokens = ["metrics_public=true", "tokens.algorithms=HS256", f"tokens.key_files={key.kind.value}:{key.path}"]
    arguments = [part for one in (*tokens, *settings) for part in ("--set", one)]
    with server_process(directory, *arguments) as server:
        yield server


@pytest.mark.rule("CO-27")
@pytest.mark.parametrize(
    ("protocol", "shape", "size"),
    [
        ("plain", "frame", 20_000),
        ("plain", "frame", MIB),  # above the limit, so each is closed quickly
        ("plain", "head", 120_000),
        ("tls", "record", 20_000),
        ("tls", "head", 120_000),
        ("tls", "hello", 120_000),
        ("tls", "unread", 5000),
    ],
)
def test_unauthenticated_connections_use_little_memory(
    tmp_path: Path, is_soak: bool, protocol: str, shape: str, size: int
) -> None:
    """10,000 unfinished connections use at most 256 MiB. Without --soak, both numbers are proportionally lower."""
    count, unauthenticated_max = (10_000, 1000) if is_soak else (500, 200)
    settings = [f"limits.unauthenticated_connections_max={unauthenticated_max}", "limits.connect_timeout_ms=60000"]
    if protocol == "tls":
        tls = make_certificate(tmp_path, "server")
        settings += [f"tls.certificate={tls.certificate}", f"tls.private_key={tls.private_key}"]
    with server_with_tokens(tmp_path, *settings) as server:
        before = memory_bytes(server, "VmRSS")
        with start_script(WORKER, server.port, count, size, shape, protocol) as attack:
            sent = int(read_line(attack))
            if size < MIB and shape != "hello":
                assert sent >= unauthenticated_max
            assert metric(server, "oncelog_unauthenticated_connections") <= unauthenticated_max
            if size == MIB:
                wait_until(lambda: metric(server, "oncelog_unauthenticated_connections") == 1)
            cost = memory_bytes(server, "VmHWM") - before
            # The limit is 256 MiB per 1,000 open connections. With few connections, the growth of the heap at startup
            # matters too.
            assert cost <= 256 * MIB * unauthenticated_max // 1000 + (0 if is_soak else 16 * MIB)


@pytest.mark.rule("CO-27")
@pytest.mark.parametrize("protocol", ["plain", "tls"])
@pytest.mark.parametrize(("shape", "size"), [("metadata", 30_000), ("call", 60_000), ("health", 60_000)])
def test_unfinished_grpc_calls_use_little_memory(
    tmp_path: Path, is_soak: bool, protocol: str, shape: str, size: int
) -> None:
    """10,000 connections to the gRPC port use at most 256 MiB. Without --soak, both numbers are lower in proportion."""
    count, limit = (10_000, 1000) if is_soak else (1000, 100)
    settings = [] if is_soak else [f"limits.grpc_connections_max={limit}"]  # the default is 1,000
    if protocol == "tls":
        tls = make_certificate(tmp_path, "server")
        settings += [f"tls.certificate={tls.certificate}", f"tls.private_key={tls.private_key}"]
    with reserve_port() as port, server_with_tokens(tmp_path, f"grpc_port={port}", "grpc=true", *settings) as server:
        before = memory_bytes(server, "VmRSS")
        with start_script(WORKER, port, count, size, shape, protocol) as attack:
            assert int(read_line(attack)) >= limit
            cost = memory_bytes(server, "VmHWM") - before
            assert cost <= 256 * MIB * limit // 1000 + (0 if is_soak else 16 * MIB)


@pytest.mark.rule("CO-27")
def test_server_that_runs_out_of_file_descriptors_logs_counts_and_continues(tmp_path: Path) -> None:
    with server_process(tmp_path, *DEVELOPMENT) as server, ExitStack() as stack:
        with urlopen(f"{server.url}/healthz", timeout=WAIT_S):  # noqa: S310 - as above
            pass
        pid = server.process.pid
        used = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - of another process
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 10, used + 10))
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(40)]
        wait_until(lambda: any("cannot accept a connection" in line for line in server.log_lines))
        for one in sockets:
            one.close()
        assert metric(server, 'oncelog_connections_refused_total{reason="open_files"}') >= 1


@pytest.mark.rule("CO-27")
def test_low_open_file_limit_is_raised_and_reported_at_startup(tmp_path: Path) -> None:
    program = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000)); "
        "os.execv(sys.executable, [sys.executable, '-m', 'oncelog', 'serve', *sys.argv[1:]])"
    )
    arguments = [*DEVELOPMENT, "--port", "0", "--set", "grpc=false", "--store", str(tmp_path / "log.db")]
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - a server of this test
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening" in line:
                break
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        process.terminate()
        process.stderr.read()
    assert limits == (1000, 1000)
    (line,) = [one for one in lines if "RLIMIT_NOFILE" in one]
    assert "limit=1000" in line
    assert f"needed={10_000 + 100 + listener.RESERVED_FILES}" in line


@pytest.mark.rule("CO-27")
@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "fitting"),
    [
        (1024, 4096, 2200, (1000, 1000)),  # 1,000 HTTP connections, 1,000 gRPC connections and 200 other files
        (1024, resource.RLIM_INFINITY, 2200, (1000, 1000)),
        (1024, 1500, 1500, (1000, 300)),
        (1024, 1250, 1250, (945, 105)),
        (256, 600, 600, (360, 40)),
        (100, 150, 150, (1, 1)),
        (5000, 5000, None, (1000, 1000)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, (1000, 1000)),
    ],
)
def test_soft_limit_is_raised_only_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None, fitting: tuple[int, int]
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))
    assert listener.raise_open_files_limit(1000, 1000) == fitting
    assert raised == ([] if raised_to is None else [(raised_to, hard)])
