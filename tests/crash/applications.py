"""Applications that are killed and started again, each a process with a client, and what is left of them."""

import asyncio
import json
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import oncelog
from cli.served import ENVIRONMENT
from crash import client_worker
from crash.client_load import Planned, raced
from crash.processes import START


class Row(NamedTuple):
    """An event as the log has it, or as an application was given it."""

    committed_id: int
    id: str
    client_id: str
    partitions: tuple[str, ...]
    event: Any
    at_ms: int


class Application:
    """`client_worker`, life after life on the same store."""

    def __init__(self, directory: Path, name: str, seed: int, events: int, partitions: Sequence[str]) -> None:
        self.store = directory / f"{name}.db"
        self.name = name
        self.partitions = partitions
        self.kills = 0
        self.begun = asyncio.Event()
        """Something was handed over in its present life, or that is over."""
        self.settled = asyncio.Event()
        """It has said so, and waits to be told how far it has to come."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.stands: dict[str, Any] = {}
        """What it said at its end."""
        self._seed = seed
        self._events = events
        self._process: asyncio.subprocess.Process | None = None
        self._end = b""
        """What it is told to come to, once that is known."""

    async def live(self, url: str, dies: Iterator[int]) -> None:
        """Until it has ended in order. `dies` says for each life after how many events it ends by itself, or 0."""
        while not await self.live_once(url, die_after=next(dies)):
            await self.may_start.wait()

    async def live_once(self, url: str, *, die_after: int = 0, kill_after: int = 0) -> bool:
        """Until its end: True for one in order, False for a kill, and nothing else may be.

        It kills itself in the transaction in which it is given its event number `die_after`, or is killed as soon as
        it says that it is being given its event number `kill_after`.
        """
        taken = 0
        async with self._started(url, die_after) as process:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.startswith(b"taking"):
                    taken += int(line.split()[1])
                    self.begun.set()
                    if 0 < kill_after <= taken and self.is_alive:
                        process.kill()
                elif line == b"settled\n":
                    self.settled.set()
                elif line.endswith(b"\n"):
                    self.stands = json.loads(line)
            status = await process.wait()
        assert status in (0, -signal.SIGKILL), f"{self.name}: status {status}\n{self.log()[-5000:]}"
        self.kills += status != 0
        return status == 0

    @asynccontextmanager
    async def _started(self, url: str, die_after: int) -> AsyncIterator[asyncio.subprocess.Process]:
        numbers = map(str, (self._seed, self.kills, self._events, die_after))
        arguments = (client_worker.__file__, url, str(self.store), self.name, *numbers, *self.partitions)
        self.begun.clear()
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            limit=2**24,
        )
        try:
            if self._end and process.stdin is not None:
                process.stdin.write(self._end)
            yield process
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
            await process.wait()
            self.settled.clear()
            self.begun.set()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        """One that is alive; returns when it is not any more."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def come_to(self, committed_id: int) -> None:
        """When it has been given everything up to this number, it ends: in this life, or in the next if it is dying."""
        self._end = b"%d\n" % committed_id
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(self._end)

    # --- what is left of it

    def log(self) -> str:
        """Of all its lives."""
        return Path(f"{self.store}-log").read_text()

    def accepted(self) -> list[str]:
        """The ids that its outbox has accepted, in order."""
        return Path(f"{self.store}-notes").read_text().splitlines()

    def outbox(self) -> list[str]:
        """The ids that have no outcome."""
        return [id for (id,) in self._rows("SELECT id FROM oncelog_client_outbox")]  # noqa: A001 - its name on the wire

    def given(self) -> list[Row]:
        """All that it was given, in the order in which it was."""
        return [
            Row(number, id, client_id, tuple(json.loads(partitions)), json.loads(body), at_ms)
            for _, number, id, client_id, partitions, body, at_ms in self._rows("SELECT * FROM given ORDER BY place")  # noqa: A001
        ]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.store)) as connection:
            return connection.execute(query).fetchall()


def log_of(store: str) -> list[Row]:
    """All there is in the server's log."""
    with oncelog.open_blocking(store) as log:
        page = log.read()
        records = page.records
        while page.has_more:
            page = log.read(after=page.cursor, upto=page.upto)
            records += page.records
    return [
        Row(one.position, str(UUID(bytes=one.key)), one.client, one.partitions, json.loads(one.body), one.log_time_ms)
        for one in records
    ]


def of_partitions(log: Sequence[Row], partitions: Sequence[str]) -> list[Row]:
    return [row for row in log if not set(partitions).isdisjoint(row.partitions)]


def demand_outcomes(application: Application, plan: Sequence[Planned], log: Sequence[Row]) -> None:
    """All of its submissions were accepted; some are rejected, as they must be, the others committed in that order."""
    accepted = application.accepted()
    assert set(accepted) == {one.id for one in plan}
    in_order = [one.id for one in plan if raced(one.id) is None]
    assert [id for id in accepted if raced(id) is None] == in_order  # noqa: A001 - as above
    assert application.outbox() == []
    assert application.stands["pending"] == 0
    rejected = {one.id for one in plan if one.expected_committed_id is not None}
    assert {id for id, _ in application.stands["rejected"]} == rejected  # noqa: A001 - as above
    assert {reason for _, reason in application.stands["rejected"]} <= {"validation_failed"}
    assert set(accepted) - rejected == set(accepted) & {row.id for row in log}
    shared = {one.id for one in plan if one.is_shared}
    own = [id for id in in_order if id not in rejected | shared]  # noqa: A001 - as above
    assert [row.id for row in log if row.id in set(own)] == own
    assert {row.client_id for row in log if row.id in set(accepted) - shared} <= {application.name}


def demand_given(application: Application, log: Sequence[Row], shared: frozenset[str] = frozenset()) -> None:
    """It was given what the log has in its partitions, in that order, each once, as it is in the log."""
    assert application.stands["set_aside"] == []
    assert "ERROR" not in application.log()

    def comparable(row: Row) -> Row:
        # Of what several have submitted each takes itself for who did it.
        return row._replace(client_id="") if row.id in shared else row

    given = [comparable(row) for row in application.given()]
    expected = [comparable(row) for row in of_partitions(log, application.partitions)]
    numbers = [row.committed_id for row in given]
    missing = [row for row in expected if row.committed_id not in set(numbers)]
    assert missing == [], f"{application.name} was not given {len(missing)} of {len(expected)}"
    assert numbers == sorted(set(numbers)), f"{application.name} was given events twice, or not in their order"
    assert given == expected
