"""The processes that test_kill.py kills. This process forks one for each input line FILE ROUND SEAL_KEYS DIE_AFTER.

A process prints a line for each answer as soon as it arrives, and for each record that a follower received. It kills
itself right after answer number DIE_AFTER, always in the middle of its work: other submitters are waiting for answers,
and the writer thread may be anywhere in a commit. Processes are forked because a new process would spend most of its
time importing modules.
"""

import asyncio
import os
import signal
import sys

from crash.load import SUBMITTERS, WRITES, format_answer, members, write
from oncelog.core.values import Submission
from oncelog.engine.log import Log, open_log
from oncelog.storage.sqlite import SqliteStore

OUT = 1


class Submitters:
    """Submits the writes of a round concurrently and counts the answers."""

    def __init__(self, log: Log, round_number: int, die_after: int) -> None:
        self._log = log
        self._round_number = round_number
        self._die_after = die_after
        self._answers = 0

    async def run(self) -> None:
        await asyncio.gather(*[self._submit_all(number) for number in range(SUBMITTERS)])

    async def _submit_all(self, number: int) -> None:
        for step in range(WRITES):
            await self._submit(write(self._round_number, number, step))
        await self._submit(write(self._round_number, number, WRITES - 2))  # a retry, as if the answer had been lost

    async def _submit(self, one: Submission) -> None:
        os.write(OUT, format_answer(one.key, await self._log.submit(one)))
        self._answers += 1
        if self._answers == self._die_after:
            os.kill(os.getpid(), signal.SIGKILL)


async def follow(log: Log) -> None:
    async with log.follow() as records:
        async for record in records:
            os.write(OUT, b"S %d %s\n" % (record.position, record.key.hex().encode()))


async def work(path: str, round_number: int, seal_keys: int, die_after: int) -> None:
    async with Log(SqliteStore(path, seal_keys=seal_keys)) if seal_keys else open_log(path) as log:
        following = asyncio.create_task(follow(log))
        await asyncio.gather(*[log.submit(member) for member in members()])
        await Submitters(log, round_number, die_after).run()
        following.cancel()


def main() -> None:
    for line in sys.stdin:
        path, *numbers = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            status = 1
            try:
                asyncio.run(work(path, *map(int, numbers)))
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        os.write(OUT, b"ended %d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
