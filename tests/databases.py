"""A real PostgreSQL for all tests of a run, started when the first one needs it, and a schema of its own for each.

A test that is marked `BOTH_STORES`, or whose module is, runs once on SQLite and once on PostgreSQL: wherever it would
name the file of a log, it says `log_at(path)`.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import pytest

from oncelog.testing.postgres import Server, fresh_schema, postgres_server

T = TypeVar("T")

SQLITE: Final = "sqlite"
POSTGRES: Final = "postgres"
BOTH_STORES: Final = pytest.mark.stores(SQLITE, POSTGRES)


class _Running:
    def __init__(self) -> None:
        self.kind = SQLITE
        """What the test that is running has its logs in."""
        self._stack = ExitStack()
        self._server: Server | None = None
        self._schemas: dict[Path, str] = {}

    @property
    def server(self) -> Server:
        if self._server is None:
            directory = Path(tempfile.mkdtemp(prefix="oncelog-postgres-"))
            self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self._server = self._stack.enter_context(postgres_server(directory))
        return self._server

    def schema_of(self, path: Path) -> str:
        if path not in self._schemas:
            self._schemas[path] = run_in_thread(fresh_schema(self.server.address))
        return self._schemas[path]

    def stop(self) -> None:
        self._stack.close()
        self._server = None


_running = _Running()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores(*kinds): the test runs on each of these stores; see databases.py.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("stores")
    if marker is not None:
        metafunc.parametrize("store_kind", marker.args, indirect=True)


@pytest.fixture(autouse=True)
def store_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the test has its logs in, by its parameter."""
    _running.kind = getattr(request, "param", SQLITE)
    yield _running.kind
    _running.kind = SQLITE


def pytest_unconfigure(config: pytest.Config) -> None:
    _running.stop()


def address_of(path: Path) -> str:
    """The address of a database for whoever would have used the file at the path: the same one for the same path."""
    return _running.schema_of(path)


def is_postgres() -> bool:
    """Whether the test that is running has its logs in PostgreSQL."""
    return _running.kind == POSTGRES


def log_at(path: Path) -> str:
    """What names the log of the test that is running: the file at the path, or a database for whoever would use it."""
    return address_of(path) if is_postgres() else str(path)


def server_address() -> str:
    return _running.server.address


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread, because this one may already run an event loop."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def query(address: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, executed in a new session."""

    async def fetched() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(address)
        try:
            return [tuple(row) for row in await connection.fetch(statement, *parameters)]
        finally:
            await connection.close()

    return run_in_thread(fetched())


@pytest.fixture(params=["memory", SQLITE, POSTGRES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What names a log that is not there yet: one in memory, in a file, in a database."""
    if request.param == POSTGRES:
        return address_of(tmp_path)
    return str(tmp_path / "log.db") if request.param == SQLITE else ":memory:"


@pytest.fixture
def database(tmp_path: Path) -> str:
    """The address of an empty database."""
    return address_of(tmp_path)
