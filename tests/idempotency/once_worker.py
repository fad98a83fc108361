"""A process of test_once_processes.py: python once_worker.py LOG RAN CALLERS LEASE_S HOLD

It waits for a line, calls the function CALLERS times concurrently, and prints the outcome of each call. Each run of
the function appends its process id to the file RAN. With HOLD, the first run waits for a line before it returns. On the
line `stop`, the process stops itself with SIGSTOP at a moment when it holds no store lock, and then waits for
the next line.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import oncelog
from deadlines import until
from oncelog.engine import lease_watchdog
from scripts import print_line

NEVER_S = 10**6
"""The lease watchdog must not hold a store lock when the process is stopped."""


def record_run(path: Path) -> int:
    """Record a run, and return the number of runs so far."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{os.getpid()}\n".encode())
    finally:
        os.close(file)
    return len(path.read_text().split())


async def stop_process(log: oncelog.Log) -> None:
    """Stop this process while no write is in progress. Return when it continues."""
    writer: Any = getattr(log._store, "_writer_thread", None)  # only SQLite has one
    await until(lambda: not log.queue_length and (writer is None or writer.is_idle))
    os.kill(os.getpid(), signal.SIGSTOP)


async def main(path: str, runs: Path, callers: int, lease_s: float, *, hold: bool) -> None:
    lease_watchdog.LATE_S_MIN = NEVER_S  # type: ignore[misc]
    loop = asyncio.get_running_loop()
    log = oncelog.open(path)

    @oncelog.once(log, name="work", lease_s=lease_s)
    async def work(number: int) -> int:
        if record_run(runs) == 1 and hold:
            print_line("holding")
            while await loop.run_in_executor(None, sys.stdin.readline) == "stop\n":
                await stop_process(log)
        return os.getpid() + 0 * number

    async def call() -> None:
        try:
            print_line(f"got {await work(7)}")
        except oncelog.OncelogError as error:
            print_line(f"raised {type(error).__name__}")

    async with log:
        print_line("ready")
        await loop.run_in_executor(None, sys.stdin.readline)
        await asyncio.gather(*[call() for _ in range(callers)])
    print_line("done")


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), hold=sys.argv[5] == "hold"))
