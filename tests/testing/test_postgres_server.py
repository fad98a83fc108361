"""The PostgreSQL server that tests start."""

from pathlib import Path

import asyncpg
import pytest

from oncelog.testing.postgres import postgres_server


async def test_server_starts_in_a_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server").mkdir()
    with postgres_server(Path("server"), is_own=True) as server:
        monkeypatch.chdir("/")
        server.kill()
        server.start()
        connection = await asyncpg.connect(server.address)
        assert await connection.fetchval("SHOW data_directory") == str(tmp_path / "server/data")
        await connection.close()
