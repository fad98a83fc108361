"""The committer: natural group commit.

While one transaction is being made durable, submissions gather for the next; a lone one commits at once. No timer
decides anything. Equal submissions in flight wait for one outcome. When the queue is full, new writes are answered as
busy, and what is already known is still answered. If a batch fails for a reason that is not the store's, it is
divided until the one that is at fault fails alone.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct

from oncelog.core.plan import Validate, known_answer
from oncelog.core.shape import malformed
from oncelog.core.values import (
    Committed,
    Item,
    KeyIdentity,
    Reason,
    Refused,
    Remembered,
    Replayed,
    Request,
    Submission,
    Verdict,
    key_identity,
)
from oncelog.engine.cache import AnswerCache, CachedAnswer, is_certainly_remembered
from oncelog.engine.limits import Limits
from oncelog.errors import ClosedError, StoreError
from oncelog.stores.clock import Clock
from oncelog.stores.protocol import Decided, Store

logger: Final = logging.getLogger("oncelog.engine")

RETRY_AFTER_MS_MIN: Final = 10
PIPELINE_ITEMS: Final = 32
"""From so many on, the first batch after a pause is half of what waits: so there are two groups from then on, and while
one is being written, the answers of the other are worked on."""
TELL_WITHIN_S: Final = 0.005
"""How long answers wait at most for the next batch to be decided."""

Answers = asyncio.Future[list[Verdict]]


class _Waiting(Struct, eq=False, gc=False):
    """A request in the queue or in flight, and who waits for it."""

    request: Request
    answer: "asyncio.Future[Verdict] | None"
    """For an item that came alone."""
    answers: Answers | None
    """For several."""
    bytes: int
    identity: KeyIdentity | None = None
    """Of a submission that came alone: equal ones may join it."""
    joined: "Sequence[asyncio.Future[Verdict]]" = ()


class _Inquiry(Struct, eq=False, gc=False):
    """A submission that found the queue full: known, or busy?"""

    submission: Submission
    identity: KeyIdentity
    answer: "asyncio.Future[Verdict]"


class Committer:
    """One for a log in a process. Everything happens on the event loop's thread, but for the store's own work."""

    def __init__(
        self,
        store: Store,
        cache: AnswerCache,
        clock: Clock,
        limits: Limits,
        validate: Validate | None,
        on_commit: Callable[[Decided], None],
    ) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock
        self._limits = limits
        self._validate = None if validate is None else _never_raising(validate)
        self._on_commit = on_commit
        self._queue: deque[_Waiting] = deque()
        self._inquiries: deque[_Inquiry] = deque()
        self._in_flight: dict[KeyIdentity, _Waiting] = {}
        self._items_max = limits.queue_items_max
        self._bytes_max = limits.queue_bytes_max
        self._items = 0
        self._bytes = 0
        self._batch_ms = 0.0
        self._draining: asyncio.Task[None] | None = None
        self._told_later: deque[tuple[Sequence[_Waiting], Decided]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    def submit(self, item: Item) -> "Verdict | asyncio.Future[Verdict]":
        """What becomes of one item: at once if it is known, else when it is durable."""
        if self._is_closing:
            raise ClosedError("the log is closed")
        if not isinstance(item, Submission):
            return self._enqueue_one(item, None, 0)
        size = len(item.body)
        if size > self._limits.body_bytes_max:
            return self._too_large(size)
        if not item.key:
            return self._enqueue_one(item, None, size)
        identity = key_identity(item)
        answer = self._known(item, identity)
        if answer is not None:
            return answer
        if self._items and not self._has_room(size, 1):
            return self._inquire(item, identity)
        return self._enqueue_one(item, identity, size)

    def _known(self, item: Submission, identity: KeyIdentity) -> "Verdict | asyncio.Future[Verdict] | None":
        """From memory: what was answered before, or an equal submission's outcome that is on its way."""
        if identity in self._cache:
            # Who is no member must not learn that the id is known; and shape comes before everything.
            if item.policy.members_only or malformed(item) is not None:
                return None
            answer = self._cache.get(item.policy, identity, self._clock.wall_ms())
            return None if answer is None else known_answer(item, answer.remembered)
        in_flight = self._in_flight.get(identity)
        if in_flight is None or item.policy.members_only:  # who was a member then may not be one now
            return None
        if in_flight.request.items[0] == item and self._has_room(0, 1):
            return self._join(in_flight)
        return None

    async def submit_request(self, request: Request) -> list[Verdict]:
        """What becomes of several items that belong together."""
        if self._is_closing:
            raise ClosedError("the log is closed")
        if not request.items:
            return []
        if len(request.items) > self._limits.request_items_max:
            message = f"items must be at most {self._limits.request_items_max}, not {len(request.items)}"
            return [Refused(Reason.MALFORMED, message, "items")] * len(request.items)
        sizes = [len(item.body) for item in request.items if isinstance(item, Submission)]
        if max(sizes, default=0) > self._limits.body_bytes_max:
            return [self._too_large(max(sizes))] * len(request.items)
        if not self._has_room(sum(sizes), len(request.items)):
            return [self._busy()] * len(request.items)
        answers: Answers = asyncio.get_running_loop().create_future()
        self._enqueue(_Waiting(request, None, answers, sum(sizes)))
        return await answers

    async def close(self) -> None:
        """Takes nothing more, and returns when all that was accepted has its answer."""
        self._is_closing = True
        while self._draining is not None:
            await asyncio.wait([self._draining])

    # --- the queue

    def _too_large(self, size: int) -> Refused:
        limit = self._limits.body_bytes_max
        return Refused(Reason.MALFORMED, f"body must have at most {limit} bytes, not {size}", "body")

    def _has_room(self, size: int, items: int) -> bool:
        if not self._items:
            return True  # what is alone is never too much: its own limits have been checked
        return self._items + items <= self._items_max and self._bytes + size <= self._bytes_max

    def _enqueue_one(self, item: Item, identity: KeyIdentity | None, size: int) -> "Refused | asyncio.Future[Verdict]":
        if not self._has_room(size, 1):
            return self._busy()
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(Request((item,)), answer, None, size, identity)
        if identity is not None and identity not in self._in_flight:
            self._in_flight[identity] = waiting
        self._items += 1
        self._bytes += size
        self._queue.append(waiting)
        if self._draining is None:
            self._drain_soon()
        return answer

    def _enqueue(self, waiting: _Waiting) -> None:
        self._items += len(waiting.request.items)
        self._bytes += waiting.bytes
        self._queue.append(waiting)
        self._drain_soon()

    def _join(self, waiting: _Waiting) -> "asyncio.Future[Verdict]":
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        waiting.joined = [*waiting.joined, answer]
        self._items += 1
        return answer

    def _inquire(self, submission: Submission, identity: KeyIdentity) -> "Refused | asyncio.Future[Verdict]":
        """The queue is full. A retry of what is known is answered all the same."""
        is_full = len(self._inquiries) >= self._items_max
        if is_full or submission.policy.members_only or malformed(submission) is not None:
            return self._busy()
        inquiry = _Inquiry(submission, identity, asyncio.get_running_loop().create_future())
        self._inquiries.append(inquiry)
        self._drain_soon()
        return inquiry.answer

    def _busy(self) -> Refused:
        batches = 1 + self._items // self._limits.batch_items_max
        retry_after_ms = max(RETRY_AFTER_MS_MIN, round(batches * self._batch_ms))
        message = f"{self._items} writes wait for their commit; try again in {retry_after_ms} ms"
        return Refused(Reason.BUSY, message, retry_after_ms=retry_after_ms)

    # --- group commit

    def _drain_soon(self) -> None:
        if self._draining is None:
            # A task begins in the next turn of the loop: all that submit in this one come along.
            self._loop = asyncio.get_running_loop()
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            share = 2  # after a pause, see PIPELINE_ITEMS
            while self._queue or self._inquiries:
                if self._queue:
                    began = time.perf_counter()
                    await self._commit(self._take(share))
                    self._batch_ms = (time.perf_counter() - began) * 1000
                    share = 1
                if not self._queue:
                    self.tell()
                if self._inquiries:
                    await self._answer_inquiries()
        except BaseException:
            # Nobody goes on after this, so nobody may wait for it.
            self._fail(self._queue, _stopped())
            self._queue.clear()
            self._fail_inquiries(self._inquiries, _stopped())
            self._inquiries.clear()
            raise
        finally:
            self.tell()
            self._draining = None

    def _take(self, share: int) -> list[_Waiting]:
        """The next batch, in the order of arrival: all that waits, or a share of it."""
        batch: list[_Waiting] = []
        items = size = 0
        enough = len(self._queue) // share if len(self._queue) >= PIPELINE_ITEMS else len(self._queue)
        while len(batch) < enough:
            waiting = self._queue[0]
            items += len(waiting.request.items)
            size += waiting.bytes
            if batch and (items > self._limits.batch_items_max or size > self._limits.batch_bytes_max):
                break
            batch.append(self._queue.popleft())
        return batch

    async def _commit(self, batch: Sequence[_Waiting]) -> None:
        try:
            if self._told_later:
                # The store may have to wait for another process; those whose writes are durable must not.
                self._timer = asyncio.get_running_loop().call_later(TELL_WITHIN_S, self.tell)
            requests = [waiting.request for waiting in batch]
            decided = await self._store.commit(requests, self._validate, self._tell_soon)
        except (StoreError, ClosedError) as error:
            logger.warning("a batch of %d requests was not committed: %s", len(batch), error)
            self._fail(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the others anything
            if len(batch) == 1:
                logger.warning("a request was not committed: %s: %s", type(error).__name__, error)
                self._fail(batch, error)
            else:
                await self._divide(batch)
        except BaseException:
            self._fail(batch, _stopped())
            raise
        else:
            self._told_later.append((batch, decided))

    async def _divide(self, batch: Sequence[_Waiting]) -> None:
        """One of them is at fault, and the others must not pay for it."""
        middle = len(batch) // 2
        try:
            await self._commit(batch[:middle])
        except BaseException:
            self._fail(batch[middle:], _stopped())
            raise
        await self._commit(batch[middle:])

    # --- answers

    def _tell_soon(self) -> None:
        """Called by the store, in its own thread, when it has decided a batch and goes to the disk with it."""
        if self._told_later and self._loop is not None:
            self._loop.call_soon_threadsafe(self.tell)

    def tell(self) -> None:
        """Tells all that is durable.

        While the store decides the next batch it needs the interpreter, and while it writes it does not: then is the
        time to work on the answers of the last one.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._told_later:
            self._settle(*self._told_later.popleft())

    def _settle(self, batch: Sequence[_Waiting], decided: Decided) -> None:
        self._cache.put_all(decided)
        for waiting, verdicts in zip(batch, decided.verdicts, strict=True):
            self._leave(waiting)
            answer = waiting.answer
            if answer is None:
                if waiting.answers is not None and not waiting.answers.done():
                    waiting.answers.set_result(verdicts)
                continue
            verdict = verdicts[0]
            if isinstance(verdict, Replayed):
                self._remember(waiting, verdict)
            if not answer.done():
                answer.set_result(verdict)
            for joined in waiting.joined:
                if not joined.done():
                    joined.set_result(_as_retry(verdict))
        self._on_commit(decided)

    def _remember(self, waiting: _Waiting, verdict: Replayed) -> None:
        """An answer that came from the store: the next retry gets it from memory."""
        item = waiting.request.items[0]
        if waiting.identity is None or not isinstance(item, Submission) or item.policy.client_sequence:
            return
        if verdict.receipt is not None and not verdict.mismatch:
            remembered = Remembered(verdict.receipt, item.fingerprint, verdict.erased)
            self._cache.put(waiting.identity, CachedAnswer(remembered))

    def _fail(self, batch: Iterable[_Waiting], error: Exception) -> None:
        for waiting in batch:
            self._leave(waiting)
            for one in (waiting.answer, waiting.answers, *waiting.joined):
                if one is not None and not one.done():
                    one.set_exception(error)

    def _leave(self, waiting: _Waiting) -> None:
        self._items -= len(waiting.request.items) + len(waiting.joined)
        self._bytes -= waiting.bytes
        identity = waiting.identity
        if identity is not None and self._in_flight.get(identity) is waiting:
            del self._in_flight[identity]

    # --- while the queue is full

    async def _answer_inquiries(self) -> None:
        inquiries = [self._inquiries.popleft() for _ in range(min(len(self._inquiries), self._limits.batch_items_max))]
        try:
            remembered = await self._store.remembered([inquiry.identity for inquiry in inquiries])
        except Exception as error:  # noqa: BLE001 - the inquirers are told
            self._fail_inquiries(inquiries, error)
            return
        except BaseException:
            self._fail_inquiries(inquiries, _stopped())
            raise
        now_ms = max(self._clock.wall_ms(), self._cache.log_time_ms)
        for inquiry, known in zip(inquiries, remembered, strict=True):
            answer: Verdict = self._busy()
            if known is not None and is_certainly_remembered(inquiry.submission.policy, known, now_ms):
                answer = known_answer(inquiry.submission, known)
            if not inquiry.answer.done():
                inquiry.answer.set_result(answer)

    def _fail_inquiries(self, inquiries: Iterable[_Inquiry], error: Exception) -> None:
        for inquiry in inquiries:
            if not inquiry.answer.done():
                inquiry.answer.set_exception(error)


def _stopped() -> ClosedError:
    return ClosedError("the log was stopped; submit again under the same identity")


def _as_retry(verdict: Verdict) -> Verdict:
    """What an equal submission is told that was decided right after the first one."""
    return Replayed(verdict.receipt) if isinstance(verdict, Committed) else verdict


def _never_raising(validate: Validate) -> Validate:
    """An application's validation may raise: then what it says is the objection."""

    def validated(submission: Submission) -> str | None:
        try:
            return validate(submission)
        except Exception as error:  # noqa: BLE001 - it is the application's
            return str(error) or type(error).__name__

    return validated
