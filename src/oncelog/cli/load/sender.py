"""A connection of a load test, with several requests in flight."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from oncelog.cli.load.plan import LoadPlan, SentEvent
from oncelog.cli.load.tally import Tally
from oncelog.cli.remote import (
    EventsConnection,
    GaveUpError,
    Retrier,
    connect,
    decode_refusal,
    open_client,
    translate_decode_errors,
)
from oncelog.cli.server_options import Remote
from oncelog.client.events.codec import Envelope, decode_results, encode_message
from oncelog.client.runtime.backoff import run_until_first_ends
from oncelog.client.runtime.http import HttpClient
from oncelog.errors import LostError, OncelogError, ServerRefusedError


class Turn(Struct, frozen=True):
    """Permission to send one request."""

    start_s: float
    """When the request was due, from which its latency counts."""
    deadline_s: float
    """When the request is lost if it has no answer."""


class Sender:
    """A connection with several requests in flight.

    After reconnecting, the sender resends the unanswered requests.
    """

    def __init__(
        self,
        remote: Remote,
        client_id: str | None,
        plan: LoadPlan,
        tally: Tally,
        now_s: Callable[[], float],
        finish: Callable[[], None],
    ) -> None:
        """`finish` is called when a request has its final answer."""
        self._remote = remote
        self._client_id = client_id
        self._plan = plan
        self._tally = tally
        self._now_s = now_s
        self._finish = finish
        self._retrier = Retrier(remote, on_problem=self._check_problem)
        self._connection: EventsConnection | None = None
        self._is_connected = asyncio.Event()
        self._turns: asyncio.Queue[Turn] = asyncio.Queue()
        """Has at most as many turns as slots, because the pacer limits the requests in flight."""
        self._pending: dict[str | int | None, asyncio.Future[Envelope]] = {}
        self._requests = 0
        self._event_count = 0
        self._retries_due = 0.0

    async def run(self) -> None:
        """Connect, and send requests until cancelled.

        Raises OncelogError if the first connection fails or the server refuses it.
        """
        async with open_client(self._remote) as client:
            slots = asyncio.gather(*(self._run_slot() for _ in range(self._plan.in_flight)))
            await run_until_first_ends([self._retrier.run(partial(self._run_connection, client)), slots])

    async def wait_connected(self) -> None:
        """Wait until the server has admitted the connection."""
        await self._is_connected.wait()

    def send(self, turn: Turn) -> None:
        """Send a request. At most `plan.in_flight` requests may be in flight."""
        self._turns.put_nowait(turn)

    async def _run_connection(self, client: HttpClient) -> None:
        """Open a connection and pass each answer to its request. Always raises an error; the sender then reconnects."""
        async with connect(client, self._remote, self._client_id) as connection:
            self._retrier.mark_connected()
            self._tally.note_last_id(connection.hello.server_last_committed_id)
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

    async def _run_slot(self) -> None:
        """Send one request after another."""
        while True:
            turn = await self._turns.get()
            events = [self._build_event() for _ in range(self._plan.batch)]
            chosen = [event for event in events if self._should_retry()]
            if chosen and self._requests % 2:
                # Retry before the first answer arrives; the other branch retries after it.
                await asyncio.gather(self._submit_first(events, turn), self._submit(chosen, turn))
            else:
                await self._submit_first(events, turn)
                if chosen:
                    await self._submit(chosen, turn)
            self._finish()

    def _should_retry(self) -> bool:
        self._retries_due += self._plan.retries / 100
        if self._retries_due < 1:
            return False
        self._retries_due -= 1
        return True

    def _build_event(self) -> SentEvent:
        self._event_count += 1
        return self._plan.build_event(self._event_count)

    async def _submit_first(self, events: Sequence[SentEvent], turn: Turn) -> None:
        """Submit new events, and record the latency.

        In a closed loop, a request that was sent several times has no latency. In an open loop, its latency includes
        the pauses, because they delay the client for which the request stands.
        """
        was_answered_at_once = await self._submit(events, turn)
        if was_answered_at_once or (was_answered_at_once is not None and self._plan.rate is not None):
            self._tally.record_latency(self._now_s() - turn.start_s)

    async def _submit(self, events: Sequence[SentEvent], turn: Turn) -> bool | None:
        """Submit events until they are answered or the deadline passes.

        Return whether the first attempt was answered, or None if none was.
        """
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

        retrier = Retrier(self._remote, max(0.0, turn.deadline_s - self._now_s()), on_problem=lambda _: None)
        try:
            message = await retrier.run(request)
        except (GaveUpError, ServerRefusedError):
            self._tally.lost += len(events)
            self._tally.note_problem(f"{events[0].id} {outcome}")
            return None
        self._handle_results(events, message)
        return not retrier.has_retried

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

    def _handle_results(self, events: Sequence[SentEvent], message: Envelope) -> None:
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
