"""A PostgreSQL server for tests, installed from a wheel and run in a temporary directory.

    with postgres_server(directory) as server:
        store = PostgresStore(server.address)

To use an existing server instead, set the environment variable ONCELOG_TEST_POSTGRES to an address whose user may
create schemas. Each call of `create_schema` provides a separate set of tables, as a database would.
"""

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from oncelog.testing.programs import (
    chown_to_nobody,
    get_nobody_options,
    kill_process_tree,
    prepare_server_programs,
    reserve_port,
)

SERVER_VARIABLE: Final = "ONCELOG_TEST_POSTGRES"
FAST_SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "autovacuum": "off",
    "jit": "off",
}
"""Settings for tests without power loss: the operating system keeps the writes of a killed server in its cache.

Each test has few rows in many tables, so autovacuum and JIT compilation are not worth their cost.
"""
DURABLE_SETTINGS: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
"""PostgreSQL's defaults, for benchmarks."""
_SETTINGS: Final = {"listen_addresses": "127.0.0.1", "max_connections": "300"}
_SOCKET_PATH_MAX: Final = 80
"""Maximum path length of the socket directory. With the socket's name, the system allows about a hundred characters."""
_START_S: Final = 60


class PostgresServer(Struct):
    """A running server."""

    address: str
    process: Any = None
    """Process that runs the server, or None for an existing server."""
    start_process: Callable[[], Any] | None = None
    """Restarts the server in its directory."""
    socket_address: str = ""
    """Address over a local socket, or "" if its path would be too long."""

    def kill(self) -> None:
        """Kill all processes of the server at the same time, as a crash does."""
        kill_process_tree(self.process.pid)
        self.process.wait()

    def start(self) -> None:
        """Restart the server with the same data and port. Returns once it accepts sessions."""
        if self.start_process is None:
            raise RuntimeError("an existing server cannot be started")
        self.process = self.start_process()


@contextmanager
def postgres_server(
    directory: Path, settings: Mapping[str, str] = FAST_SETTINGS, *, is_own: bool = False
) -> Iterator[PostgresServer]:
    """Start a server in an empty directory, or yield the server from the environment variable. Stops a started server
    at the end.

    With `is_own`, a new server is started even if the environment variable is set, for tests that kill the server.
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named and not is_own:
        yield PostgresServer(named)
        return
    directory = directory.resolve()  # the server's programs run in a different directory
    programs = prepare_server_programs(directory)
    data = directory / "data"
    data.mkdir()
    chown_to_nobody(directory, data)
    common: dict[str, Any] = {"cwd": data, "stdin": subprocess.DEVNULL, **get_nobody_options()}
    subprocess.run(  # noqa: S603
        [programs / "initdb", "--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres", "-N", "-D", data],
        check=True,
        capture_output=True,
        **common,
    )
    reserved = reserve_port()
    port: int = reserved.getsockname()[1]
    sockets = str(data) if len(str(data)) <= _SOCKET_PATH_MAX else ""
    chosen = {**_SETTINGS, **settings, "port": str(port), "unix_socket_directories": sockets}
    command: list[str | Path] = [
        programs / "postgres",
        "-D",
        data,
        *(f"-c{name}={value}" for name, value in chosen.items()),
    ]

    def start_process() -> Any:
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **common)  # noqa: S603
        try:
            _wait_until_ready(programs, port, process, directory / "log")
        except BaseException:
            _stop(process)
            raise
        return process

    with reserved:
        local = f"postgresql://postgres@/postgres?host={sockets}&port={port}" if sockets else ""
        server = PostgresServer(
            f"postgresql://postgres@127.0.0.1:{port}/postgres", start_process(), start_process, local
        )
        try:
            yield server
        finally:
            _stop(server.process)


def _stop(process: Any) -> None:
    process.send_signal(signal.SIGINT)  # fast shutdown: the server closes all sessions
    try:
        process.wait(_START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def create_schema(address: str) -> str:
    """Create an empty schema in the server's database, and return its address."""
    import asyncpg  # noqa: PLC0415 - an extra

    name = f"t{secrets.token_hex(8)}"
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"CREATE SCHEMA {name}")
    finally:
        await connection.close()
    return f"{address}{'&' if '?' in address else '?'}search_path={name}"


async def drop_schema(address: str) -> None:
    """Remove a schema that `create_schema` created."""
    import asyncpg  # noqa: PLC0415 - an extra

    name = address.rpartition("search_path=")[2]
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    finally:
        await connection.close()


def _wait_until_ready(programs: Path, port: int, process: Any, log: Path) -> None:
    for _ in range(_START_S * 20):
        ready = subprocess.run(  # noqa: S603
            [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-t", "1"], check=False
        )
        if ready.returncode == 0:
            return
        if process.poll() is not None:
            break
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}")
