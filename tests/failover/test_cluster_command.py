"""`python -m oncelog.testing.cluster`, as somebody uses it who tries a fail-over."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from typer.testing import CliRunner

from cli.served import ENVIRONMENT, WAIT_S
from gateways.gateway_stores import run
from oncelog.testing.cluster import Layout
from oncelog.testing.cluster.__main__ import app
from oncelog.testing.cluster.cluster import end_all

COMMAND = [sys.executable, "-m", "oncelog.testing.cluster"]
MADE_TABLE = "CREATE TABLE tried (n int)"


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="oncelog-command-"))
    try:
        yield made / "cluster"
    finally:
        shutil.rmtree(made, ignore_errors=True)


def told(*arguments: str) -> tuple[int, str]:
    """A command: exit status, and what it said."""
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return ended.exit_code, ended.output


def processes_of(directory: Path) -> list[str]:
    """All command lines in which it is named, and those of PostgreSQL's own processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, place = (path / "cmdline").read_bytes().decode(errors="replace"), str((path / "cwd").readlink())
        except OSError:
            continue
        if str(directory) in command or place.startswith(str(directory)):
            found.append(command)
    return found


async def can_be_written_to(address: str) -> None:
    connection = await asyncpg.connect(address, target_session_attrs="read-write")
    try:
        await connection.execute(MADE_TABLE)
        await connection.execute("DROP TABLE tried")
    finally:
        await connection.close()


@contextmanager
def starting(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """One that is being started; killed at the end, if it is there still, with all that it has started."""
    command = [*COMMAND, "start", "--port", "0", "--directory", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)  # noqa: S603
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        if directory.exists():
            end_all(Layout.load(directory))


def until_there_are_some(directory: Path) -> None:
    """Returns when a Patroni is there, which is started last."""
    deadline = time.monotonic() + WAIT_S
    while not any("patroni" in command for command in processes_of(directory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_starts_tells_how_to_use_it_and_leaves_nothing_behind(directory: Path) -> None:
    with starting(directory) as process:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        addresses = set(re.findall(r"--store (\S+)", said))
        assert addresses == {Layout.load(directory).address}
        run(can_be_written_to(addresses.pop()))
        status, shown = told("state", "--directory", str(directory))
        assert status == 0
        assert [shown.count(role) for role in (" primary ", " sync_standby ", " replica ")] == [1, 1, 1], shown
        status, again = told("start", "--directory", str(directory))
        assert status == 2
        assert "is in use" in again
        (primary,) = re.findall(r"(node\d) .* primary", shown)
        status, killed = told("kill", "--directory", str(directory))
        assert status == 0
        assert f"{primary} at port" in killed
        process.send_signal(signal.SIGTERM)
        assert "nothing is left" in process.stdout.read()
        assert process.wait(WAIT_S) == 0
    assert processes_of(directory) == []
    assert not directory.exists()


def test_it_can_be_interrupted_while_it_starts(directory: Path) -> None:
    with starting(directory) as process:
        until_there_are_some(directory)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert processes_of(directory) == []
    assert not directory.exists()


def test_what_a_killed_start_left_is_ended_by_stop(directory: Path) -> None:
    with starting(directory) as process:
        until_there_are_some(directory)
        process.kill()
        process.wait()
        assert processes_of(directory)
        assert told("stop", "--directory", str(directory)) == (0, "stopped\n")
    assert processes_of(directory) == []
    assert not directory.exists()


@pytest.mark.parametrize("command", ["state", "kill", "stop"])
def test_where_there_is_no_cluster_it_says_so(directory: Path, command: str) -> None:
    status, said = told(command, "--directory", str(directory))
    assert status == 2
    assert said.startswith(f"no cluster in {directory}")


def test_settings_that_patroni_would_change_are_refused(directory: Path) -> None:
    status, said = told("start", "--directory", str(directory), "--loop-wait", "15")
    assert status == 2
    assert "--loop-wait and twice --retry-timeout must fit in --ttl" in said


def test_a_directory_with_something_else_in_it_is_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "letter.txt").write_text("mine")
    status, said = told("start", "--directory", str(directory))
    assert status == 2
    assert "is in use" in said
    assert (directory / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["start", "state", "kill", "stop"])
def test_every_command_has_help_and_an_example(command: str) -> None:
    status, said = told(command, "--help")
    assert status == 0
    assert f"python -m oncelog.testing.cluster {command}" in " ".join(said.split())
    assert "--directory" in said
