"""Backup and restore of a log in use, following the steps of docs/guides/operators.md."""

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.server_process import ServerProcess, oncelog, serving
from oncelog.core.rules.leaps import LEAP_MIN
from oncelog.testing.postgres import FAST_SETTINGS, PostgresServer, postgres_server
from oncelog.testing.programs import prepare_server_programs
from server.running_server import item

BEFORE = 20
DURING_MAX = 900
"""Number of events written during the backup. All of them fit into one page of 1000."""


class Writer:
    """Writes to a server during a backup and records the acknowledged events."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.acknowledged: dict[int, int] = {}
        self._session = session
        self._changed = asyncio.Condition()

    async def submit(self, number: int) -> int:
        """Submit an event and return its committed id."""
        body = {"events": [item(number)]}
        async with self._session.post(f"{self.url}/v1/events", json=body) as response:
            assert response.status == 200, await response.text()
            (result,) = (await response.json())["results"]
        return int(result["committed_id"])

    async def write(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            committed_id = await self.submit(number)
            async with self._changed:
                self.acknowledged[number] = committed_id
                self._changed.notify_all()

    async def wait_for(self, count: int) -> None:
        """Wait until this number of events is acknowledged."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.acknowledged) >= count)

    async def get(self, **query: Any) -> tuple[int, Any]:
        async with self._session.get(f"{self.url}/v1/events", params={"partition": "a", **query}) as response:
            return response.status, await response.json()


async def back_up(url: str, command: list[str]) -> tuple[dict[int, int], str]:
    """Run a command during writes. Return the events that were acknowledged before it started, and the epoch at that
    time.
    """
    async with aiohttp.ClientSession() as session:
        writer = Writer(url, session)
        await writer.write(1, BEFORE)
        _, page = await writer.get()
        writing = asyncio.create_task(writer.write(BEFORE + 1, BEFORE + DURING_MAX))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        before = len(writer.acknowledged)
        # A write is in flight when the command runs.
        await writer.wait_for(before + 1)
        _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        writing.cancel()
        await asyncio.wait([writing])
        assert len(writer.acknowledged) > before >= BEFORE, "no events were written during the command"
        return {number: writer.acknowledged[number] for number in range(1, BEFORE + 1)}, page["epoch"]


async def check_restored(url: str, acknowledged: dict[int, int], epoch: str) -> None:
    """Assert that acknowledged events exist, cursors of the old epoch are refused, and new writes are accepted."""
    async with aiohttp.ClientSession() as session:
        writer = Writer(url, session)
        status, told = await writer.get(epoch=epoch, since=BEFORE)
        assert (status, told["error"]["code"]) == (409, "history_changed")
        _, page = await writer.get(limit=1000)
        assert page["epoch"] != epoch
        newest = page["events"][-1]["committed_id"]
        assert [event["committed_id"] for event in page["events"]] == list(range(1, newest + 1))
        assert {number: await writer.submit(number) for number in acknowledged} == acknowledged
        committed_id = await writer.submit(99_999)
        assert committed_id > newest + LEAP_MIN, "new numbers must be above all numbers acknowledged after the backup"
        status, page = await writer.get(since=BEFORE + DURING_MAX)
        assert (status, [event["committed_id"] for event in page["events"]]) == (200, [committed_id])


@pytest.mark.rule("CO-40", "CO-12")
async def test_file_is_backed_up_during_writes_and_restored(tmp_path: Path) -> None:
    backup, head = str(tmp_path / "backup.db"), tmp_path / "head.json"
    with serving(tmp_path) as served:
        command = ["oncelog", "backup", served.store, backup]
        acknowledged, epoch = await back_up(served.url, [sys.executable, "-m", *command])
        assert oncelog("verify", backup).returncode == 0
        head.write_text(oncelog("head", backup).stdout)
        # When the disk is lost, `restore` replaces the file and keeps the old file next to it.
        served.kill()
        restored = oncelog("restore", "--full", "--force", backup, served.store)
        assert restored.returncode == 0, restored.stderr
        told = oncelog("verify", served.store, "--head", str(head))
        assert (told.returncode, "epoch" in told.stdout + told.stderr) == (1, True), "only the epoch may differ"
        served.start()
        await check_restored(served.url, acknowledged, epoch)


# --- PostgreSQL -------------------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="oncelog-backup-"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


@pytest.fixture
def server(directory: Path) -> Iterator[PostgresServer]:
    with postgres_server(directory, FAST_SETTINGS, is_own=True) as found:
        yield found


@pytest.mark.rule("CO-40", "CO-12")
@pytest.mark.parametrize("how", ["pg_basebackup", "pg_dump"])
async def test_database_is_backed_up_during_writes_and_restored(
    directory: Path, server: PostgresServer, how: str
) -> None:
    copy, bin_ = directory / "backup", prepare_server_programs(directory)
    served = ServerProcess(server.address)
    try:
        served.start()
        command = {
            "pg_basebackup": [
                f"{bin_}/pg_basebackup",
                "-d",
                server.address,
                "-D",
                str(copy),
                "-X",
                "stream",
                "-c",
                "fast",
            ],
            "pg_dump": [f"{bin_}/pg_dump", server.address, "-Fc", "-f", str(copy)],
        }[how]
        acknowledged, epoch = await back_up(served.url, command)
        served.stop()
        if how == "pg_basebackup":
            server.kill()
            replace(directory / "data", copy)
            server.start()
        else:
            drop = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
            run_program(f"{bin_}/psql", server.address, "-q", "-c", drop)
            run_program(f"{bin_}/pg_restore", "-d", server.address, "--exit-on-error", str(copy))
        renewed = oncelog("epoch", server.address, "--renew")
        assert renewed.returncode == 0, renewed.stderr
        assert oncelog("verify", server.address).returncode == 0
        served.start()
        await check_restored(served.url, acknowledged, epoch)
    finally:
        served.end()


def run_program(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert finished.returncode == 0, finished.stderr


def replace(data: Path, copy: Path) -> None:
    """Replace the server's files with a base backup, and make the server's user the owner of the files."""
    shutil.rmtree(data)
    shutil.move(copy, data)
    data.chmod(0o700)
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        for path in (data, *data.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
