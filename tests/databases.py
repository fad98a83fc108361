"""A PostgreSQL server that all tests of a process share, with a separate schema for each log.

A test marked `BOTH_STORES`, directly or through its module, runs once on SQLite and once on PostgreSQL. It gets its
logs from `log_at(path)`, which returns the path of a file or the address of a schema.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import pytest

from oncelog.testing.postgres import PostgresServer, create_schema, postgres_server

T = TypeVar("T")

SQLITE: Final = "sqlite"
POSTGRES: Final = "postgres"
BOTH_STORES: Final = pytest.mark.stores(SQLITE, POSTGRES)


class DatabasePool:
    """The server of this process, started by the first test that needs it, with one schema per path."""

    def __init__(self) -> None:
        self.store_kind = SQLITE
        """The store of the running test."""
        self.is_allowed = True
        """Whether tests may start the server."""
        self._stack = ExitStack()
        self._owner = 0
        self._server: PostgresServer | None = None
        self._schemas: dict[Path, str] = {}

    @property
    def server(self) -> PostgresServer:
        if self._server is None:
            if not self.is_allowed:
                raise RuntimeError(
                    "--check runs without PostgreSQL, and does not recognise that this test needs it: request the "
                    "fixture `database`, or mark the test @pytest.mark.stores(POSTGRES)"
                )
            self._owner = os.getpid()
            directory = Path(tempfile.mkdtemp(prefix="oncelog-postgres-"))
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self._server = self._stack.enter_context(postgres_server(directory))
        return self._server

    def schema_of(self, path: Path) -> str:
        if path not in self._schemas:
            self._schemas[path] = run_in_thread(create_schema(self.server.address))
        return self._schemas[path]

    def stop(self) -> None:
        """Stop the server if this process started it. A forked process uses its parent's server."""
        if self._owner == os.getpid():
            self._stack.close()
            self._server = None


_databases = DatabasePool()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores(*kinds): the test runs on each of these stores; see databases.py.")
    _databases.is_allowed = not config.getoption("--check")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("stores")
    if marker is not None:
        metafunc.parametrize("store_kind", marker.args, indirect=True)


@pytest.fixture(autouse=True)
def store_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Store of the test, from the marker `stores` (default: SQLite)."""
    _databases.store_kind = getattr(request, "param", SQLITE)
    yield _databases.store_kind
    _databases.store_kind = SQLITE


def pytest_unconfigure(config: pytest.Config) -> None:
    stop_server()


def needs_postgres(item: pytest.Item) -> bool:
    """Whether a test requests a database fixture, or mentions PostgreSQL in its name or a parameter."""
    return "database" in getattr(item, "fixturenames", ()) or POSTGRES in item.nodeid.lower()


def address_of(path: Path) -> str:
    """Return the address of the schema for a path. A new path gets an empty schema."""
    return _databases.schema_of(path)


def is_postgres() -> bool:
    """Whether the running test has its logs in PostgreSQL."""
    return _databases.store_kind == POSTGRES


def log_at(path: Path) -> str:
    """Return the path of a file or the address of a schema, depending on the store of the running test."""
    return address_of(path) if is_postgres() else str(path)


def server_address() -> str:
    """Return the address of the shared server."""
    return _databases.server.address


def stop_server() -> None:
    """Stop the shared server if this process started it."""
    _databases.stop()


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new thread, because the current thread may already run an event loop."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def query(address: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Execute a statement in a new session and return its rows."""

    async def fetch() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(address)
        try:
            return [tuple(row) for row in await connection.fetch(statement, *parameters)]
        finally:
            await connection.close()

    return run_in_thread(fetch())


@pytest.fixture(params=["memory", SQLITE, POSTGRES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path or address of a log that does not exist yet: in memory, in a file, or in a schema."""
    if request.param == POSTGRES:
        return address_of(tmp_path)
    return str(tmp_path / "log.db") if request.param == SQLITE else ":memory:"


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Address of an empty schema."""
    return address_of(tmp_path)
