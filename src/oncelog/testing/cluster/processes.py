"""Finds and stops the processes of a cluster, but no other processes that mention its directory."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from oncelog.testing.cluster.layout import Layout, Node, build_etcd_arguments, build_patroni_arguments
from oncelog.testing.programs import get_start_ticks, kill_process_tree, list_children, send_signal, wait_for_exit

_WRITERS: Final = {"initdb", "pg_basebackup", "pg_rewind"}
"""Programs that Patroni runs for minutes. They continue after Patroni has died."""


def has_supervisor(layout: Layout) -> bool:
    """Return whether the command that started the cluster is still running.

    Its pid may now belong to a different process.
    """
    command = "\0".join(_read_arguments(layout.pid))
    return get_start_ticks(layout.pid) == layout.born_at and "oncelog.testing.cluster" in command.replace("/", ".")


def find_server_pid(node: Node) -> int | None:
    """Return the pid of a PostgreSQL server, or None if it is not running."""
    with suppress(OSError, ValueError):
        pid = int(Path(node.data, "postmaster.pid").read_text().split("\n", 1)[0])
        if _is_server(node, _read_arguments(pid)):  # the pid may now belong to a different process
            return pid
    return None


def kill_server(node: Node) -> None:
    """Kill all processes of a server at the same time. Raises ProcessLookupError if it is not running."""
    pid = find_server_pid(node)
    if pid is None:
        raise ProcessLookupError(f"PostgreSQL on {node.name} is not running")
    kill_process_tree(pid)


def stop_all(layout: Layout) -> None:
    """Stop all processes of a cluster, even if its supervisor has died."""
    starters = [pid for pid, arguments in _iterate_commands() if _is_starter(layout, arguments)]
    # First suspend the processes that would restart servers, so that they start no further children. Then kill them
    # and their helpers.
    for pid in starters:
        send_signal(pid, signal.SIGSTOP)
    writers = [
        pid for pid, arguments in _iterate_commands() if any(_is_writer(node, arguments) for node in layout.nodes)
    ]
    process_ids = {process_id for pid in (*starters, *writers) for process_id in (pid, *_iterate_helpers(layout, pid))}
    for pid in process_ids:
        send_signal(pid, signal.SIGKILL)
    for pid in process_ids:
        wait_for_exit(pid)
    # Finally, stop the servers in a way that releases their shared memory. Repeat this, because some may still have
    # been starting.
    while servers := _list_servers(layout):
        for pid in servers:
            send_signal(pid, signal.SIGQUIT)
            for process_id in (pid, *list_children(pid)):
                send_signal(process_id, signal.SIGCONT)
        for pid in servers:
            wait_for_exit(pid)


def _list_servers(layout: Layout) -> list[int]:
    return [pid for pid, arguments in _iterate_commands() if any(_is_server(node, arguments) for node in layout.nodes)]


def _iterate_helpers(layout: Layout, parent: int) -> Iterator[int]:
    """Yield the running helpers of a process, except servers."""
    for pid in list_children(parent):
        arguments = _read_arguments(pid)
        if not any(_is_server(node, arguments) for node in layout.nodes):
            yield pid
            yield from _iterate_helpers(layout, pid)


def _is_starter(layout: Layout, arguments: list[str]) -> bool:
    """Return whether a process is one of the cluster's etcd or Patroni processes. All arguments must match."""
    if "--" in arguments and _get_program_name(arguments) == "setpriv":  # setpriv is about to become one of them
        arguments = arguments[arguments.index("--") + 1 :]
    options = arguments[1:]
    if _get_program_name(arguments) == "etcd":
        return any(options == build_etcd_arguments(layout, index) for index in range(len(layout.etcd_ports)))
    return "python" in _get_program_name(arguments) and any(
        options == build_patroni_arguments(node) for node in layout.nodes
    )


def _is_server(node: Node, arguments: list[str]) -> bool:
    return _get_program_name(arguments) == "postgres" and node.data in arguments


def _is_writer(node: Node, arguments: list[str]) -> bool:
    return _get_program_name(arguments) in _WRITERS and (node.data in arguments or f"--pgdata={node.data}" in arguments)


def _get_program_name(arguments: list[str]) -> str:
    return Path(arguments[0]).name if arguments else ""


def _iterate_commands() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        yield pid, _read_arguments(pid)


def _read_arguments(pid: int) -> list[str]:
    """Return the arguments of a process, which any user may read.

    The list is empty if it has exited.
    """
    try:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return command_line.removesuffix("\0").split("\0") if command_line else []
