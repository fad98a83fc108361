"""An application with a client.

    python client_worker.py URL STORE NAME SEED START EVENTS DIE_AFTER DIE_BEFORE PARTITION…

It submits its events with fixed ids, notes which ones the outbox has accepted, and stores all received events in a
table in the file of the client's store. After a kill and restart, it continues where its notes end, and resubmits
events that were accepted but not noted. START is the number of earlier processes. With DIE_AFTER, it kills itself in
the transaction that delivers the event with that number, before the first statement that starts with DIE_BEFORE.

It prints `taking` and a number when it receives events, and `settled` when every submission has an outcome. It then
reads a position, waits until it has received all events up to that position, and prints a report.
"""

import asyncio
import json
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

from crash.client_load import RACE_EVERY, Planned, count_races, get_race_number, plan_submission, race
from oncelog.client import Client, ClientLimits, Draft, Event, Pending

OUT: Final = 1
AT_ONCE: Final = (1, 1, 1, 2, 3, 8)
WAITING_MAX: Final = 12
"""If the outbox holds more submissions, the application waits for an outcome before it submits again."""
LIMITS: Final = ClientLimits(
    pause_ms_min=5, pause_ms_max=100, refused_pause_ms_min=5, answer_timeout_ms=3000, hand_over_events_max=50
)


class Application:
    """The notes, the table of received events, and the planned kill of the process."""

    def __init__(self, store: str, name: str, seed: int, events: int, die_after: int, die_before: str) -> None:
        self.name = name
        self.seed = seed
        self.events = events
        self._notes = os.open(f"{store}-notes", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        numbers = [get_race_number(line) for line in Path(f"{store}-notes").read_text().splitlines()]
        self.accepted = numbers.count(None)
        """Number of accepted events, excluding races."""
        self.races_left = set(range(1, count_races(events) + 1)).difference(numbers)
        self._loop = asyncio.get_running_loop()
        self._race = 0
        self._is_on = asyncio.Event()
        self._die_after = die_after
        self._die_before = die_before
        self._taken = 0

    # --- delivery

    def apply(self, connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        """Insert the events. The test detects an event that is inserted twice, because the second insert fails."""
        os.write(OUT, b"taking %d\n" % len(events))
        connection.execute(
            "CREATE TABLE IF NOT EXISTS given (place INTEGER PRIMARY KEY AUTOINCREMENT, committed_id INTEGER UNIQUE,"
            " id TEXT UNIQUE, client_id TEXT, partitions TEXT, body TEXT, at INTEGER)"
        )
        for event in events:
            row = (event.committed_id, event.id, event.client_id, *map(json.dumps, (event.partitions, event.event)))
            connection.execute(
                "INSERT INTO given (committed_id, id, client_id, partitions, body, at) VALUES (?, ?, ?, ?, ?, ?)",
                (*row, event.status_updated_at),
            )
            self._taken += 1
            if self._taken == self._die_after:
                self._die(connection)
        self._race = events[-1].committed_id // RACE_EVERY
        self._loop.call_soon_threadsafe(self._is_on.set)

    def _die(self, connection: sqlite3.Connection) -> None:
        """Kill the process now, or before a statement of the client after `apply` has returned."""

        def before(statement: str) -> None:
            if statement.startswith(self._die_before):
                os.kill(os.getpid(), signal.SIGKILL)

        before("")
        connection.set_trace_callback(before)

    # --- submission

    async def submit(self, client: Client, submissions: Sequence[Planned]) -> list[Pending]:
        """Submit and note the accepted ids. The notes survive a kill."""
        drafts = [Draft(one.event, one.partitions, one.id, one.expected_committed_id) for one in submissions]
        pending = await client.submit_many(drafts)
        os.write(self._notes, "".join(f"{one.id}\n" for one in pending).encode())
        return pending

    async def submit_some(self, client: Client, chance: Random) -> None:
        """Submit some events together or one by one, and sometimes wait for outcomes."""
        end = min(self.accepted + chance.choice(AT_ONCE), self.events)
        some = [plan_submission(self.seed, self.name, counter) for counter in range(self.accepted, end)]
        if chance.random() < 0.5:
            pending = await self.submit(client, some)
        else:
            pending = [one for alone in some for one in await self.submit(client, [alone])]
        self.accepted = end
        if chance.random() < 0.2:
            await pending[-1].outcome()
        while len(waiting := client.pending()) > WAITING_MAX:
            await waiting[0].outcome()

    async def run_races(self, client: Client) -> None:
        """Take part in races until cancelled. An interrupted race is in the outbox, and is repeated if not noted."""
        while True:
            await self._is_on.wait()
            self._is_on.clear()
            if self._race in self.races_left:
                number = self._race
                await self.submit(client, race(self.seed, self.name, number))
                self.races_left.discard(number)

    async def submit_missed_races(self, client: Client) -> None:
        """Submit the remaining races, so that every client eventually submits everything."""
        for number in sorted(self.races_left):
            await self.submit(client, race(self.seed, self.name, number))
        self.races_left.clear()

    async def use(self, client: Client, chance: Random, commands: asyncio.StreamReader) -> bool:
        """Use a client for a while and return whether the application is done."""
        racing = asyncio.create_task(self.run_races(client))
        try:
            for _ in range(chance.randint(1, 40)):
                if self.accepted < self.events:
                    await self.submit_some(client, chance)
        finally:
            racing.cancel()
            await asyncio.gather(racing, return_exceptions=True)
        if self.accepted < self.events:
            return False
        await self.submit_missed_races(client)
        await client.until_settled()
        os.write(OUT, b"settled\n")
        await client.reached(int(await commands.readline()))
        stands = {
            "rejected": [[one.id, one.outcome.reason] for one in await client.refused()],
            "set_aside": [str(one) for one in await client.set_aside()],
            "pending": client.status().pending,
        }
        os.write(OUT, json.dumps(stands).encode() + b"\n")
        return True


async def main(
    url: str, store: str, name: str, numbers: Sequence[int], die_before: str, partitions: Sequence[str]
) -> None:
    seed, start, events, die_after = numbers
    chance = Random(f"{seed}/{name}/{start}")
    application = Application(store, name, seed, events, die_after, die_before)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    is_over = False
    while not is_over:
        async with Client(
            url,
            path=store,
            partitions=partitions,
            client_id=name,
            apply=application.apply,
            limits=LIMITS,
            chance=chance,
        ) as client:
            is_over = await application.use(client, chance, commands)


if __name__ == "__main__":
    logging.basicConfig(
        filename=f"{sys.argv[2]}-log", level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    numbers = [int(one) for one in sys.argv[4:8]]
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], numbers, sys.argv[8], sys.argv[9:]))
