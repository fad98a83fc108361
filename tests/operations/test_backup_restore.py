"""The steps of docs/operators.md to back up a log that is in use and to restore it, as an operator runs them."""

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

from cli.served import Served, oncelog, serving
from doors.serving import item, run
from oncelog.testing.postgres import QUICK, Server, postgres_server
from oncelog.testing.programs import server_programs

BEFORE = 20
DEVELOPMENT = ("--development", "--quiet")


class Writer:
    """Writes to a server while it is backed up, and knows what was acknowledged."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.acknowledged: dict[int, int] = {}
        self._session = session

    async def submit(self, number: int) -> int:
        """The number that an event has got."""
        body = {"events": [item(number)]}
        async with self._session.post(f"{self.url}/v1/events", json=body) as response:
            assert response.status == 200, await response.text()
            (result,) = (await response.json())["results"]
        return int(result["committed_id"])

    async def write(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.acknowledged[number] = await self.submit(number)

    async def get(self, **query: Any) -> tuple[int, Any]:
        async with self._session.get(f"{self.url}/v1/events", params={"partition": "a", **query}) as response:
            return response.status, await response.json()


async def backed_up(url: str, command: list[str]) -> tuple[dict[int, int], str]:
    """Runs a command while somebody writes: what was acknowledged before it began, and the epoch by then."""
    async with aiohttp.ClientSession() as session:
        writer = Writer(url, session)
        await writer.write(1, BEFORE)
        _, page = await writer.get()
        writing = asyncio.create_task(writer.write(BEFORE + 1, 10_000))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        writing.cancel()
        await asyncio.wait([writing])
        assert len(writer.acknowledged) > BEFORE, "somebody wrote meanwhile"
        return {number: writer.acknowledged[number] for number in range(1, BEFORE + 1)}, page["epoch"]


async def demand_restored(url: str, acknowledged: dict[int, int], epoch: str) -> None:
    """What was acknowledged before the backup is there, readers of before are told, and new writes are taken."""
    async with aiohttp.ClientSession() as session:
        writer = Writer(url, session)
        status, told = await writer.get(epoch=epoch, since=BEFORE)
        assert (status, told["error"]["code"]) == (409, "history_changed")
        _, page = await writer.get(limit=1000)
        assert page["epoch"] != epoch
        newest = page["events"][-1]["committed_id"]
        assert [event["committed_id"] for event in page["events"]] == list(range(1, newest + 1))
        assert {number: await writer.submit(number) for number in acknowledged} == acknowledged
        assert await writer.submit(99_999) == newest + 1


@pytest.mark.rule("CO-40", "CO-12")
def test_a_file_is_backed_up_while_a_server_writes_to_it_and_restored(tmp_path: Path) -> None:
    backup, head = str(tmp_path / "backup.db"), tmp_path / "head.json"
    with serving(tmp_path) as served:
        command = ["oncelog", "backup", served.store, backup]
        acknowledged, epoch = run(backed_up(served.url, [sys.executable, "-m", *command]))
        assert oncelog("verify", backup).returncode == 0
        head.write_text(oncelog("head", backup).stdout)
        # The disk is lost: the file is replaced, and what was there is kept beside it.
        served.kill()
        restored = oncelog("restore", "--full", "--force", backup, served.store)
        assert restored.returncode == 0, restored.stderr
        told = oncelog("verify", served.store, "--head", str(head))
        assert (told.returncode, "epoch" in told.stdout + told.stderr) == (1, True), "all else is as it was"
        served.start()
        run(demand_restored(served.url, acknowledged, epoch))


# --- PostgreSQL -------------------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="oncelog-backup-"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    with postgres_server(directory, QUICK, is_own=True) as found:
        yield found


@pytest.mark.rule("CO-40", "CO-12")
@pytest.mark.parametrize("how", ["pg_basebackup", "pg_dump"])
def test_a_database_is_backed_up_while_a_gateway_writes_to_it_and_restored(
    tmp_path: Path, directory: Path, server: Server, how: str
) -> None:
    copy, bin_ = directory / "backup", server_programs(directory)
    served = Served(tmp_path, ["--store", server.address, *DEVELOPMENT])
    try:
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
        acknowledged, epoch = run(backed_up(served.url, command))
        served.stop()
        if how == "pg_basebackup":
            server.kill()
            replace(directory / "data", copy)
            server.start()
        else:
            drop = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
            done(f"{bin_}/psql", server.address, "-q", "-c", drop)
            done(f"{bin_}/pg_restore", "-d", server.address, "--exit-on-error", str(copy))
        renewed = oncelog("epoch", server.address, "--renew")
        assert renewed.returncode == 0, renewed.stderr
        assert oncelog("verify", server.address).returncode == 0
        served.start()
        run(demand_restored(served.url, acknowledged, epoch))
    finally:
        served.end()


def done(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert finished.returncode == 0, finished.stderr


def replace(data: Path, copy: Path) -> None:
    """Puts a base backup where the server's files were, as the user that it runs as."""
    shutil.rmtree(data)
    shutil.move(copy, data)
    data.chmod(0o700)
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        for path in (data, *data.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
