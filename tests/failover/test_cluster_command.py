"""The commands of `python -m oncelog.testing.cluster`: start, state, kill and stop."""

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import msgspec
import pytest
from typer.testing import CliRunner

from cli.server_process import ENVIRONMENT
from deadlines import WAIT_S, until, wait_until
from oncelog.testing.cluster import Cluster, Layout, PortError
from oncelog.testing.cluster.__main__ import app
from oncelog.testing.cluster.processes import has_supervisor, stop_all
from oncelog.testing.programs import get_start_ticks, reserve_port, send_signal

COMMAND = [sys.executable, "-m", "oncelog.testing.cluster"]
ROOT = Path(__file__).parents[2]
MADE_TABLE = "CREATE TABLE tried (n int)"


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="oncelog-command-"))
    try:
        yield made / "cluster"
    finally:
        shutil.rmtree(made, ignore_errors=True)


def run_command(*arguments: str) -> tuple[int, str]:
    """Run a command and return its exit status and output."""
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return ended.exit_code, ended.output


async def try_command(command: str, directory: Path) -> str:
    """Run a command and return its output, or an empty string if it failed, for example because Patroni was slow."""
    status, said = await asyncio.to_thread(run_command, command, "--directory", str(directory))
    return "" if status else said


def find_pids(directory: Path) -> dict[int, str]:
    """Return the processes that have the directory in their command line or as working directory."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, place = (path / "cmdline").read_bytes().decode(errors="replace"), str((path / "cwd").readlink())
        except OSError:
            continue
        if str(directory) in command or place.startswith(str(directory)):
            found[int(path.name)] = command
    return found


def find_processes(directory: Path) -> list[str]:
    return list(find_pids(directory).values())


async def can_be_written_to(address: str) -> None:
    connection = await asyncpg.connect(address, target_session_attrs="read-write")
    try:
        await connection.execute(MADE_TABLE)
        await connection.execute("DROP TABLE tried")
    finally:
        await connection.close()


@contextmanager
def start_cluster(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a cluster. Afterwards, kill the command and all processes that it has started."""
    command = [*COMMAND, "start", "--port", "0", "--directory", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)  # noqa: S603
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        if directory.exists():
            stop_all(Layout.load(directory))


@contextmanager
def bystander(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run an unrelated process that uses a file in the directory, and assert that it survives."""
    tail = shutil.which("tail")
    process = subprocess.Popen(arguments, executable=tail, stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        # Popen can return before the kernel shows the arguments of the program.
        wait_until(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        yield process
        assert process.poll() is None, arguments
    finally:
        process.kill()
        process.wait()


def wait_for_patronis(directory: Path, count: int = 1) -> list[int]:
    """Wait until this number of Patroni processes is running, and return their ids. Patroni is started last."""

    def patronis() -> list[int]:
        found = [
            pid for pid, said in find_pids(directory).items() if "\0-m\0patroni\0" in said and "setpriv" not in said
        ]
        return found if len(found) >= count else []

    return list(wait_until(patronis, lambda: find_pids(directory)))


async def test_start_prints_usage_and_leaves_nothing_behind(directory: Path) -> None:
    with start_cluster(directory) as process:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = await asyncio.to_thread(process.stdout.readline)
            assert line, said
            said += line
        addresses = set(re.findall(r"--store (\S+)", said))
        assert addresses == {Layout.load(directory).address}
        await can_be_written_to(addresses.pop())
        shown = await until(lambda: try_command("state", directory))
        assert [shown.count(role) for role in (" primary ", " sync_standby ", " replica ")] == [1, 1, 1], shown
        status, again = await asyncio.to_thread(run_command, "start", "--directory", str(directory))
        assert status == 2
        assert "is in use" in again
        (primary,) = re.findall(r"(node\d) .* primary", shown)
        killed = await until(lambda: try_command("kill", directory))
        assert f"{primary} at port" in killed
        process.send_signal(signal.SIGTERM)
        assert "removed the directory" in process.stdout.read()
        assert process.wait(WAIT_S) == 0
    assert find_processes(directory) == []
    assert not directory.exists()


def test_start_can_be_interrupted(directory: Path) -> None:
    with start_cluster(directory) as process:
        wait_for_patronis(directory)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert find_processes(directory) == []
    assert not directory.exists()


def test_stop_kills_only_the_processes_of_a_killed_start(directory: Path) -> None:
    other = directory.with_name(f"{directory.name}0")
    other.mkdir()
    (other / "etcd0.log").touch()
    with start_cluster(directory) as process:
        wait_for_patronis(directory, 3)
        process.kill()
        process.wait()
        assert len(find_processes(directory)) >= 6
        stop = f"{shlex.join([*COMMAND, 'stop', '--directory', str(directory)])}; echo status $?"
        with (
            bystander("tail", "-f", f"{directory}/etcd0.log") as reader,
            bystander("etcd", "-f", f"{directory}/cluster.json") as namesake,
            bystander("etcd", "-f", f"{other}/etcd0.log") as neighbour,
        ):
            said = subprocess.run(["sh", "-c", stop], check=True, capture_output=True, text=True, env=ENVIRONMENT)  # noqa: S603, S607
            assert said.stdout == "stopped\nstatus 0\n"
            assert find_pids(directory).keys() == {reader.pid, namesake.pid, neighbour.pid}
    assert find_processes(directory) == []
    assert not directory.exists()


def test_reused_process_id_does_not_count_as_the_starter(directory: Path) -> None:
    directory.mkdir()
    with bystander("tail", "-f", "/dev/null", "src/oncelog/testing/cluster/cluster.py") as process:
        born = get_start_ticks(process.pid)
        assert born is not None
        layout = Layout(directory=str(directory), pid=process.pid, born_at=born, nodes=(), etcd_ports=())
        assert has_supervisor(layout)
        later = msgspec.structs.replace(layout, born_at=born - 1)
        assert not has_supervisor(later)
        later.save()
        assert run_command("stop", "--directory", str(directory)) == (0, "stopped\n")


def test_start_reports_the_reason_and_exits_when_patroni_dies(directory: Path) -> None:
    with start_cluster(directory) as process:
        for pid in wait_for_patronis(directory, 3):
            send_signal(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
    assert re.search(r"^ended while the cluster was starting: .*node\d", said, re.MULTILINE), said
    assert re.search(r"^node\d\.log ends with:$", said, re.MULTILINE), said
    assert "Traceback" not in said
    assert said.endswith("Stopped, and removed the directory.\n")
    assert find_processes(directory) == []
    assert not directory.exists()


def test_error_contains_the_port_in_use(directory: Path) -> None:
    with reserve_port() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        status, said = run_command("start", "--directory", str(directory), "--port", str(port))
    assert status == 2
    assert said.startswith(f"port {port} is unavailable: Address already in use; choose another --port"), said
    assert not directory.exists()


@pytest.mark.parametrize("port", [-1, 65_534, 65_535, 70_000])
def test_port_too_close_to_the_maximum_is_refused(directory: Path, port: int) -> None:
    status, said = run_command("start", "--directory", str(directory), "--port", str(port))
    assert status == 2
    limit = "greater than or equal to 0" if port < 0 else "less than or equal to 65533"
    assert f"'--port': Input should be {limit}" in said, said
    with pytest.raises(PortError, match=f"port {port} is unavailable: the first port must be at most 65533"):
        Cluster(directory, first_port=port)
    assert not directory.exists()


@pytest.mark.parametrize(("given", "option"), [((), ""), (("CLUSTER_PORT=7500",), "--port '7500'")])
def test_make_passes_the_port(given: tuple[str, ...], option: str) -> None:
    # a dry run, which does not check the environment
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.dev", "cluster", *given]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)  # noqa: S603
    assert said.stdout.strip() == f"exec .venv/bin/python -m oncelog.testing.cluster start {option}".strip()


@pytest.mark.parametrize("command", ["state", "kill", "stop"])
def test_command_without_a_cluster_reports_that_none_is_running(directory: Path, command: str) -> None:
    status, said = run_command(command, "--directory", str(directory))
    assert status == 2
    assert said.startswith(f"no cluster in {directory}")


def test_settings_that_patroni_would_change_are_refused(directory: Path) -> None:
    status, said = run_command("start", "--directory", str(directory), "--loop-wait", "15")
    assert status == 2
    assert "--loop-wait and twice --retry-timeout must fit in --ttl" in said


def test_directory_with_other_files_is_not_changed(directory: Path) -> None:
    directory.mkdir()
    (directory / "letter.txt").write_text("mine")
    status, said = run_command("start", "--directory", str(directory))
    assert status == 2
    assert "is in use" in said
    assert (directory / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["start", "state", "kill", "stop"])
def test_every_command_has_help_and_an_example(command: str) -> None:
    status, said = run_command(command, "--help")
    assert status == 0
    assert f"python -m oncelog.testing.cluster {command}" in " ".join(said.split())
    assert "--directory" in said
