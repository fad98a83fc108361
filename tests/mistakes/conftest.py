"""Fixtures: two servers and a log that all mistakes share, and a directory for each."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import oncelog
from cli.server_process import reserve_port
from mistakes.log_mistakes import event
from mistakes.workplace import AUDIENCE, Workplace
from server.running_server import Serving, serving
from server.shared_servers import ServerPool, pool_fixture

secured_pool = pool_fixture(
    lambda directory: serving(directory, tokens=True, token_settings={"audiences": (AUDIENCE,)})
)
development_pool = pool_fixture(serving)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with one event."""
    path = tmp_path_factory.mktemp("template") / "app.db"
    with oncelog.open_blocking(path) as log:
        log.submit(event())
    return path


@pytest_asyncio.fixture(loop_scope="session")
async def workplace(
    session_loop: None,
    tmp_path: Path,
    template: Path,
    secured_pool: ServerPool[Serving],
    development_pool: ServerPool[Serving],
    store_kind: str,
) -> AsyncIterator[Workplace]:
    """An empty directory with two running servers."""
    secured, development = await secured_pool.get(store_kind), await development_pool.get(store_kind)
    with reserve_port() as closed_port:
        yield Workplace(tmp_path, template, secured, development, closed_port)
