"""A hand-written log on PostgreSQL: a table of events, unique ids, and a counter row without gaps.

A transaction locks the counter row from its first change to the end of the commit, so the numbers have no gaps and
follow commit order. For the same reason commits cannot share a sync.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bench.wire import Slice, WireEvent, keep_busy, wire_events
from oncelog.testing.postgres import DURABLE_SETTINGS, PostgresServer
from oncelog.testing.postgres import postgres_server as running_server

SMALL_POOL: Final = 8
"""Callers that wait for a connection cost the server nothing, but callers that wait for the counter row do. A smaller
number of connections may therefore be faster.
"""

TABLES: Final = """\
CREATE TABLE counter (position bigint NOT NULL);
INSERT INTO counter VALUES (0);
CREATE TABLE events (
  id uuid PRIMARY KEY,
  position bigint NOT NULL UNIQUE,
  partitions text[] NOT NULL,
  body jsonb NOT NULL,
  created timestamptz NOT NULL DEFAULT now()
);
CREATE FUNCTION submit(new_id uuid, new_partitions text[], new_body jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE last bigint;
BEGIN
  SELECT position INTO last FROM counter FOR UPDATE;
  INSERT INTO events (id, position, partitions, body) VALUES (new_id, last + 1, new_partitions, new_body)
    ON CONFLICT (id) DO NOTHING;
  IF FOUND THEN
    UPDATE counter SET position = last + 1;
    RETURN last + 1;
  END IF;
  RETURN (SELECT position FROM events WHERE id = new_id);
END $$;
"""
COUNT: Final = "UPDATE counter SET position = position + 1 RETURNING position"
INSERT: Final = """\
INSERT INTO events (id, position, partitions, body) VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO NOTHING RETURNING id"""
# The whole statement has one snapshot, so two concurrent writes with one id would both increment the counter, and with
# DO NOTHING the second would lose its number. Instead the second write violates the unique id, which rolls back its
# increment.
ONE_STATEMENT: Final = """\
WITH counted AS (
  UPDATE counter SET position = position + 1 WHERE NOT EXISTS (SELECT FROM events WHERE id = $1) RETURNING position
)
INSERT INTO events (id, position, partitions, body) SELECT $1, position, $2, $3 FROM counted RETURNING position"""
POSITION: Final = "SELECT position FROM events WHERE id = $1"
FUNCTION: Final = "SELECT submit($1, $2, $3)"

Submit = Callable[[WireEvent], Awaitable[int]]


class Postgres:
    """A server, and a pool of connections to it. Each event is one transaction."""

    name: Final = "by hand on PostgreSQL"

    def __init__(self, pid: int, forms: dict[str, list[Submit]], connection: Any) -> None:
        self.pid = pid
        self._forms = forms
        self._connection = connection
        self._callers = len(next(iter(forms.values())))
        self._ways = {
            f"{form}, pool of {size}": submits[:size]
            for form, submits in forms.items()
            for size in sorted({self._callers, min(self._callers, SMALL_POOL)}, reverse=True)
        }
        self._way = next(iter(self._ways))
        self._acknowledged = 0

    @property
    def choice(self) -> str:
        """The chosen form and its number of connections."""
        return self._way

    async def choose(self, seconds: float) -> dict[str, float]:
        """Choose the fastest form, with a connection per caller. Return the events per second of each form."""
        speeds = {}
        for way in self._ways:
            self._way = way
            speeds[way] = (await self.load(seconds)).per_s
        self._way = max((way for way, pool in self._ways.items() if len(pool) == self._callers), key=speeds.__getitem__)
        return speeds

    async def load(self, seconds: float) -> Slice:
        pool = [partial(_submit, submit, asyncio.Lock()) for submit in self._ways[self._way]]
        callers = list(itertools.islice(itertools.cycle(pool), self._callers))
        result = await keep_busy(callers, self.pid, seconds)
        self._acknowledged += result.events
        return result

    async def check_once(self) -> None:
        """Raise ValueError unless duplicates get the number of the first write and no number is lost, in every form."""
        events = wire_events()
        for form, submits in self._forms.items():
            event, other = itertools.islice(events, 2)
            # Send the duplicates first concurrently, and then with different content.
            numbers = await asyncio.gather(*[submit(event) for submit in submits])
            numbers.append(await submits[0](event._replace(body=other.body)))
            if len(set(numbers)) != 1:
                raise ValueError(f"PostgreSQL, {form}: one event and its duplicates received {numbers}")
            self._acknowledged += 1
        await self.check_all()

    async def check_all(self) -> None:
        """Raise ValueError unless all acknowledged events exist and are numbered without gaps."""
        counted = tuple(
            await self._connection.fetchrow(
                "SELECT count(*), coalesce(max(position), 0), (SELECT position FROM counter) FROM events"
            )
        )
        if counted != (self._acknowledged,) * 3:
            raise ValueError(f"PostgreSQL acknowledged {self._acknowledged} events, and has {counted}")


@asynccontextmanager
async def postgres_server(place: Path, connections: int) -> AsyncIterator[Postgres]:
    """Run PostgreSQL in this directory until the block ends."""
    with running_server(place, DURABLE_SETTINGS) as server:
        async with open_hand_written_log(server, connections) as postgres:
            yield postgres


@asynccontextmanager
async def open_hand_written_log(server: PostgresServer, connections: int) -> AsyncIterator[Postgres]:
    """Create the tables and a pool in a running server. Raises ValueError if the server does not sync."""
    asyncpg = import_module("asyncpg")
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(connections):
            client = await asyncpg.connect(server.socket_address or server.address)
            stack.push_async_callback(client.close)
            clients.append(client)
        for name, value in DURABLE_SETTINGS.items():
            if (is_set := await clients[0].fetchval(f"SHOW {name}")) != value:
                raise ValueError(f"PostgreSQL has {name} = {is_set}")
        await clients[0].execute(TABLES)
        yield Postgres(server.process.pid, await _forms(clients, asyncpg.UniqueViolationError), clients[0])


async def _forms(clients: list[Any], exists: type[Exception]) -> dict[str, list[Submit]]:
    """Prepare all forms on every connection."""
    forms: dict[str, list[Submit]] = {"one statement": [], "BEGIN … COMMIT": [], "a function": []}
    for client in clients:
        count, insert, position, whole, call = [
            await client.prepare(text) for text in (COUNT, INSERT, POSITION, ONE_STATEMENT, FUNCTION)
        ]
        forms["one statement"].append(partial(_by_one_statement, whole, position, exists))
        forms["BEGIN … COMMIT"].append(partial(_by_transaction, client, count, insert, position))
        forms["a function"].append(partial(_by_function, call))
    return forms


async def _by_one_statement(whole: Any, position: Any, exists: type[Exception], event: WireEvent) -> int:
    try:
        number = await whole.fetchval(event.id, [event.partition], event.body.decode())
    except exists:
        number = None
    return int(await position.fetchval(event.id) if number is None else number)


async def _by_transaction(client: Any, count: Any, insert: Any, position: Any, event: WireEvent) -> int:
    await client.execute("BEGIN")
    number = await count.fetchval()
    if await insert.fetchval(event.id, number, [event.partition], event.body.decode()) is None:
        await client.execute("ROLLBACK")
        number = await position.fetchval(event.id)
    else:
        await client.execute("COMMIT")
    return int(number)


async def _by_function(call: Any, event: WireEvent) -> int:
    return int(await call.fetchval(event.id, [event.partition], event.body.decode()))


async def _submit(submit: Submit, connection: asyncio.Lock, event: WireEvent) -> None:
    """Submit over a connection, in the order of the callers."""
    async with connection:
        await submit(event)
