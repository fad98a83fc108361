"""The committer: forms batches (group commit), hands each to the store, and answers.

While one transaction is being made durable, submissions queue for the next batch (`_form_batch`). A lone submission
commits at once. Equal submissions in flight wait for one outcome. When the queue is full, new writes are answered as
busy, and retries of known writes are still answered. If a batch fails for a reason that is not the store's, it is
bisected until the submission at fault fails alone. A write that the store cannot hold is refused for good.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeVar, cast, overload

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.operations import SetEntity
from oncelog.core.plan import Validate
from oncelog.core.policy import EVENTS, Policy
from oncelog.core.rules.duplicates import answer_known_key
from oncelog.core.rules.quotas import can_be_known_only
from oncelog.core.validation import check_item
from oncelog.core.values import (
    Committed,
    Item,
    KeyIdentity,
    Mode,
    Reason,
    Refused,
    Remembered,
    Replayed,
    Request,
    Submission,
    Verdict,
    key_identity,
)
from oncelog.engine.answer_cache import AnswerCache
from oncelog.engine.batch_scheduler import BATCH_ITEMS_TARGET, BatchScheduler
from oncelog.engine.limits import Limits
from oncelog.engine.write_gate import RETRY_AFTER_MS as RETRY_AFTER_READ_ONLY_MS
from oncelog.engine.write_gate import WriteGate
from oncelog.errors import (
    ClockJumpedError,
    ClosedError,
    LogReplacedError,
    StoreError,
    StoreUnavailableError,
    UnstorableError,
)
from oncelog.storage.clock import Clock
from oncelog.storage.store import BatchResult, Store

logger: Final = logging.getLogger("oncelog.engine")

RETRY_AFTER_MS_MIN: Final = 10
UNSTORABLE: Final = "cannot be stored: the store refuses a value of it; sending it again does not help"

_LIMIT_REASONS: Final = frozenset({Reason.RATE_LIMITED, Reason.QUOTA_EXCEEDED, Reason.NOT_KNOWN})
"""Refusals that say nothing against the write itself: a later retry may be accepted."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class VerdictSink(Protocol[T_contra]):
    """Who is told an outcome: a future, or a server's own kind of it, which is told at once and in its turn.

    None of it may raise: the committer would have nobody to tell.
    """

    def done(self) -> bool:
        """Whether nobody wants to know any more."""

    def set_result(self, result: T_contra, /) -> None:
        """This became of it, and it is durable."""

    def set_exception(self, exception: Exception, /) -> None:
        """Nobody can tell what became of it."""


ItemSink = VerdictSink[Verdict]
RequestSink = VerdictSink[list[Verdict]]


class _QueueEntry(Struct, eq=False, gc=False):
    """Something in the queue or in flight, and who waits for it."""

    request: Item | Request
    """An item that came alone, or several that came together."""
    sink: ItemSink | None
    """For an item that came alone."""
    request_sink: RequestSink | None
    """For several."""
    bytes: int
    identity: KeyIdentity | None = None
    """Of a submission that came alone: equal ones may join it."""
    joined_sinks: list[ItemSink] | None = None
    is_known_only: bool = False
    """It found the queue full: it is answered if it is known, and else told that the log is busy."""

    @property
    def items(self) -> tuple[Item, ...]:
        """What came, one or several."""
        return self.request.items if isinstance(self.request, Request) else (self.request,)


class Committer:
    """One for a log in a process. Everything happens on the event loop's thread, but for the store's own work."""

    def __init__(
        self,
        store: Store,
        cache: AnswerCache,
        clock: Clock,
        limits: Limits,
        validate: Validate | None,
        on_commit: Callable[[BatchResult], None],
        write_gate: WriteGate,
    ) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock
        self._limits = limits
        self._validate = None if validate is None else _wrap_validate(validate)
        self._on_commit = on_commit
        self._write_gate = write_gate
        self._queue: deque[_QueueEntry] = deque()
        self._known_only_queue: deque[_QueueEntry] = deque()
        self._in_flight: dict[KeyIdentity | None, _QueueEntry] = {}
        self._items_max = limits.queue_items_max
        self._bytes_max = limits.queue_bytes_max
        self._body_bytes_max = limits.body_bytes_max
        self._items = 0
        self._bytes = 0
        self._known_only_items = 0
        self._known_only_bytes = 0
        self._joined_count = 0
        self._batch_ms = 0.0
        self._batch_items_target = min(BATCH_ITEMS_TARGET, limits.batch_items_max, limits.queue_items_max)
        self._batch_bytes_target = min(limits.batch_bytes_max, limits.queue_bytes_max) // 2
        self._scheduler = BatchScheduler(lambda: len(self._queue), self._has_full_batch)
        self._failed_batches = 0
        """In a row, for one reason that is the store's: it is logged once, and when it is over."""
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self.on_batch: Callable[[int, float], None] | None = None
        """Told of every group commit: how many items, how many seconds."""

    @overload
    def submit(self, item: Item) -> Verdict | asyncio.Future[Verdict]: ...

    @overload
    def submit(self, item: Item, receiver: ItemSink) -> Verdict | None: ...

    def submit(self, item: Item, receiver: ItemSink | None = None) -> Verdict | asyncio.Future[Verdict] | None:
        """What becomes of one item: at once if it is known, else when it is durable.

        That is told to the receiver, and nothing is returned; without one a future is.
        """
        if self._is_closing:
            raise ClosedError("the log is closed")
        if not isinstance(item, Submission):
            _check_item(item)
            return self._enqueue(item, None, 0, receiver)
        # `count_payload_bytes` and `_has_room` inlined for the usual write: this runs for every submission.
        size = count_payload_bytes(item) if item.operations or item.delta is not None else len(item.body)
        if size > self._body_bytes_max:
            return self._refuse_too_large(size)
        if not item.key:
            return self._enqueue(item, None, size, receiver)
        identity = key_identity(item)
        if identity in self._cache:
            known = self._answer_from_cache(item, identity)
            if known is not None:
                return known
        if identity in self._in_flight and self._can_join(item, identity):
            return self._join(identity, receiver)
        return self._enqueue(item, identity, size, receiver)

    def _enqueue(
        self, item: Item, identity: KeyIdentity | None, size: int, sink: ItemSink | None
    ) -> Refused | asyncio.Future[Verdict] | None:
        """Into the queue, or among the questions if that is full."""
        future = None if sink is not None else (self._loop or self._get_loop()).create_future()
        entry = _QueueEntry(item, sink or future, None, size, identity)
        if self._items and (self._items >= self._items_max or self._bytes + size > self._bytes_max):
            return future if self._enqueue_known_only(entry) else self._refuse_busy()
        if identity is not None:
            self._in_flight.setdefault(identity, entry)
        self._items += 1
        self._bytes += size
        self._queue.append(entry)
        if self._drain_task is None:
            self._start_draining()
        elif self._scheduler.is_waiting:
            self._scheduler.notify_arrival()
        return future

    def _answer_from_cache(self, item: Submission, identity: KeyIdentity) -> Verdict | None:
        """From memory: what was answered before."""
        # Who is no member, or no more, must not learn that the id is known; and shape comes before everything.
        if item.policy.members_only or check_item(item) is not None:
            return None
        remembered = self._cache.get(item.policy, identity, self._clock.wall_ms())
        if remembered is None:
            return None
        if remembered.fingerprint != item.fingerprint and item.policy.name == EVENTS.name:
            return None  # only the store knows whether another scope has the event (core.rules.event_ids)
        return answer_known_key(item, remembered)

    def _can_join(self, item: Submission, identity: KeyIdentity) -> bool:
        """Whether an equal submission's outcome is on its way, and this one may wait for it too."""
        if item.policy.members_only or self._joined_count >= self._items_max or check_item(item) is not None:
            return False
        return self._in_flight[identity].request == item

    def _join(self, identity: KeyIdentity, sink: ItemSink | None) -> asyncio.Future[Verdict] | None:
        in_flight = self._in_flight[identity]
        if in_flight.joined_sinks is None:
            in_flight.joined_sinks = []
        self._joined_count += 1
        if sink is not None:
            in_flight.joined_sinks.append(sink)
            return None
        future: asyncio.Future[Verdict] = self._get_loop().create_future()
        in_flight.joined_sinks.append(future)
        return future

    @overload
    def submit_request(self, request: Request) -> list[Verdict] | asyncio.Future[list[Verdict]]: ...

    @overload
    def submit_request(self, request: Request, receiver: RequestSink) -> list[Verdict] | None: ...

    def submit_request(
        self, request: Request, receiver: RequestSink | None = None
    ) -> list[Verdict] | asyncio.Future[list[Verdict]] | None:
        """What becomes of several items that belong together: as `submit` says."""
        if self._is_closing:
            raise ClosedError("the log is closed")
        if not request.items:
            return []
        for item in request.items:
            _check_item(item)
        sizes = [count_payload_bytes(item) for item in request.items if isinstance(item, Submission)]
        refused = self._check_request_size(len(request.items), sizes)
        if refused is not None:
            return [refused] * len(request.items)
        known = self._answer_all_from_cache(request)
        if known is not None:
            return known
        future: asyncio.Future[list[Verdict]] | None = None
        if receiver is None:
            receiver = future = self._get_loop().create_future()
        entry = _QueueEntry(request, None, receiver, sum(sizes))
        if self._has_room(entry.bytes, len(request.items)):
            self._items += len(request.items)
            self._bytes += entry.bytes
            self._queue.append(entry)
            self._start_draining()
            if self._scheduler.is_waiting:
                self._scheduler.notify_arrival()
        elif not self._enqueue_known_only(entry):
            return [self._refuse_busy()] * len(request.items)
        return future

    def _check_request_size(self, items: int, sizes: Sequence[int]) -> Refused | None:
        """More than one request may have."""
        if items > self._limits.request_items_max:
            message = f"items must be at most {self._limits.request_items_max}, not {items}"
            return Refused(Reason.MALFORMED, message, "items")
        if max(sizes, default=0) > self._body_bytes_max:
            return self._refuse_too_large(max(sizes))
        if sum(sizes) > self._bytes_max:
            message = f"items must come to at most {self._bytes_max} bytes, not {sum(sizes)}"
            return Refused(Reason.MALFORMED, message, "items")
        return None

    def _answer_all_from_cache(self, request: Request) -> list[Verdict] | None:
        """The answers of a request whose items are all in memory."""
        if request.mode is not Mode.EACH:
            return None
        answers: list[Verdict] = []
        for item in request.items:
            if not isinstance(item, Submission) or not item.key or key_identity(item) not in self._cache:
                return None
            answer = self._answer_from_cache(item, key_identity(item))
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def recall(self, policy: Policy, scope: str, keys: Sequence[bytes]) -> list[Remembered] | None:
        """What is remembered of keys that are all in memory; None if one is not, or if not everybody may know."""
        if self._is_closing or policy.members_only or policy.client_sequence:
            return None
        now_ms = self._clock.wall_ms()
        name, found = policy.name, self._cache.get
        remembered: list[Remembered] = []
        for key in keys:
            known = found(policy, (name, scope, "", key), now_ms)
            if known is None:
                return None
            remembered.append(known)
        return remembered

    @property
    def queue_length(self) -> int:
        """Writes that have no answer yet."""
        return self._items

    async def close(self) -> None:
        """Takes nothing more, and returns when all that was accepted has its answer."""
        self._is_closing = True
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Returns when all that was accepted so far has its answer."""
        while self._drain_task is not None:
            await asyncio.wait([self._drain_task])

    # --- the queue

    def _refuse_too_large(self, size: int) -> Refused:
        message = f"body must have at most {self._body_bytes_max} bytes, not {size}"
        return Refused(Reason.MALFORMED, message, "body")

    def _has_room(self, size: int, items: int) -> bool:
        if not self._items:
            return True  # what is alone is never too much: its own limits have been checked
        return self._items + items <= self._items_max and self._bytes + size <= self._bytes_max

    def _enqueue_known_only(self, entry: _QueueEntry) -> bool:
        """The queue is full, so this is only asked about: the decision answers what it knows, and refuses the rest.

        False if even the questions are too many, or it is something that cannot be known.
        """
        if not _can_be_known_only(entry):
            return False
        items, size = self._known_only_items + len(entry.items), self._known_only_bytes + entry.bytes
        if self._known_only_queue and (items > self._items_max or size > self._bytes_max):
            return False
        self._known_only_items, self._known_only_bytes = items, size
        entry.request = _to_known_only(entry.request)
        entry.identity = None
        entry.is_known_only = True
        self._known_only_queue.append(entry)
        self._start_draining()
        return True

    def _refuse_busy(self) -> Refused:
        batches = 1 + self._items // self._limits.batch_items_max
        retry_after_ms = max(RETRY_AFTER_MS_MIN, round(batches * self._batch_ms))
        message = f"{self._items} writes wait for their commit; try again in {retry_after_ms} ms"
        return Refused(Reason.BUSY, message, retry_after_ms=retry_after_ms)

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        """A log is used by one event loop. Asking for it costs a system call, so it is asked once."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # --- group commit

    def _start_draining(self) -> None:
        if self._drain_task is None:
            # A task begins in the next turn of the loop: all that submit in this one come along.
            self._drain_task = self._get_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._queue or self._known_only_queue:
                if self._queue:
                    if self._scheduler.should_wait:
                        await self._scheduler.wait(self._get_loop())
                    self._scheduler.start_batch()
                    began = time.perf_counter()
                    before = self._items
                    batch = self._form_batch(self._queue, self._items, self._bytes)
                    items = before - sum(len(entry.items) for entry in self._queue) if self._queue else before
                    await self._commit(batch)
                    duration_s = time.perf_counter() - began
                    self._batch_ms = duration_s * 1000
                    self._scheduler.finish_batch(len(batch))
                    if self.on_batch is not None:
                        self.on_batch(items, duration_s)
                if self._known_only_queue:
                    await self._commit(
                        self._form_batch(self._known_only_queue, self._known_only_items, self._known_only_bytes)
                    )
        except BaseException:
            # Nobody goes on after this, so nobody may wait for it.
            self._fail([*self._queue, *self._known_only_queue], _build_stopped_error())
            self._queue.clear()
            self._known_only_queue.clear()
            raise
        finally:
            self._drain_task = None

    def _has_full_batch(self) -> bool:
        """Whether a batch is large enough as it is, or no more would be let in."""
        return self._items >= self._batch_items_target or self._bytes >= self._batch_bytes_target

    def _form_batch(self, queue: deque[_QueueEntry], items: int, size: int) -> list[_QueueEntry]:
        """The next batch, in the order of arrival: all of it, or as much as fits."""
        limits = self._limits
        batch: list[_QueueEntry] = []
        if items <= limits.batch_items_max and size <= limits.batch_bytes_max:
            if queue is self._queue and self._scheduler.should_pipeline(len(queue)):
                return [queue.popleft() for _ in range(len(queue) // 2)]
            batch.extend(queue)
            queue.clear()
            return batch
        items = size = 0
        while queue:
            entry = queue[0]
            items += len(entry.items)
            size += entry.bytes
            if batch and (items > limits.batch_items_max or size > limits.batch_bytes_max):
                break
            batch.append(queue.popleft())
        return batch

    def _fail_on_store_error(self, batch: Sequence[_QueueEntry], error: StoreError | ClosedError) -> None:
        level = logging.DEBUG if self._failed_batches else logging.WARNING
        logger.log(level, "a batch of %d requests was not committed: %s", len(batch), error)
        self._failed_batches += 1
        self._write_gate.notify_failure(error)
        if isinstance(error, LogReplacedError):
            self._cache.clear()  # answers of a history that is gone
        self._fail(batch, error)

    async def _commit(self, batch: Sequence[_QueueEntry]) -> None:
        read_only_message = self._write_gate.refresh_message()
        refusal = _refuse_read_only(read_only_message) if read_only_message else None
        requests = [entry.request for entry in batch]
        if refusal is not None:
            requests = [_to_known_only(request) for request in requests]
        try:
            result = await self._store.commit(_group_into_requests(requests), self._validate)
        except (StoreError, ClosedError) as error:
            self._fail_on_store_error(batch, error)
        except ClockJumpedError as error:
            await self._commit_known_only(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the others anything
            if len(batch) > 1:
                await self._bisect(batch)
            elif isinstance(error, UnstorableError):
                # Not the details of the cause, which quote the rejected row.
                reason = str(error.__cause__ or "").partition("\n")[0]
                logger.warning("a request cannot be stored: %s: %s", error, reason)
                await self._commit_bisected(batch[0], requests[0], refusal)
            else:
                logger.warning("a request was not committed: %s: %s", type(error).__name__, error)
                self._fail(batch, error)
        except BaseException:
            self._fail(batch, _build_stopped_error())
            raise
        else:
            self._reply(batch, result, refusal)

    async def _commit_known_only(self, batch: Sequence[_QueueEntry], error: ClockJumpedError) -> None:
        """New writes are refused with the error; what is known is answered all the same, in one transaction."""
        logger.warning("new writes are refused: %s", error)
        entries = [entry for entry in batch if _can_be_known_only(entry)]
        self._fail([entry for entry in batch if not _can_be_known_only(entry)], error)
        try:
            requests = _group_into_requests([_to_known_only(entry.request) for entry in entries])
            result = await self._store.commit(requests, self._validate)
        except Exception as second:  # noqa: BLE001 - those who ask are told
            self._fail(entries, second)
            return
        except BaseException:
            self._fail(entries, _build_stopped_error())
            raise
        # An item that came alone gets the error; each item of a request has a verdict of its own.
        refusal = Refused(Reason.BUSY, str(error), retry_after_ms=RETRY_AFTER_MS_MIN)
        verdicts = chain.from_iterable(result.verdicts)
        for entry in entries:
            answers = list(islice(verdicts, len(entry.items)))
            if entry.sink is not None and _is_not_known(answers[0]):
                self._fail([entry], error)
            else:
                self._settle([entry], answers, refusal)

    async def _bisect(self, batch: Sequence[_QueueEntry]) -> None:
        """One of them is at fault, and the others must not pay for it."""
        middle = len(batch) // 2
        try:
            await self._commit(batch[:middle])
        except BaseException:
            self._fail(batch[middle:], _build_stopped_error())
            raise
        await self._commit(batch[middle:])

    async def _commit_bisected(
        self, entry: _QueueEntry, request_or_item: Item | Request, refusal: Refused | None
    ) -> None:
        """Commit the items of a request that the store can hold, and refuse the others for good."""
        request = request_or_item if isinstance(request_or_item, Request) else Request((request_or_item,))
        try:
            verdicts = await self._bisect_request(request)
        except Exception as error:  # noqa: BLE001 - a retry finds the items that were committed
            self._fail([entry], error)
            return
        except BaseException:
            self._fail([entry], _build_stopped_error())
            raise
        refused = next((index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused)), None)
        if request.mode is Mode.UNTIL_REFUSED and refused is not None:
            skipped = Refused(Reason.NOT_PROCESSED, f"item {refused} was refused", index=refused)
            verdicts[refused + 1 :] = [skipped] * (len(request.items) - refused - 1)
        self._settle([entry], verdicts, refusal)

    async def _bisect_request(self, request: Request, is_known_bad: bool = True) -> list[Verdict]:
        """The verdicts of a request, divided wherever the store cannot hold one of its items.

        In the mode UNTIL_REFUSED there may be none after a refusal.
        """
        items = request.items
        if not is_known_bad:
            try:
                result = await self._store.commit([request], self._validate)
            except UnstorableError as error:
                logger.debug("%d items cannot be stored: %s", len(items), error)
            else:
                self._publish(result)
                return result.verdicts[0]
        if len(items) == 1 or request.mode is Mode.ALL:
            return [Refused(Reason.UNSTORABLE, UNSTORABLE, "body")] * len(items)
        middle = len(items) // 2
        verdicts = await self._bisect_request(replace(request, items=items[:middle]), is_known_bad=False)
        if request.mode is Mode.UNTIL_REFUSED and any(isinstance(verdict, Refused) for verdict in verdicts):
            return verdicts
        verdicts = verdicts + await self._bisect_request(replace(request, items=items[middle:]), is_known_bad=False)
        if request.is_admitted_whole and 0 < sum(map(_is_limit_refusal, verdicts)) < len(verdicts):
            # A part was committed before the next one met a limit. A retry finds it, and is admitted as a whole.
            raise StoreUnavailableError("a limit was met while the request was being divided; submit it again")
        return verdicts

    def _publish(self, result: BatchResult) -> None:
        """Update the answer cache and notify the subscribers of a commit."""
        self._cache.put_batch(result)
        self._notify_subscribers(result)

    def _notify_subscribers(self, result: BatchResult) -> None:
        try:
            self._on_commit(result)
        except Exception:
            logger.exception("subscriber notification failed")

    # --- answers

    def _reply(self, batch: Sequence[_QueueEntry], result: BatchResult, refusal: Refused | None) -> None:
        if self._failed_batches and not result.changes.is_empty:
            logger.warning("batches are committed again, after %d that were not", self._failed_batches)
            self._failed_batches = 0
        self._cache.put_batch(result)
        is_cacheable = result.erasures >= self._cache.erasures
        self._settle(batch, chain.from_iterable(result.verdicts), refusal, is_cacheable=is_cacheable)
        self._notify_subscribers(result)

    def _settle(
        self,
        batch: Sequence[_QueueEntry],
        verdicts: Iterable[Verdict],
        refusal: Refused | None,
        *,
        is_cacheable: bool = False,
    ) -> None:
        """Send the entries of a batch their verdicts, and free their places in the queue.

        `refusal` replaces the verdict NOT_KNOWN. Without it the queue was full when a known-only entry came.
        """
        remaining = iter(verdicts)
        for entry in batch:
            self._dequeue(entry)
            sink = entry.sink
            if sink is None:
                answers = list(islice(remaining, len(entry.items)))
                if refusal is not None or entry.is_known_only:
                    answers = [self._replace_not_known(verdict, refusal) for verdict in answers]
                if entry.request_sink is not None:
                    _send_result(entry.request_sink, answers)
                continue
            verdict = next(remaining)
            if refusal is not None or entry.is_known_only:
                verdict = self._replace_not_known(verdict, refusal)
            elif is_cacheable and isinstance(verdict, Replayed):
                self._cache_answer(entry, verdict)
            _send_result(sink, verdict)
            for joined in entry.joined_sinks or ():
                _send_result(joined, _to_replayed(verdict))

    def _replace_not_known(self, verdict: Verdict, refusal: Refused | None) -> Verdict:
        return (refusal or self._refuse_busy()) if _is_not_known(verdict) else verdict

    def _cache_answer(self, entry: _QueueEntry, verdict: Replayed) -> None:
        """An answer that came from the store: the next retry gets it from memory."""
        item = entry.request
        if entry.identity is None or not isinstance(item, Submission) or item.policy.client_sequence:
            return
        if verdict.receipt is not None and not verdict.mismatch:
            self._cache.put(entry.identity, Remembered(verdict.receipt, item.fingerprint, verdict.erased))

    def _fail(self, batch: Iterable[_QueueEntry], error: Exception) -> None:
        for entry in batch:
            self._dequeue(entry)
            for sink in (entry.sink, entry.request_sink, *(entry.joined_sinks or ())):
                if sink is not None:
                    _send_error(sink, error)

    def _dequeue(self, entry: _QueueEntry) -> None:
        if entry.is_known_only:
            self._known_only_items -= len(entry.items)
            self._known_only_bytes -= entry.bytes
            return
        if entry.joined_sinks is not None:
            self._joined_count -= len(entry.joined_sinks)
        self._items -= len(entry.request.items) if isinstance(entry.request, Request) else 1
        self._bytes -= entry.bytes
        self._in_flight.pop(entry.identity, None)


def _send_result(sink: VerdictSink[T], result: T) -> None:
    """A receiver that raises must not cost the others anything."""
    try:
        if not sink.done():
            sink.set_result(result)
    except Exception:
        logger.exception("a receiver could not take its verdict")


def _send_error(sink: VerdictSink[Any], error: Exception) -> None:
    try:
        if not sink.done():
            sink.set_exception(error)
    except Exception:
        logger.exception("a receiver could not take its error")


def _check_item(item: object) -> None:
    if not isinstance(item, Item):
        raise TypeError(f"what is submitted must be a Submission or another item, not {type(item).__name__}")


def count_payload_bytes(submission: Submission) -> int:
    """What a submission holds, in bytes, beside names and keys."""
    size = len(submission.body)
    for operation in submission.operations:
        if isinstance(operation, SetEntity):
            size += len(operation.value)
    if submission.delta is not None:
        size += sum(len(value) for _, value in submission.delta.columns)
    return size


def _group_into_requests(entries: Sequence[Item | Request]) -> list[Request]:
    """Items that came alone, one after the other, make one request: there too each has its own outcome."""
    if Request not in set(map(type, entries)):
        return [Request(tuple(cast("Sequence[Item]", entries)))]
    requests: list[Request] = []
    alone: list[Item] = []
    for entry in entries:
        if isinstance(entry, Request):
            if alone:
                requests.append(Request(tuple(alone)))
                alone = []
            requests.append(entry)
        else:
            alone.append(entry)
    if alone:
        requests.append(Request(tuple(alone)))
    return requests


def _can_be_known_only(entry: _QueueEntry) -> bool:
    return all(map(can_be_known_only, entry.items))


def _to_known_only(request: Item | Request) -> Item | Request:
    """Return the request with its items marked `known_only`."""
    if isinstance(request, Request):
        return replace(request, items=tuple(map(_to_known_only_item, request.items)))
    return _to_known_only_item(request)


def _to_known_only_item(item: Item) -> Item:
    return replace(item, known_only=True) if can_be_known_only(item) else item


def _refuse_read_only(reason: str) -> Refused:
    """Return the verdict of a new write while the log takes none."""
    message = f"no new writes are taken for now: {reason}; try again later"
    return Refused(Reason.READ_ONLY, message, retry_after_ms=RETRY_AFTER_READ_ONLY_MS)


def _is_not_known(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason is Reason.NOT_KNOWN


def _build_stopped_error() -> ClosedError:
    return ClosedError("the log was stopped; submit again under the same identity")


def _to_replayed(verdict: Verdict) -> Verdict:
    """What an equal submission is told that was decided right after the first one."""
    return Replayed(verdict.receipt) if isinstance(verdict, Committed) else verdict


def _wrap_validate(validate: Validate) -> Validate:
    """An application's validation may raise: then what it says is the objection."""

    def validate_safely(submission: Submission) -> str | None:
        try:
            objection: object = validate(submission)
        except Exception as error:  # noqa: BLE001 - it is the application's
            logger.warning("validate raised %s: %s", type(error).__name__, error)
            return str(error) or type(error).__name__
        if objection is None or isinstance(objection, str):
            return objection
        logger.warning("validate returned %s: it must return a text or None", type(objection).__name__)
        return "the application's validation is at fault"

    return validate_safely


def _is_limit_refusal(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason in _LIMIT_REASONS
