"""One of the processes of test_once_processes.py: python once_worker.py LOG RAN CALLERS LEASE_S HOLD

It begins when it is told to, calls the function so often at once, and prints what every call gave. Each run of the
function leaves the number of its process in the file RAN. With HOLD the first run waits for a line before it returns.
"""

import asyncio
import os
import sys
from pathlib import Path

import oncelog


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def ran(path: Path) -> int:
    """Notes a run, and gives how many there have been."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{os.getpid()}\n".encode())
    finally:
        os.close(file)
    return len(path.read_text().split())


async def main(path: str, runs: Path, callers: int, lease_s: float, *, hold: bool) -> None:
    loop = asyncio.get_running_loop()
    log = oncelog.open(path)

    @oncelog.once(log, name="work", lease_s=lease_s)
    async def work(number: int) -> int:
        if ran(runs) == 1 and hold:
            say("holding")
            await loop.run_in_executor(None, sys.stdin.readline)
        return os.getpid() + 0 * number

    async def called() -> None:
        try:
            say(f"got {await work(7)}")
        except oncelog.OncelogError as error:
            say(f"raised {type(error).__name__}")

    async with log:
        say("ready")
        await loop.run_in_executor(None, sys.stdin.readline)
        await asyncio.gather(*[called() for _ in range(callers)])
    say("done")


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), hold=sys.argv[5] == "hold"))
