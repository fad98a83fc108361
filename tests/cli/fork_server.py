"""Process from which the tests fork `oncelog` commands, so that each command starts without importing the package.

Importing `oncelog` takes longer than most commands. This process imports it once, and then forks a child for each
request of `cli.processes`. Apart from that, the child is a separate process, with its own process id, standard streams,
environment, signals and exit status.
"""

import atexit
import gc
import os
import pickle
import signal
import socket
import sys
import threading
from importlib import import_module
from io import TextIOWrapper
from typing import IO, Any, TextIO, cast

from msgspec.structs import replace
from typer.main import get_command

PRELOADED = (
    *("oncelog.cli", "oncelog.server.app", "oncelog.storage.postgres", "aiohttp", "uvloop"),
    # Typer and other packages import these at first use. Otherwise, every command would import them.
    *("typer._adapters", "typer.rich_utils", "rich.markdown", "rich.traceback", "encodings.ascii", "encodings.idna"),
)
REQUEST_BYTES_MAX = 1024 * 1024
RETRY_PAUSE_MS = (10, 50)
"""Shortest and longest pause of a forked command between connection attempts."""


def shorten_pauses() -> None:
    """Shorten the retry pauses of the commands, which are 100 ms to 5 s by default."""
    remote: Any = import_module("oncelog.cli.remote")
    pause_ms_min, pause_ms_max = RETRY_PAUSE_MS
    remote.PAUSE_LIMITS = replace(remote.PAUSE_LIMITS, pause_ms_min=pause_ms_min, pause_ms_max=pause_ms_max)


def build_parser() -> None:
    """Build the command-line parser once. Typer builds it at every call."""
    cli: Any = import_module("oncelog.cli")
    cli.app = get_command(cli.app)


def serve_requests(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Return the request in a child, and None in the parent after the last request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reap monitors automatically.
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
        if not data:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *streams, status = descriptors
            _start_monitored(requests, streams, status)
            request: dict[str, Any] = pickle.loads(data)  # noqa: S301 - from the test process
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _start_monitored(requests: socket.socket, streams: list[int], status: int) -> None:
    """Fork a monitor that forks the command, and return in the command.

    The monitor is the command's parent. It waits for the command, reports its exit status and exits, so that the test
    process gets no zombies when a test kills other processes.
    """
    child = os.fork()
    if child == 0:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 1 + max(requests.fileno(), status, *streams))
        requests.detach()
        return
    for descriptor in streams:
        os.close(descriptor)
    requests.send(b"%d" % child)
    requests.close()
    _, code = os.waitpid(child, 0)
    os.write(status, b"%d" % os.waitstatus_to_exitcode(code))
    os._exit(0)


def become_command(request: dict[str, Any]) -> None:
    """Give this process the arguments, environment and streams of the request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = _open_unbuffered(1, "strict")
        sys.stderr = _open_unbuffered(2, "backslashreplace")
    else:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )


def _open_unbuffered(descriptor: int, errors: str) -> TextIO:
    """Open a standard stream as Python does with PYTHONUNBUFFERED."""
    raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
    # Python also wraps an unbuffered file in a text stream, although the parameter's type does not allow one.
    return TextIOWrapper(cast("IO[bytes]", raw), encoding="utf-8", errors=errors, write_through=True)


def run_program(program: str) -> None:
    """Run the command and exit without the interpreter's cleanup, which takes longer than most commands.

    The interpreter handles unusual exits: an exception, a message as exit status, output that cannot be flushed.
    """
    code: Any = 0
    try:
        exec(program, {"__name__": "__main__"})  # noqa: S102 - from the test process
    except SystemExit as error:
        code = 0 if error.code is None else error.code
    if type(code) is not int:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # On Ctrl-C, the test process stops this process.
    for name in PRELOADED:
        import_module(name)
    shorten_pauses()
    build_parser()
    gc.freeze()  # children neither collect nor free shared objects
    command = serve_requests(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        become_command(command)
        run_program(command["program"])
