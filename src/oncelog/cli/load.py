"""`oncelog load`: run a quick load test against a server, and check that retries do not commit again."""

import asyncio
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final
from uuid import uuid4

import msgspec
import typer
from msgspec import Struct

from oncelog.cli.output import print_result
from oncelog.cli.remote import (
    ClientId,
    EventsConnection,
    GaveUpError,
    Retrier,
    check_client_id,
    connect,
    decode_refusal,
    open_client,
    translate_decode_errors,
)
from oncelog.cli.server_options import Remote, uses_explicit_server_as_client
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson
from oncelog.client.events.codec import Envelope, decode_results, encode_message
from oncelog.client.runtime.backoff import run_until_first_ends
from oncelog.client.runtime.http import HttpClient
from oncelog.errors import LostError, OncelogError, ServerRefusedError

PREFIX: Final = "load/"
SIZE_BYTES_MIN: Final = 64
GRACE_S: Final = 10.0
"""How long the command waits for outstanding answers after the test. Events that are still unanswered count as lost."""
PROBLEMS_SHOWN_MAX: Final = 10


@uses_explicit_server_as_client
def load(  # noqa: PLR0913 - one argument per option
    *,
    remote: Remote,
    client_id: ClientId = None,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="Number of WebSocket connections.")] = 16,
    in_flight: Annotated[int, typer.Option(min=1, max=1000, help="Concurrent requests per connection.")] = 16,
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events per request.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="Duration of the test.")] = 10.0,
    size: Annotated[int, typer.Option(min=SIZE_BYTES_MIN, max=1_000_000, help="Size of each event in bytes.")] = 300,
    partitions: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of partitions.")] = 100,
    retries: Annotated[
        float, typer.Option(metavar="PERCENT", min=0, max=100, help="Percentage of events to send twice.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Run a load test against a server and print the results.

    It writes real events into the partitions load/0, load/1, …. They remain in the log, so only --url or --profile
    selects a server other than the one at http://127.0.0.1:7171.

    Some events are sent twice and must get the same committed_id both times. The exit status is 1 if an event gets two
    different ids, if two events get the same id, or if an event is rejected or never answered.

    Example:  oncelog load --connections 4 --seconds 5
    """
    plan = _LoadPlan(connections, in_flight, batch, seconds, size, partitions, retries)
    warning = f"Writing real events to {remote.url}, into the partitions {PREFIX}0 to {PREFIX}{partitions - 1}."
    typer.echo(warning, err=True)
    tally = asyncio.run(_run_load(remote, check_client_id(client_id), plan))
    figures = tally.to_json()
    print_result({"url": remote.url, **msgspec.structs.asdict(plan), **figures}, _format_figures(figures), as_json)
    if tally.lost or tally.differing or tally.rejected:
        raise typer.Exit(EXIT_FOUND_NOTHING)


class _LoadPlan(Struct, frozen=True):
    connections: int
    in_flight: int
    batch: int
    seconds: float
    size: int
    partitions: int
    retries: float


class _SentEvent(Struct):
    id: str
    text: bytes
    committed_id: int = 0


# --- figures ----------------------------------------------------------------------------------------------


class _Tally:
    """Counters of a load test."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.took_s = 0.0
        self.committed = 0
        self.retried = 0
        self.latencies_s = array("d")
        """Latency of each request that needed no retry."""
        self.errors: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.lost = 0
        self.differing = 0
        self.problems: list[str] = []
        self._last_id_before: int | None = None
        self._used_ids: set[int] = set()

    def start(self, last_committed_id: int) -> None:
        """Record the last committed_id before the test. All new events get higher ones."""
        if self._last_id_before is None:
            self._last_id_before = last_committed_id

    def commit(self, event: _SentEvent, committed_id: int) -> None:
        """Count a committed event, and check that its committed_id belongs to this event only and never changes."""
        if event.committed_id:
            self.retried += 1
            if event.committed_id != committed_id:
                self.count_difference(
                    f"{event.id} got committed_id {event.committed_id}, but {committed_id} after a retry"
                )
            return
        event.committed_id = committed_id
        self.committed += 1
        if committed_id <= (self._last_id_before or 0):
            self.count_difference(f"{event.id} got committed_id {committed_id}, which was used before the test")
        elif committed_id in self._used_ids:
            self.count_difference(f"committed_id {committed_id} was given to {event.id} and to another event")
        self._used_ids.add(committed_id)

    def count_difference(self, problem: str) -> None:
        """Count a wrong committed_id or result."""
        self.differing += 1
        self.note_problem(problem)

    def note_problem(self, problem: str) -> None:
        """Keep the descriptions of the first few problems."""
        if len(self.problems) < PROBLEMS_SHOWN_MAX:
            self.problems.append(problem)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        seconds = self.took_s or time.perf_counter() - self.started_s
        ordered = sorted(self.latencies_s)
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


def _format_figures(figures: dict[str, Any]) -> list[str]:
    latency = figures["latency_ms"]
    counted = {**figures["rejected"], **figures["errors"]}
    return [
        f"{figures['events']} events in {figures['took_s']:.1f} s: {figures['events_per_s']:.0f} events/s",
        "latency: " + ", ".join(f"{name} {latency[name]:.1f} ms" for name in latency),
        f"retries: {figures['retried']} sent a second time, {figures['differing']} with a different committed_id",
        f"lost: {figures['lost']}",
        "errors: " + (", ".join(f"{count} {code}" for code, count in counted.items()) or "none"),
        *(f"wrong: {problem}" for problem in figures["problems"]),
    ]


# --- one connection ---------------------------------------------------------------------------------------


class _Worker:
    """A connection with several requests in flight.

    After reconnecting, the worker resends the unanswered requests.
    """

    def __init__(
        self, client: HttpClient, remote: Remote, client_id: str | None, plan: _LoadPlan, tally: _Tally
    ) -> None:
        self._client = client
        self._remote = remote
        self._plan = plan
        self._tally = tally
        self._retrier = Retrier(remote, on_problem=self._check_problem)
        self._connection: EventsConnection | None = None
        self._is_connected = asyncio.Event()
        self._pending: dict[str | int | None, asyncio.Future[Envelope]] = {}
        self._requests = 0
        self._event_count = 0
        self._retries_due = 0.0
        self._client_id = client_id

    async def run(self, until_s: float) -> None:
        """Submit events until `until_s`. Raises OncelogError if the first connection fails or the server refuses it."""
        slots = asyncio.gather(*(self._run_slot(until_s) for _ in range(self._plan.in_flight)))
        await run_until_first_ends([self._retrier.run(self._run_connection), slots])

    async def _run_connection(self) -> None:
        """Open a connection and pass each answer to its request. Always raises an error; the worker then reconnects."""
        async with connect(self._client, self._remote, self._client_id) as connection:
            self._retrier.mark_connected()
            self._tally.start(connection.hello.server_last_committed_id)
            self._connection = connection
            self._is_connected.set()
            try:
                while True:
                    message = await connection.receive()
                    reply = self._pending.pop(message.msg_id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(message)
            except (LostError, ServerRefusedError) as error:
                self._is_connected.clear()
                for reply in self._pending.values():
                    if not reply.done():
                        reply.set_exception(LostError(str(error)))
                raise

    def _check_problem(self, problem: OncelogError) -> None:
        if self._connection is None:
            raise problem  # the first connection is not retried

    async def _run_slot(self, until_s: float) -> None:
        """Submit one request after another until `until_s`."""
        await self._is_connected.wait()
        while time.perf_counter() < until_s:
            events = [self._build_event() for _ in range(self._plan.batch)]
            chosen = [event for event in events if self._should_retry()]
            deadline_s = until_s + GRACE_S
            if chosen and self._requests % 2:
                # Retry before the first answer arrives; the other branch retries after it.
                await asyncio.gather(self._submit(events, deadline_s), self._submit(chosen, deadline_s))
            else:
                await self._submit(events, deadline_s)
                if chosen:
                    await self._submit(chosen, deadline_s)

    def _should_retry(self) -> bool:
        self._retries_due += self._plan.retries / 100
        if self._retries_due < 1:
            return False
        self._retries_due -= 1
        return True

    def _build_event(self) -> _SentEvent:
        self._event_count += 1
        id_text = str(uuid4())
        head = b'{"type":"load","n":%d,"filler":"' % self._event_count
        event = head + b"x" * (self._plan.size - len(head) - 2) + b'"}'
        partition = f"{PREFIX}{self._event_count % self._plan.partitions}".encode()
        return _SentEvent(id_text, b'{"id":"%b","partitions":["%b"],"event":%b}' % (id_text.encode(), partition, event))

    async def _submit(self, events: Sequence[_SentEvent], deadline_s: float) -> None:
        """Submit events until they are answered or the deadline passes."""
        payload = b'{"events":[%b]}' % b",".join(event.text for event in events)
        outcome = "got no answer"

        async def request() -> Envelope:
            nonlocal outcome
            try:
                return await self._request(payload)
            except ServerRefusedError as error:
                self._tally.errors[error.code] += 1
                outcome = f"was not committed: {error}"
                raise
            except LostError:
                self._tally.errors["connection_lost"] += 1
                raise

        sent_s = time.perf_counter()
        retrier = Retrier(self._remote, max(0.0, deadline_s - sent_s), on_problem=lambda _: None)
        try:
            message = await retrier.run(request)
        except (GaveUpError, ServerRefusedError):
            self._tally.lost += len(events)
            self._tally.note_problem(f"{events[0].id} {outcome}")
        else:
            if not retrier.has_retried and not events[0].committed_id:
                self._tally.latencies_s.append(time.perf_counter() - sent_s)
            self._handle_results(events, message)

    async def _request(self, payload: bytes) -> Envelope:
        await self._is_connected.wait()
        assert self._connection is not None  # noqa: S101 - set with the event
        self._requests += 1
        msg_id = str(self._requests)
        reply = asyncio.get_running_loop().create_future()
        self._pending[msg_id] = reply
        try:
            await self._connection.socket.send(encode_message("submit_events", payload, msg_id))
            message: Envelope = await reply
        finally:
            self._pending.pop(msg_id, None)
        if message.type == "error":
            with translate_decode_errors(self._remote):
                raise decode_refusal(message.payload)
        return message

    def _handle_results(self, events: Sequence[_SentEvent], message: Envelope) -> None:
        with translate_decode_errors(self._remote):
            results = decode_results(message.payload).results
        if [result.id for result in results] != [event.id for event in events]:
            self._tally.count_difference(
                f"the results for the request that starts with {events[0].id} are for other events"
            )
            return
        for event, result in zip(events, results, strict=True):
            if result.status == "committed":
                self._tally.commit(event, result.committed_id)
            else:
                self._tally.rejected[result.reason] += 1
                self._tally.note_problem(f"{event.id} was rejected: {result.reason}")


# --- load test --------------------------------------------------------------------------------------------


async def _run_load(remote: Remote, client_id: str | None, plan: _LoadPlan) -> _Tally:
    tally = _Tally()

    async def run_worker() -> None:
        async with open_client(remote) as client:
            await _Worker(client, remote, client_id, plan, tally).run(tally.started_s + plan.seconds)

    with _open_display() as (every_s, show):
        workers = asyncio.gather(*(run_worker() for _ in range(plan.connections)))
        await run_until_first_ends([workers, _report_progress(tally, plan.seconds, every_s, show)])
    tally.took_s = time.perf_counter() - tally.started_s
    return tally


@contextmanager
def _open_display() -> Iterator[tuple[float, Callable[[str], None]]]:
    """Yield the interval between reports, and a function that shows one in a live display or as a line."""
    if not sys.stderr.isatty():
        yield 1.0, partial(typer.echo, err=True)
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import; typer depends on it
    from rich.live import Live  # noqa: PLC0415

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield 0.25, lambda line: live.update(line, refresh=True)


async def _report_progress(tally: _Tally, seconds: float, every_s: float, show: Callable[[str], None]) -> None:
    before, before_s = 0, tally.started_s
    while True:
        await asyncio.sleep(every_s)
        now_s, committed = time.perf_counter(), tally.committed
        rate = (committed - before) / (now_s - before_s)
        recent = sorted(tally.latencies_s[-2000:])
        show(
            f"{now_s - tally.started_s:5.1f} of {seconds:g} s  {committed:>9} events  {rate:>7.0f}/s  "
            f"p50 {1000 * _percentile(recent, 0.5):.1f} ms  p99 {1000 * _percentile(recent, 0.99):.1f} ms  "
            f"errors {sum(tally.errors.values())}"
        )
        before, before_s = committed, now_s
