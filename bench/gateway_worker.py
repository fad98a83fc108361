"""One of several processes on a log: `python -m bench.gateway_worker ADDRESS STREAM CALLERS`.

Each input line is a number of seconds. The process submits new writes to its stream for that long and prints how many
it has submitted.
"""

import asyncio
import os
import sys
import time

import msgspec
import uvloop

import oncelog
from bench.wire import EVENTS
from oncelog import RUNS, Committed, Log, Submission

BODIES = [msgspec.json.encode(event) for event in EVENTS]


async def _busy(log: Log, stream: str, callers: int, seconds: float) -> int:
    until = time.perf_counter() + seconds
    count = 0

    async def caller(number: int) -> None:
        nonlocal count
        body = BODIES[number % len(BODIES)]
        while time.perf_counter() < until:
            key = os.urandom(16)
            write = Submission(policy=STREAMED, scope=stream, key=key, fingerprint=key * 2, body=body)
            if type(await log.submit(write)) is not Committed:
                raise ValueError("a new write was not committed")
            count += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(callers):
            tasks.create_task(caller(number))
    return count


STREAMED = oncelog.Policy(
    name="streamed",
    key_bytes=RUNS.key_bytes,
    order=RUNS.order,
    on_reuse=RUNS.on_reuse,
    retention=oncelog.FOREVER,
)


async def main(address: str, stream: str, callers: int) -> None:
    loop = asyncio.get_running_loop()
    async with oncelog.open(address, policies=[STREAMED]) as log:
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(await _busy(log, stream, callers, float(line)), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
