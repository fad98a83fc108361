"""`python -m oncelog.testing.cluster`: a cluster for trying out and watching a failover."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from oncelog.testing.cluster.cluster import Cluster, ClusterError
from oncelog.testing.cluster.layout import FILE, FIRST_PORT_MAX, ClusterSettings, Layout, PortError
from oncelog.testing.cluster.processes import has_supervisor, kill_server, stop_all
from oncelog.testing.cluster.state import ClusterState, fetch_state
from oncelog.testing.programs import wait_for_exit

REVIVE_S: Final = 5.0
"""Pause before `start` restarts a Patroni or etcd process that has exited, as an operator would."""
FIRST_PORT: Final = 7181

app = typer.Typer(
    help="PostgreSQL with one primary and two standbys on this machine, with automatic failover by Patroni and etcd.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog="Example: python -m oncelog.testing.cluster start; then, in another terminal, state, kill, state, stop.",
)

Directory = Annotated[
    Path,
    typer.Option("--directory", help="Directory of the cluster, which is removed when the cluster stops."),
]
DEFAULT_DIRECTORY: Final = Path(tempfile.gettempdir()) / f"oncelog-cluster-{os.getuid()}"


@app.command()
def start(
    directory: Directory = DEFAULT_DIRECTORY,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=FIRST_PORT_MAX, help="Port of the first server; the others use the next two. 0: any free ports."
        ),
    ] = FIRST_PORT,
    ttl: Annotated[int, typer.Option(min=20, help="Seconds after which a silent primary is replaced.")] = 20,
    loop_wait: Annotated[int, typer.Option(min=1, help="Seconds between Patroni's checks of the cluster.")] = 1,
    retry_timeout: Annotated[int, typer.Option(min=3, help="Seconds that Patroni tries to reach etcd.")] = 3,
) -> None:
    """Start a cluster, show how to use it, and supervise it until Ctrl-C, SIGTERM or `stop`.

    Example: python -m oncelog.testing.cluster start --port 7500
    """
    if loop_wait + 2 * retry_timeout > ttl:
        _fail("--loop-wait and twice --retry-timeout must fit in --ttl")
    if not is_free(directory):
        _fail(f"{directory} is in use, by a cluster or another program; run `stop`, or choose another --directory")
    is_ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: is_ended.set())
    settings = ClusterSettings(ttl_s=ttl, loop_wait_s=loop_wait, retry_timeout_s=retry_timeout)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o711)
    try:
        cluster = Cluster(directory, settings, first_port=port)
    except (PortError, OSError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        hint = "; choose another --port (0: any), or CLUSTER_PORT of `make cluster`"
        _fail(f"{error}{hint if isinstance(error, PortError) else ''}")
    try:
        typer.echo("Starting three etcd, three Patroni and three PostgreSQL servers, which takes about 20 seconds …")
        cluster.start(is_ended.is_set)
        if not is_ended.is_set():
            typer.echo(_format_instructions(cluster, directory))
        while not is_ended.wait(REVIVE_S):
            for name in cluster.revive():
                typer.echo(f"{name} had stopped; restarting it")
    except ClusterError as error:
        _fail(str(error))
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
        typer.echo("Stopped, and removed the directory.")


@app.command()
def state(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Show the primary and the standbys, and which standby is synchronous.

    Exits with status 1 if the cluster is not healthy.

    Example: watch -n1 python -m oncelog.testing.cluster state
    """
    found = fetch_state(_load_layout(directory))
    typer.echo(_format_state(found))
    raise typer.Exit(0 if found.is_whole else 1)


@app.command()
def kill(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Kill all processes of the primary at once. A standby takes over; the killed server returns as a standby.

    Example: python -m oncelog.testing.cluster kill && watch -n1 python -m oncelog.testing.cluster state
    """
    layout = _load_layout(directory)
    primary = fetch_state(layout).primary
    if primary is None:
        _fail("the cluster has no primary at the moment")
    node = next(node for node in layout.nodes if node.name == primary.name)
    try:
        kill_server(node)
    except ProcessLookupError as error:
        _fail(str(error))
    typer.echo(f"{node.name} at port {node.port} was killed")


@app.command()
def stop(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Stop a cluster from another terminal, and remove its directory. Also works if `start` was killed.

    Example: python -m oncelog.testing.cluster stop
    """
    layout = _load_layout(directory)
    if has_supervisor(layout):
        os.kill(layout.pid, signal.SIGTERM)
        wait_for_exit(layout.pid)
    else:
        stop_all(layout)
        shutil.rmtree(directory, ignore_errors=True)
    typer.echo("stopped")


def is_free(directory: Path) -> bool:
    """Return whether a cluster can be created there: the directory is missing, empty, or left without a supervisor."""
    if not directory.exists():
        return True
    if directory.stat().st_uid != os.getuid():
        return False
    try:
        layout = Layout.load(directory)
    except FileNotFoundError:
        return not any(directory.iterdir())
    if has_supervisor(layout):
        return False
    stop_all(layout)
    return True


def _format_instructions(cluster: Cluster, directory: Path) -> str:
    command = f"{_get_python()} -m oncelog.testing.cluster"
    options = "" if directory == DEFAULT_DIRECTORY else f" --directory {directory}"
    return f"""
{_format_state(cluster.state())}

Servers, each in a separate terminal:
  .venv/bin/oncelog serve --development --port 7171 --store {cluster.address}
  .venv/bin/oncelog serve --development --port 7172 --store {cluster.address}
Put load on one server, and read from the other:
  .venv/bin/oncelog load --seconds 60 --url http://127.0.0.1:7171
  .venv/bin/oncelog tail --partition load/0 --url http://127.0.0.1:7172
Show the state of the cluster, and kill the primary:
  {command} state{options}
  {command} kill{options}
Logs are in {directory}. Ctrl-C stops the cluster.
"""


def _get_python() -> str:
    try:
        return str(Path(sys.executable).relative_to(Path.cwd()))
    except ValueError:
        return sys.executable


def _format_state(cluster_state: ClusterState) -> str:
    lines = [f"{'server':8} {'port':>6}  {'role':13} {'state':10} {'timeline':>8} {'lag':>8}"]
    for member in cluster_state.members:
        lag = "" if member.lag_bytes is None else str(member.lag_bytes)
        role = {"leader": "primary"}.get(member.role, member.role)
        lines.append(
            f"{member.name:8} {member.port:>6}  {role:13} {member.state:10} "
            f"{member.timeline or '':>8} {lag:>8}".rstrip()
        )
    leader = "nobody" if cluster_state.etcd_leader is None else f"etcd{cluster_state.etcd_leader}"
    return "\n".join([*lines, f"etcd is led by {leader}"])


def _load_layout(directory: Path) -> Layout:
    try:
        return Layout.load(directory)
    except FileNotFoundError:
        _fail(f"no cluster in {directory} (no {FILE}); start one, or pass its --directory")


def _fail(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app(prog_name="python -m oncelog.testing.cluster")
