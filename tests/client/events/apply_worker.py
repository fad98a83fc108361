"""Insert a row for each event, and kill this process inside `apply` after ROWS rows.

python apply_worker.py FILE URL ROWS UPTO

If ROWS is 0, the worker runs until the cursor reaches UPTO.
"""

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence

from oncelog.client import Client, ClientLimits, Event

FILE, URL, ROWS, UPTO = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
made = 0


def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    global made  # noqa: PLW0603
    connection.execute("CREATE TABLE IF NOT EXISTS made (place INTEGER PRIMARY KEY, number INTEGER)")
    for event in events:
        connection.execute("INSERT INTO made (number) VALUES (?)", (event.committed_id,))
        made += 1
        if made == ROWS:
            os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    limits = ClientLimits(hand_over_events_max=3)
    async with Client(URL, path=FILE, partitions=["a"], apply=apply, limits=limits) as client:
        await client.reached(UPTO)


asyncio.run(main())
