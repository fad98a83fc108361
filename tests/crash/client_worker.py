"""An application with a client: python client_worker.py URL STORE NAME SEED START EVENTS DIE_AFTER PARTITION…

It submits its events, each under its own id, notes what the outbox has accepted, and keeps a table of all that is
handed over to it in the store's own file. Started again after a kill it goes on where its notes end: what had been
accepted but not noted is submitted again. START counts its lives. With DIE_AFTER it kills itself at some place in the
transaction in which the last of so many events is handed over to it in this life.

It says `taking` and how many whenever events are handed over, and `settled` when every submission has an outcome.
Told a number then, it waits until everything up to that has been handed over, and says how it stands.
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

from crash.client_load import RACE_EVERY, Planned, planned, race, raced, races
from oncelog.client import Client, ClientLimits, Draft, Event, Pending

OUT: Final = 1
AT_ONCE: Final = (1, 1, 1, 2, 3, 8)
WAITING_MAX: Final = 12
"""So many without an outcome, and it waits for one before it submits more."""
LIMITS: Final = ClientLimits(
    pause_ms_min=5, pause_ms_max=100, refused_pause_ms_min=5, answer_timeout_ms=1500, hand_over_events_max=50
)


class Application:
    """Its notes, its table, and how long it lives."""

    def __init__(self, store: str, name: str, seed: int, events: int, die_after: int) -> None:
        self.name = name
        self.seed = seed
        self.events = events
        self._notes = os.open(f"{store}-notes", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        numbers = [raced(line) for line in Path(f"{store}-notes").read_text().splitlines()]
        self.accepted = numbers.count(None)
        """So many of its events, not counting those of races."""
        self.races_left = set(range(1, races(events) + 1)).difference(numbers)
        self._loop = asyncio.get_running_loop()
        self._race = 0
        self._is_on = asyncio.Event()
        self._die_after = die_after
        self._taken = 0

    # --- what it is given

    def apply(self, connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        """Fails if an event was there before: then it is set aside, and the test finds it."""
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
        """Now, or before a statement with which the client goes on when `apply` has returned."""
        moment = Random(f"{self.seed}/{self.name}/{self._die_after}").choice(("", "RELEASE", "UPDATE"))

        def before(statement: str) -> None:
            if statement.startswith(moment):
                os.kill(os.getpid(), signal.SIGKILL)

        before("")
        connection.set_trace_callback(before)

    # --- what it submits

    async def submit(self, client: Client, submissions: Sequence[Planned]) -> list[Pending]:
        """Notes them when they have been accepted. A killed process does not lose what it has written."""
        drafts = [Draft(one.event, one.partitions, one.id, one.expected_committed_id) for one in submissions]
        pending = await client.submit_many(drafts)
        os.write(self._notes, "".join(f"{one.id}\n" for one in pending).encode())
        return pending

    async def submit_some(self, client: Client, chance: Random) -> None:
        """Some at once or one by one; then sometimes waits for them, and always if too many are waiting."""
        end = min(self.accepted + chance.choice(AT_ONCE), self.events)
        some = [planned(self.seed, self.name, counter) for counter in range(self.accepted, end)]
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
        """Until it is cancelled: what has been begun then stays in the outbox, and is submitted again if not noted."""
        while True:
            await self._is_on.wait()
            self._is_on.clear()
            if self._race in self.races_left:
                number = self._race
                await self.submit(client, race(self.seed, self.name, number))
                self.races_left.discard(number)

    async def submit_missed_races(self, client: Client) -> None:
        """Everybody submits all of it in the end."""
        for number in sorted(self.races_left):
            await self.submit(client, race(self.seed, self.name, number))
        self.races_left.clear()

    async def use(self, client: Client, chance: Random, commands: asyncio.StreamReader) -> bool:
        """For a while; whether it has come to the end."""
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
            "rejected": [[one.id, one.outcome.reason] for one in await client.rejected()],
            "set_aside": [str(one) for one in await client.set_aside()],
            "pending": client.status().pending,
        }
        os.write(OUT, json.dumps(stands).encode() + b"\n")
        return True


async def main(url: str, store: str, name: str, numbers: Sequence[int], partitions: Sequence[str]) -> None:
    seed, start, events, die_after = numbers
    chance = Random(f"{seed}/{name}/{start}")
    application = Application(store, name, seed, events, die_after)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    is_over = False
    while not is_over:
        async with Client(
            url,
            store=store,
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
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], [int(one) for one in sys.argv[4:8]], sys.argv[8:]))
