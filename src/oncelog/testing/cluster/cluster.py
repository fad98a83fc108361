"""Starts a cluster, simulates machine and network failures, and stops all its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from oncelog.testing.cluster.layout import (
    FIRST_PORT_MAX,
    MEMBERS,
    ClusterSettings,
    Layout,
    Node,
    PortError,
    Ports,
    build_etcd_arguments,
    build_patroni_arguments,
    build_patroni_configuration,
)
from oncelog.testing.cluster.processes import find_server_pid, kill_server, stop_all
from oncelog.testing.cluster.state import ClusterState, fetch_state, is_etcd_ready
from oncelog.testing.cluster.tcp_links import TcpLinks
from oncelog.testing.programs import (
    chown_to_nobody,
    find_etcd,
    find_postgres,
    get_start_ticks,
    list_children,
    send_signal,
    wrap_as_nobody,
)

START_S: Final = 240
"""Time limit for starting, long enough for a busy machine."""
_POLL_S: Final = 0.1
_LOG_TAIL_BYTES: Final = 4000

T = TypeVar("T")


class ClusterError(RuntimeError):
    """The cluster did not reach the expected state.

    The message contains the state of the cluster and the last output of its processes.
    """


class Cluster:
    """Three PostgreSQL servers with Patroni, and three etcd members."""

    def __init__(
        self,
        directory: Path,
        settings: ClusterSettings | None = None,
        *,
        first_port: int = 0,
        is_wired: bool = False,
    ) -> None:
        """Prepare a cluster in an empty directory. With `is_wired`, its nodes can be cut off from each other (`cut`).

        Servers listen on `first_port` and the following ports, or on free ones. Raises PortError if a port is
        unavailable.
        """
        self._directory = directory.resolve()
        self.settings = settings or ClusterSettings()
        self._ports = Ports()
        self._links = TcpLinks() if is_wired else None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self.layout = self._build_layout(first_port)
            self._commands = self._prepare_commands()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Return the address for clients. It lists all servers, and the client picks the writable one."""
        return self.layout.address

    # --- start and end

    def start(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Start the cluster. Returns once there is a primary that both standbys follow, or `is_ended` returns True.

        Raises ClusterError on failure, or immediately if a process has exited.
        """
        nodes = [node.name for node in self.layout.nodes]
        for name in self._commands.keys() - set(nodes):
            self._start_process(name)
        self._wait_for(lambda: True if is_ended() or (self._check_alive() and is_etcd_ready(self.layout)) else None)
        if not is_ended():
            for name in nodes:
                self._start_process(name)
        self._wait_for(lambda: True if is_ended() or (self._check_alive() and self.state().is_whole) else None)

    def close(self) -> None:
        """Stop all processes and wait for them to exit. Does nothing if the cluster is already closed."""
        with suppress(AttributeError):  # `start` failed early
            stop_all(self.layout)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        if self._links is not None:
            self._links.close()
            self._links = None
        self._ports.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def revive(self) -> list[str]:
        """Restart the etcd and Patroni processes that have exited, and return their names."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        for name in ended:
            self._start_process(name)
        return ended

    # --- state

    def state(self) -> ClusterState:
        """Return the state that Patroni and etcd report."""
        return fetch_state(self.layout)

    def primary(self) -> Node:
        """Wait for a primary and return it."""
        found = self._wait_for(lambda: self.state().primary)
        return next(node for node in self.layout.nodes if node.name == found.name)

    def wait_until_whole(self) -> ClusterState:
        """Wait until there is a primary, both standbys follow it, and one of them is synchronous."""

        def find_whole() -> ClusterState | None:
            found = self.state()
            return found if found.is_whole else None

        return self._wait_for(find_whole)

    # --- failures of machines and networks

    def kill(self, node: Node, *, with_patroni: bool = False) -> None:
        """Kill all processes of a PostgreSQL server at the same time. With its Patroni, this simulates a power loss."""
        if with_patroni:
            process = self._processes[node.name]
            process.kill()
            process.wait()
        kill_server(node)

    def freeze(self, node: Node, *, server: bool = True, patroni: bool = True) -> None:
        """Suspend processes without closing their connections."""
        self._signal(node, signal.SIGSTOP, server=server, patroni=patroni)

    def thaw(self, node: Node, *, server: bool = True, patroni: bool = True) -> None:
        """Resume suspended processes."""
        self._signal(node, signal.SIGCONT, server=server, patroni=patroni)

    def cut(self, node: Node, *, with_etcd: bool) -> None:
        """Cut a node off from the other nodes and optionally from etcd. Clients still reach it."""
        for name in self._list_link_names(node, with_etcd):
            self._check_links().cut(name)

    def mend(self, node: Node) -> None:
        """Restore the connections of a node."""
        for name in self._list_link_names(node, True):
            self._check_links().mend(name)

    def kill_etcd_leader(self) -> str:
        """Wait for an etcd leader, kill it, and return the name of its process, as `revive` lists it."""
        name = f"etcd{self._wait_for(lambda: self.state().etcd_leader)}"
        self._processes[name].kill()
        self._processes[name].wait()
        return name

    # --- processes

    def _build_layout(self, first_port: int) -> Layout:
        if not 0 <= first_port <= FIRST_PORT_MAX:
            raise PortError(f"port {first_port} is unavailable: the first port must be at most {FIRST_PORT_MAX}")
        take = self._ports.take
        etcd_ports = tuple((take(), take()) for _ in range(MEMBERS))
        nodes = []
        for number in range(MEMBERS):
            name = f"node{number + 1}"
            port, rest_port = take(first_port and first_port + number), take()
            wire_ports, etcd_client_ports = (port, rest_port), tuple(client for client, _ in etcd_ports)
            if self._links is not None:
                wire_ports = (self._links.add(name, port), self._links.add(name, rest_port))
                etcd_client_ports = tuple(self._links.add(f"{name} etcd", client) for client in etcd_client_ports)
            data = str(self._directory / name / "data")
            nodes.append(
                Node(
                    name=name,
                    data=data,
                    port=port,
                    rest_port=rest_port,
                    wire_ports=wire_ports,
                    etcd_ports=etcd_client_ports,
                )
            )
        return Layout(
            directory=str(self._directory),
            pid=os.getpid(),
            born_at=get_start_ticks(os.getpid()),
            nodes=tuple(nodes),
            etcd_ports=etcd_ports,
        )

    def _prepare_commands(self) -> dict[str, list[str]]:
        """Return the commands that start the processes, by name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        server, etcd, python = find_postgres(), find_etcd(), Path(sys.executable)
        commands: dict[str, list[str]] = {}
        for index in range(MEMBERS):
            name = f"etcd{index}"
            self._make_directory(name)
            commands[name] = wrap_as_nobody([etcd, *build_etcd_arguments(self.layout, index)], etcd)
        for node in self.layout.nodes:
            self._make_directory(node.name)
            node.configuration.write_text(build_patroni_configuration(node, self.settings, server / "bin"))
            commands[node.name] = wrap_as_nobody([python, *build_patroni_arguments(node)], python, server)
        self.layout.save()
        return commands

    def _make_directory(self, name: str) -> None:
        path = self._directory / name
        path.mkdir()
        chown_to_nobody(self._directory, path)

    def _start_process(self, name: str) -> None:
        place = self._directory / name
        environment = {
            variable: value
            for variable, value in os.environ.items()
            if not variable.lower().endswith("_proxy") and not variable.startswith(("PATRONI_", "ETCD_", "PG"))
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603
                self._commands[name],
                cwd=place,
                env={**environment, "HOME": str(place), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal must reach only this process
            )

    def _wait_for(self, condition: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = condition()
            if found is not None:
                return found
            time.sleep(_POLL_S)
        names = (path.stem for path in sorted(self._directory.glob("*.log")))
        raise ClusterError(f"state of the cluster after {START_S} s: {self.state()}\n{self._read_log_tails(names)}")

    def _check_alive(self) -> bool:
        """Raise ClusterError if a process has exited, because nothing restarts it before the cluster is up."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        if ended:
            raise ClusterError(
                f"ended while the cluster was starting: {', '.join(ended)}\n{self._read_log_tails(ended)}"
            )
        return True

    def _read_log_tails(self, names: Iterable[str]) -> str:
        return "\n".join(f"{name}.log ends with:\n{_read_log_tail(self._directory / f'{name}.log')}" for name in names)

    def _signal(self, node: Node, number: int, *, server: bool, patroni: bool) -> None:
        if patroni:
            self._processes[node.name].send_signal(number)
        pid = find_server_pid(node)
        if server and pid is not None:
            # Signal parents first, so that no new child is missed.
            send_signal(pid, number)
            for child in list_children(pid):
                send_signal(child, number)

    def _list_link_names(self, node: Node, with_etcd: bool) -> list[str]:
        return [node.name, f"{node.name} etcd"] if with_etcd else [node.name]

    def _check_links(self) -> TcpLinks:
        if self._links is None:
            raise RuntimeError("only nodes of a cluster created with is_wired=True can be cut off")
        return self._links


@contextmanager
def run_cluster(directory: Path, settings: ClusterSettings | None = None, **more: Any) -> Iterator[Cluster]:
    """Run a cluster in an empty directory and stop it at the end. `more` are arguments of `Cluster`."""
    cluster = Cluster(directory, settings, **more)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _read_log_tail(path: Path) -> str:
    return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
