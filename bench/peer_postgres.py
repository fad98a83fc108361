"""What people write by hand on PostgreSQL: a table of events, unique ids, and a row that counts without gaps.

The row is locked from the first statement that changes it to the end of its commit. That is what makes the order
gapless and the order of commits; it is also why commits cannot share a sync.
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
"""Who waits for a connection costs the server nothing, who waits for the counter's row does: fewer may be faster."""

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
# One snapshot for all of it: two that come at once with one id would both count, and with DO NOTHING the second would
# burn its number. So the second fails by the unique id, and its count is rolled back with it.
ONE_STATEMENT: Final = """\
WITH counted AS (
  UPDATE counter SET position = position + 1 WHERE NOT EXISTS (SELECT FROM events WHERE id = $1) RETURNING position
)
INSERT INTO events (id, position, partitions, body) SELECT $1, position, $2, $3 FROM counted RETURNING position"""
POSITION: Final = "SELECT position FROM events WHERE id = $1"
FUNCTION: Final = "SELECT submit($1, $2, $3)"

Submit = Callable[[WireEvent], Awaitable[int]]


class Postgres:
    """A server, and a pool of connections to it. One transaction an event, one after the other on each."""

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
    def way(self) -> str:
        """How it is written, and with how many connections."""
        return self._way

    async def choose(self, seconds: float) -> dict[str, float]:
        """Takes the fastest form with a connection for every caller. Gives the events a second of each way."""
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

    async def demand_once(self) -> None:
        """In every form what has the id of another gets its number, and none is burned. Raises ValueError if not."""
        events = wire_events()
        for form, submits in self._forms.items():
            event, other = itertools.islice(events, 2)
            # All at once, then once more with other content.
            numbers = await asyncio.gather(*[submit(event) for submit in submits])
            numbers.append(await submits[0](event._replace(body=other.body)))
            if len(set(numbers)) != 1:
                raise ValueError(f"PostgreSQL, {form}: one event and its duplicates got {numbers}")
            self._acknowledged += 1
        await self.demand_all()

    async def demand_all(self) -> None:
        """Everything that was acknowledged is there, numbered without a gap. Raises ValueError if not."""
        counted = tuple(
            await self._connection.fetchrow(
                "SELECT count(*), coalesce(max(position), 0), (SELECT position FROM counter) FROM events"
            )
        )
        if counted != (self._acknowledged,) * 3:
            raise ValueError(f"PostgreSQL acknowledged {self._acknowledged} events, and has {counted}")


@asynccontextmanager
async def postgres_server(place: Path, connections: int) -> AsyncIterator[Postgres]:
    """In a directory of its own, and gone afterwards."""
    with running_server(place, DURABLE_SETTINGS) as server:
        async with by_hand(server, connections) as postgres:
            yield postgres


@asynccontextmanager
async def by_hand(server: PostgresServer, connections: int) -> AsyncIterator[Postgres]:
    """The tables and a pool, in a server that runs. Raises ValueError if that does not sync."""
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
    """The ways to write it, ready on every connection."""
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
    """Who comes first to a connection has it first."""
    async with connection:
        await submit(event)
