"""A process of test_audit_kill.py: python audit_worker.py LOG SEED DIE_AFTER

It changes members of two chats and erases events concurrently, and kills itself after DIE_AFTER acts, while other acts
are being committed.
"""

import asyncio
import os
import signal
import sys
from random import Random
from uuid import UUID

from crash.audit_load import CHATS, USERS
from oncelog.core.builders import event
from oncelog.core.values import Role, SetMember
from oncelog.engine.log import Log, open_log

ERASERS = 3
MANAGERS = 5


class Acts:
    """Counts answered acts and kills the process after the last one."""

    def __init__(self, left: int) -> None:
        self._left = left

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def change_members(log: Log, random: Random, acts: Acts) -> None:
    while True:
        present = random.random() < 0.6
        role = random.choice([None, Role.OWNER, Role.MEMBER]) if present else None
        await log.submit(SetMember(random.choice(CHATS), random.choice(USERS), present, role=role))
        acts.count()


async def erase_events(log: Log, random: Random, acts: Acts) -> None:
    while True:
        key = UUID(int=random.getrandbits(128))
        await log.submit(event(key, {"type": "secret"}, ["p"]))
        await log.erase(key=key)
        acts.count()


async def main(address: str, seed: int, die_after: int) -> None:
    random, acts = Random(seed), Acts(die_after)
    async with open_log(address) as log:
        tasks = [change_members(log, random, acts) for _ in range(MANAGERS)]
        await asyncio.gather(*tasks, *[erase_events(log, random, acts) for _ in range(ERASERS)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
