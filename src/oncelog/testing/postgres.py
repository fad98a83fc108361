"""A real PostgreSQL for tests: from a wheel, in a directory of its own, gone afterwards.

    with postgres_server(directory) as server:
        store = PostgresStore(server.address)

The environment variable ONCELOG_TEST_POSTGRES names another server in its place, by an address whose user may create
schemas. Each `create_schema` is a database's worth of tables, apart from all others.
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
"""For tests that do not cut the power: the writes of a killed server survive in the cache of the operating system.

Each test has few rows in many tables, so neither autovacuum nor compiled queries pay.
"""
DURABLE_SETTINGS: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
"""As PostgreSQL has them by default, for measuring."""
_SETTINGS: Final = {"listen_addresses": "127.0.0.1", "max_connections": "300"}
_SOCKET_PATH_MAX: Final = 80
"""Of a directory for sockets: with their names, the system takes a hundred characters."""
_START_S: Final = 60


class PostgresServer(Struct):
    """One that listens."""

    address: str
    process: Any = None
    """What started it; None for one that was there."""
    start_process: Callable[[], Any] | None = None
    """Starts it where it was."""
    socket_address: str = ""
    """The address over a local socket; empty where its path would be too long for one."""

    def kill(self) -> None:
        """As a crash does: all of its processes at once, in the middle of whatever they do."""
        kill_process_tree(self.process.pid)
        self.process.wait()

    def start(self) -> None:
        """Once more, on the same data and at the same port. Returns when it takes sessions."""
        if self.start_process is None:
            raise RuntimeError("a server that was there already is not ours to start")
        self.process = self.start_process()


@contextmanager
def postgres_server(
    directory: Path, settings: Mapping[str, str] = FAST_SETTINGS, *, is_own: bool = False
) -> Iterator[PostgresServer]:
    """Starts a server in an empty directory, or gives the one that the environment names. Stops it at the end.

    With `is_own` it is never the one that the environment names: for tests that kill it.
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named and not is_own:
        yield PostgresServer(named)
        return
    directory = directory.resolve()  # the server's programs run in another directory
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
    process.send_signal(signal.SIGINT)  # fast shutdown: sessions are ended
    try:
        process.wait(_START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def create_schema(address: str) -> str:
    """The address of an empty schema in the server's database."""
    import asyncpg  # noqa: PLC0415 - an extra

    name = f"t{secrets.token_hex(8)}"
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"CREATE SCHEMA {name}")
    finally:
        await connection.close()
    return f"{address}{'&' if '?' in address else '?'}search_path={name}"


async def drop_schema(address: str) -> None:
    """Removes what `create_schema` made."""
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
