"""Processes that a benchmark starts, and their use of CPU and memory."""

import os
import re
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

START_S: Final = 300
"""Timeout that guards against hangs. A busy machine takes half a minute to start a server."""
STOP_S: Final = 60
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(command: Sequence[str], log: Path, ready: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Run a command until the block ends. Yield its process id and the match of `ready` in its output.

    The output goes to a file, because a full pipe would block the process.
    """
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield running.pid, _ready(running, log, ready)
    finally:
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _ready(running: subprocess.Popen[bytes], log: Path, ready: str) -> re.Match[str]:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        match = re.search(ready, log.read_text(errors="replace"))
        if match is not None:
            return match
        if running.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"{running.args!r} did not print {ready!r}, but:\n{log.read_text(errors='replace')[-2000:]}")


def allow_files(count: int) -> None:
    """Raise the open-file limit of this process and its children to this number. Sockets count as files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )


def client_cpu_s() -> float:
    """Return the CPU time of this process."""
    return time.process_time()


def server_cpu_s(pid: int) -> float:
    """Return the CPU time of a server and its children. (PostgreSQL has a child per connection.)"""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name is in parentheses and may contain any character.
        fields = text.rpartition(")")[2].split()
        parent, (own_user, own_system, ended_user, ended_system) = int(fields[1]), map(int, fields[11:15])
        if int(path.parent.name) == pid:
            ticks += own_user + own_system + ended_user + ended_system
        elif parent == pid:
            ticks += own_user + own_system
    return ticks / TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Return the resident set size (RSS) of a process."""
    _, resident, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return int(resident) * PAGE_BYTES
