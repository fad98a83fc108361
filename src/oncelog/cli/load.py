"""`oncelog load`: a quick load test of a server that runs, which also sees that retries commit nothing."""

import asyncio
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import msgspec
import typer
from msgspec import Struct

from oncelog.cli.remote import (
    DEFAULT_URL,
    ClientId,
    Connection,
    Remote,
    Token,
    TokenFile,
    Url,
    as_foreign,
    client_of,
    connect,
    pauses_s,
    refused_by,
    remote_of,
)
from oncelog.cli.terminal import FOUND_NOTHING, AsJson, ending_well, print_json
from oncelog.client.words import Message
from oncelog.errors import LostError, OncelogError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

PREFIX: Final = "load/"
SIZE_BYTES_MIN: Final = 64
GRACE_S: Final = 10.0
"""How long, after the time is over, answers are waited for. What has none by then is lost."""
PAUSE_S_MAX: Final = 1.0
"""Between attempts: a load test is not polite."""
LOST: Final = "connection_lost"
PROBLEMS_TOLD_MAX: Final = 10


def load(  # noqa: PLR0913, PLR0917 - each one is an option
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
    client_id: ClientId = None,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="WebSockets at a time.")] = 16,
    in_flight: Annotated[int, typer.Option(min=1, max=1000, help="Requests of one connection without answer.")] = 16,
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events of one request.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="For how long.")] = 10.0,
    size: Annotated[int, typer.Option(min=SIZE_BYTES_MIN, max=1_000_000, help="Bytes of one event.")] = 300,
    partitions: Annotated[int, typer.Option(min=1, max=1_000_000, help="Over how many they are spread.")] = 100,
    retries: Annotated[
        float, typer.Option(metavar="PERCENT", min=0, max=100, help="How many events are sent a second time.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Keeps a server busy for a while and says how it did. This writes real events, into partitions load/0, load/1, ….

    Some events are sent twice, and must get the same committed_id again. The exit status is 1 if one got another, if
    two events got the same, or if any was rejected or never answered.

    Example:  oncelog load --connections 4 --seconds 5
    """
    with ending_well():
        remote = remote_of(url, token, token_file)
        plan = _Plan(connections, in_flight, batch, seconds, size, partitions, retries)
        said = f"This writes real events into {remote.url}, in the partitions {PREFIX}0 to {PREFIX}{partitions - 1}."
        typer.echo(said, err=True)
        tally = asyncio.run(_run(remote, client_of(client_id, "load"), plan))
        if as_json:
            print_json({"url": remote.url, **msgspec.structs.asdict(plan), **tally.figures()})
        else:
            typer.echo("\n".join(_lines(tally.figures())))
        if tally.is_wrong:
            raise typer.Exit(FOUND_NOTHING)


class _Plan(Struct, frozen=True):
    connections: int
    in_flight: int
    batch: int
    seconds: float
    size: int
    partitions: int
    retries: float


class _Event(Struct):
    id: str
    text: bytes
    committed_id: int = 0


# --- what was seen ----------------------------------------------------------------------------------------


class _Tally:
    """All that is counted."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.took_s = 0.0
        self.committed = 0
        self.retried = 0
        self.waited_s = array("d")
        """Of every request that was answered at once, without its retries."""
        self.errors: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.lost = 0
        self.differing = 0
        self.problems: list[str] = []
        self._numbers_before: int | None = None
        self._is_taken = bytearray()

    @property
    def is_wrong(self) -> bool:
        return bool(self.lost or self.differing or self.rejected)

    def start(self, last_committed_id: int) -> None:
        """New events have numbers above this one."""
        if self._numbers_before is None:
            self._numbers_before = last_committed_id

    def commit(self, event: _Event, committed_id: int) -> None:
        """An event has its number. A number has one event, and an event one number."""
        if event.committed_id:
            self.retried += 1
            if event.committed_id != committed_id:
                self.differ(f"{event.id} is {event.committed_id}, and at a retry {committed_id}")
            return
        event.committed_id = committed_id
        self.committed += 1
        place = committed_id - (self._numbers_before or 0) - 1
        if place < 0:
            self.differ(f"{event.id} is {committed_id}, which was taken before it was sent")
            return
        if place >= len(self._is_taken):
            self._is_taken.extend(bytes(place + 65_536 - len(self._is_taken)))
        if self._is_taken[place]:
            self.differ(f"{committed_id} is the committed_id of {event.id} and of another event")
        self._is_taken[place] = 1

    def differ(self, problem: str) -> None:
        """A number is not what it must be."""
        self.differing += 1
        self.tell(problem)

    def tell(self, problem: str) -> None:
        """Keeps what went wrong, the first few."""
        if len(self.problems) < PROBLEMS_TOLD_MAX:
            self.problems.append(problem)

    def figures(self) -> dict[str, Any]:
        """For machines."""
        seconds = self.took_s or time.perf_counter() - self.began_s
        ordered = sorted(self.waited_s)
        return {
            "took_s": round(seconds, 3),
            "events": self.committed,
            "events_per_s": round(self.committed / seconds, 1) if seconds else 0.0,
            "latency_ms": {
                name: round(1000 * _percentile(ordered, share), 2)
                for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
            },
            "retried": self.retried,
            "differing": self.differing,
            "rejected": dict(self.rejected),
            "lost": self.lost,
            "errors": dict(self.errors),
            "problems": self.problems,
        }


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


def _lines(figures: dict[str, Any]) -> list[str]:
    latency = figures["latency_ms"]
    counted = {**figures["rejected"], **figures["errors"]}
    return [
        f"{figures['events']} events in {figures['took_s']:.1f} s: {figures['events_per_s']:.0f} events/s",
        "latency: " + ", ".join(f"{name} {latency[name]:.1f} ms" for name in latency),
        f"retries: {figures['retried']} sent a second time, {figures['differing']} with another number",
        f"lost: {figures['lost']}",
        "errors: " + (", ".join(f"{count} {code}" for code, count in counted.items()) or "none"),
        *(f"wrong: {problem}" for problem in figures["problems"]),
    ]


# --- one connection ---------------------------------------------------------------------------------------


class _Result(Struct, frozen=True):
    id: str
    status: str
    committed_id: int = 0
    reason: str = ""


class _Results(Struct, frozen=True):
    results: list[_Result]


_RESULTS: Final = msgspec.json.Decoder(_Results)


class _Worker:
    """A connection with several requests in flight. If it is lost they are sent again on the next one."""

    def __init__(
        self, session: "aiohttp.ClientSession", remote: Remote, client_id: str, plan: _Plan, tally: _Tally
    ) -> None:
        self._session = session
        self._remote = remote
        self._plan = plan
        self._tally = tally
        self._connection: Connection | None = None
        self._is_there = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._requests = 0
        self._made = 0
        self._owed = 0.0
        self._client_id = client_id
        self._filler = b"x" * plan.size

    async def run(self, until_s: float) -> None:
        """Submits until then. Raises OncelogError if the server cannot be reached at first, or lets us not in."""
        connection = await connect(self._session, self._remote, self._client_id)
        self._tally.start(connection.last_committed_id)
        reading = asyncio.create_task(self._read_all(connection))
        slots = asyncio.gather(*(self._slot(until_s) for _ in range(self._plan.in_flight)))
        try:
            both: list[asyncio.Future[Any]] = [reading, slots]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
            await slots
        finally:
            slots.cancel()
            reading.cancel()
            await asyncio.gather(slots, reading, return_exceptions=True)

    async def _read_all(self, connection: Connection) -> None:
        """Hands answers to those who wait for them, over as many connections as it takes."""
        while True:
            async with connection:
                self._connection = connection
                self._is_there.set()
                try:
                    while True:
                        message = await connection.receive()
                        number = message.msg_id
                        waiting = self._waiting.pop(number, None) if isinstance(number, int) else None
                        if waiting is not None and not waiting.done():
                            waiting.set_result(message)
                except (LostError, ServerRefusedError) as error:
                    if isinstance(error, ServerRefusedError) and not error.is_transient:
                        raise
                    self._fail_all(error)
            connection = await self._connected_again()

    def _fail_all(self, error: OncelogError) -> None:
        self._is_there.clear()
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.done():
                one.set_exception(LostError(str(error)))

    async def _connected_again(self) -> Connection:
        for pause_s in pauses_s():
            try:
                return await connect(self._session, self._remote, self._client_id)
            except (LostError, ServerRefusedError) as error:
                if isinstance(error, ServerRefusedError) and not error.is_transient:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("there is always another pause")

    async def _slot(self, until_s: float) -> None:
        """One request after the other."""
        while time.perf_counter() < until_s:
            events = [self._event() for _ in range(self._plan.batch)]
            chosen = [event for event in events if self._is_chosen()]
            deadline_s = until_s + GRACE_S
            if chosen and self._requests % 2:
                # A retry of one whose answer is still on its way, and below one of an answer that has come.
                await asyncio.gather(self._submit(events, deadline_s), self._submit(chosen, deadline_s))
            else:
                await self._submit(events, deadline_s)
                if chosen:
                    await self._submit(chosen, deadline_s)

    def _is_chosen(self) -> bool:
        self._owed += self._plan.retries / 100
        if self._owed < 1:
            return False
        self._owed -= 1
        return True

    def _event(self) -> _Event:
        self._made += 1
        id_text = str(uuid4())
        head = b'{"type":"load","n":%d,"filler":"' % self._made
        event = head + self._filler[: max(0, self._plan.size - len(head) - 2)] + b'"}'
        partition = f"{PREFIX}{self._made % self._plan.partitions}".encode()
        return _Event(id_text, b'{"id":"%b","partitions":["%b"],"event":%b}' % (id_text.encode(), partition, event))

    async def _submit(self, events: Sequence[_Event], deadline_s: float) -> None:
        """Until there is an answer, or the time is over."""
        payload = b'{"events":[%b]}' % b",".join(event.text for event in events)
        is_first = True
        heard = "no answer"
        for pause_s in pauses_s(PAUSE_S_MAX):
            sent_s = time.perf_counter()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - sent_s)):
                    message = await self._ask(payload)
            except LostError:
                self._tally.errors[LOST] += 1
            except TimeoutError:
                self._lose(events, heard)
                return
            except ServerRefusedError as error:
                self._tally.errors[error.code] += 1
                heard = f"no answer but {error}"
                if not error.is_transient:
                    self._lose(events, heard)
                    return
            else:
                if is_first and not events[0].committed_id:
                    self._tally.waited_s.append(time.perf_counter() - sent_s)
                self._take(events, message)
                return
            is_first = False
            await asyncio.sleep(pause_s)

    def _lose(self, events: Sequence[_Event], heard: str) -> None:
        self._tally.lost += len(events)
        self._tally.tell(f"{events[0].id} has {heard}")

    async def _ask(self, payload: bytes) -> Message:
        await self._is_there.wait()
        assert self._connection is not None  # noqa: S101 - it is there
        self._requests += 1
        number = self._requests
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            await self._connection.send("submit_events", payload, number)
            message: Message = await waiting
        finally:
            self._waiting.pop(number, None)
        if message.type == "error":
            with as_foreign(self._remote):
                raise refused_by(message.payload)
        return message

    def _take(self, events: Sequence[_Event], message: Message) -> None:
        with as_foreign(self._remote):
            results = _RESULTS.decode(message.payload).results
        if [result.id for result in results] != [event.id for event in events]:
            self._tally.differ(f"the results of {events[0].id} and those after it are of other events")
            return
        for event, result in zip(events, results, strict=True):
            if result.status == "committed":
                self._tally.commit(event, result.committed_id)
            else:
                self._tally.rejected[result.reason] += 1
                self._tally.tell(f"{event.id} was rejected: {result.reason}")


# --- all of them ------------------------------------------------------------------------------------------


async def _run(remote: Remote, client_id: str, plan: _Plan) -> _Tally:
    import aiohttp  # noqa: PLC0415 - what the library alone does not need

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        tally = _Tally()
        workers = [_Worker(session, remote, client_id, plan, tally) for _ in range(plan.connections)]
        async with _shown(tally, plan.seconds):
            running = [asyncio.create_task(worker.run(tally.began_s + plan.seconds)) for worker in workers]
            try:
                await asyncio.gather(*running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        tally.took_s = time.perf_counter() - tally.began_s
    return tally


@asynccontextmanager
async def _shown(tally: _Tally, seconds: float) -> AsyncIterator[None]:
    """How it goes: a live display on a terminal, otherwise a line a second."""
    if sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 - takes its time, and typer brings it
        from rich.live import Live  # noqa: PLC0415

        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            show: Callable[[str], None] = lambda line: live.update(line, refresh=True)  # noqa: E731
            async with _telling(tally, seconds, 0.25, show):
                yield
    else:
        async with _telling(tally, seconds, 1.0, lambda line: typer.echo(line, err=True)):
            yield


@asynccontextmanager
async def _telling(tally: _Tally, seconds: float, every_s: float, show: Callable[[str], None]) -> AsyncIterator[None]:
    async def tell() -> None:
        before, before_s = 0, tally.began_s
        while True:
            await asyncio.sleep(every_s)
            now_s, committed = time.perf_counter(), tally.committed
            rate = (committed - before) / (now_s - before_s)
            recent = sorted(tally.waited_s[-2000:])
            show(
                f"{now_s - tally.began_s:5.1f} of {seconds:g} s  {committed:>9} events  {rate:>7.0f}/s  "
                f"p50 {1000 * _percentile(recent, 0.5):.1f} ms  p99 {1000 * _percentile(recent, 0.99):.1f} ms  "
                f"errors {sum(tally.errors.values())}"
            )
            before, before_s = committed, now_s

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
