"""Applications that are killed and restarted. Each is a process with a client and a durable store."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import oncelog
from cli.server_process import ENVIRONMENT
from crash import client_worker
from crash.client_load import Planned, get_race_number
from scripts import RUN


class Row(NamedTuple):
    """An event, either stored in the log or received by an application."""

    committed_id: int
    id: str
    client_id: str
    partitions: tuple[str, ...]
    event: Any
    at_ms: int


class PlannedKill(NamedTuple):
    """The point at which an application kills itself, inside a transaction that delivers events to the application."""

    after: int = 0
    """Number of the event, counted from the start of the process. 0 means that the process does not kill itself."""
    before: str = ""
    """First word of the statement before which the process dies. An empty text means that it dies at the event."""


DEATHS = ("", "RELEASE", "UPDATE")
"""Values of `PlannedKill.before`: statements before which an application can kill itself."""
SURVIVES = PlannedKill()


class Application:
    """A series of `client_worker` processes on one store."""

    def __init__(self, directory: Path, name: str, seed: int, events: int, partitions: Sequence[str]) -> None:
        self.store = directory / f"{name}.db"
        self.name = name
        self.partitions = partitions
        self.kills = 0
        self.begun = asyncio.Event()
        """Set when the current process has received an event or has ended."""
        self.settled = asyncio.Event()
        """Set when the process has reported outcomes for all submissions. The process then waits for `finish_at`."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.stands: dict[str, Any] = {}
        """The report printed by the last process."""
        self._seed = seed
        self._events = events
        self._process: asyncio.subprocess.Process | None = None
        self._end = b""
        """The input line with the last event to wait for, once known."""

    async def live(self, url: str, deaths: Iterator[PlannedKill]) -> None:
        """Start processes one after another until one exits normally."""
        while not await self.live_once(url, next(deaths)):
            await self.may_start.wait()

    async def live_once(self, url: str, death: PlannedKill = SURVIVES, *, kill_after: int = 0) -> bool:
        """Run one process. Return True if it exited normally and False if it was killed.

        It kills itself as defined by `death`, or is killed as soon as it reports receiving event number
        `kill_after`.
        """
        taken = 0
        async with self._started(url, death) as process:
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
    async def _started(self, url: str, death: PlannedKill) -> AsyncIterator[asyncio.subprocess.Process]:
        numbers = map(str, (self._seed, self.kills, self._events, death.after))
        arguments = (client_worker.__file__, url, str(self.store), self.name, *numbers, death.before, *self.partitions)
        self.begun.clear()
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUN, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
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
        """Kill the running process and wait until it has exited."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def finish_at(self, committed_id: int) -> None:
        """Let the application exit once it has received all events up to this one, even after a restart."""
        self._end = b"%d\n" % committed_id
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(self._end)

    # --- files

    def log(self) -> str:
        """Return the log output of all processes."""
        return Path(f"{self.store}-log").read_text()

    def accepted(self) -> list[str]:
        """Return the ids that the outbox has accepted, in order."""
        return Path(f"{self.store}-notes").read_text().splitlines()

    def outbox(self) -> list[str]:
        """Return the ids that have no outcome yet."""
        return [id for (id,) in self._rows("SELECT id FROM oncelog_client_outbox")]  # noqa: A001 - its name on the wire

    def given(self) -> list[Row]:
        """Return all received events in order of delivery."""
        return [
            Row(number, id, client_id, tuple(json.loads(partitions)), json.loads(body), at_ms)
            for _, number, id, client_id, partitions, body, at_ms in self._rows("SELECT * FROM given ORDER BY place")  # noqa: A001
        ]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.store)) as connection:
            return connection.execute(query).fetchall()


def read_log(store: str) -> list[Row]:
    """Return all events of the server's log."""
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


def select_partitions(log: Sequence[Row], partitions: Sequence[str]) -> list[Row]:
    return [row for row in log if not set(partitions).isdisjoint(row.partitions)]


def check_outcomes(application: Application, plan: Sequence[Planned], log: Sequence[Row]) -> None:
    """Assert that all submissions were accepted, stale ones rejected, and the others committed in order."""
    accepted = application.accepted()
    assert set(accepted) == {one.id for one in plan}
    in_order = [one.id for one in plan if get_race_number(one.id) is None]
    assert [id for id in accepted if get_race_number(id) is None] == in_order  # noqa: A001 - as above
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


def check_received(application: Application, log: Sequence[Row], shared: frozenset[str] = frozenset()) -> None:
    """Assert that the application received each event of its partitions once, in the log's order and unchanged."""
    assert application.stands["set_aside"] == []
    assert "ERROR" not in application.log()

    def comparable(row: Row) -> Row:
        # Each client considers itself the author of an event that several clients submitted.
        return row._replace(client_id="") if row.id in shared else row

    given = [comparable(row) for row in application.given()]
    expected = [comparable(row) for row in select_partitions(log, application.partitions)]
    numbers = [row.committed_id for row in given]
    missing = [row for row in expected if row.committed_id not in set(numbers)]
    assert missing == [], f"{application.name} did not receive {len(missing)} of {len(expected)}"
    assert numbers == sorted(set(numbers)), f"{application.name} received events twice or out of order"
    assert given == expected
