"""A process of test_blocked_loop.py: python blocked_worker.py LOG RAN LEASE_S RUN_S_MAX BLOCK

It waits for a line, then calls an async `once` function that executes a run, while a second caller requests the same
run directly. With BLOCK, the tool of the run blocks the event loop until the next line. Each execution of the tool
appends its process id to the file RAN, and the process prints the outcome of each call.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import oncelog
from scripts import print_line

FIELDS: dict[str, Any] = {
    "plan_id": None,
    "campaign_id": 12,
    "event_type": "tool.execute",
    "tool_name": "dice",
    "ruleset_version": None,
    "args": {},
}


async def main(path: str, ran: Path, lease_s: float, run_s_max: float, *, block: bool) -> None:
    log = oncelog.open(path)
    runs = oncelog.Runs(log)

    async def tool() -> int:
        with ran.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if block:
            print_line("blocked")
            sys.stdin.readline()
        return os.getpid()

    async def run() -> int:
        done = await runs.execute(**FIELDS, tool=tool, lease_s=lease_s, run_s_max=run_s_max)
        return int(done.event.output)

    @oncelog.once(log, key=lambda: "outer", name="outer", lease_s=lease_s, run_s_max=run_s_max)
    async def outer() -> int:
        return await run()

    async def report(call: "asyncio.Future[int]") -> None:
        try:
            print_line(f"got {await call}")
        except oncelog.OncelogError as error:
            print_line(f"raised {type(error).__name__}")

    async with log:
        print_line("ready")
        await asyncio.to_thread(sys.stdin.readline)
        await report(asyncio.ensure_future(outer()))
        await report(asyncio.ensure_future(run()))
    print_line("done")


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), block=sys.argv[5] == "block"))
