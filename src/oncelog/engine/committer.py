"""The committer: forms batches (group commit), commits each to the store, and answers the submissions.

While one transaction is being made durable, submissions queue for the next batch (`_form_batch`). A single submission
commits immediately. Equal submissions in flight share one outcome. When the queue is full, the committer refuses new
writes as busy and still answers retries of known writes. If a batch fails because of one of its submissions, the
committer bisects it until that submission fails alone. It permanently refuses a write that the store cannot hold.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, islice
from typing import Any, Final, Protocol, TypeVar, cast, overload

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.latency import RequestTimes
from oncelog.core.operations import SetEntity
from oncelog.core.plan import LIMIT_REASONS, Validate, refuse_skipped
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
from oncelog.engine import logger
from oncelog.engine.answer_cache import AnswerCache
from oncelog.engine.batch_report import ArrivalTimes, BatchReport, PhaseRecorder, ReplayCounts, RequestArrival
from oncelog.engine.batch_scheduler import BATCH_ITEMS_TARGET, BatchScheduler
from oncelog.engine.limits import Limits
from oncelog.engine.tracing import Tracer
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

RETRY_AFTER_MS_MIN: Final = 10
UNSTORABLE: Final = "cannot be stored: the store rejects one of its values; retrying does not help"

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class VerdictSink(Protocol[T_contra]):
    """Receives the outcome of a submission. Implemented by futures and by the server.

    No method may raise, because the committer cannot pass the error to any caller.
    """

    def done(self) -> bool:
        """Return whether the outcome is no longer needed."""

    def set_result(self, result: T_contra, /) -> None:
        """Receive the verdict, which is durable."""

    def set_exception(self, exception: Exception, /) -> None:
        """Receive an error. The outcome is unknown."""


ItemSink = VerdictSink[Verdict]
RequestSink = VerdictSink[list[Verdict]]


class _QueueEntry(Struct, eq=False, gc=False):
    """A submission in the queue or in flight, and the sinks that wait for its outcome."""

    request: Item | Request
    """A single item, or a request of several items."""
    sink: VerdictSink[Any]
    """An `ItemSink` for a single item, otherwise a `RequestSink`."""
    bytes: int
    identity: KeyIdentity | None = None
    """Identity of a single submission, by which equal submissions can join it."""
    joined_sinks: list[ItemSink] | None = None
    is_known_only: bool = False
    """Whether the queue was full when it arrived. If so, it is answered if known, and otherwise refused as busy."""
    is_settled: bool = False
    """Whether its sinks have received the outcome."""
    submitter: Any = None
    """The span in which it was submitted, if the log is traced (`engine.tracing`)."""
    times: RequestTimes | None = None
    """When it arrived, while the log measures latencies."""

    @property
    def items(self) -> tuple[Item, ...]:
        """The submitted items."""
        return self.request.items if isinstance(self.request, Request) else (self.request,)


class _EntryQueue:
    """Submissions that wait for a batch. `items` and `bytes` include submissions in flight until they are settled."""

    __slots__ = ("bytes", "entries", "items")

    def __init__(self) -> None:
        self.entries: deque[_QueueEntry] = deque()
        self.items = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.entries)


class Committer:
    """A log's committer in one process. It runs on the event loop; only the store uses other threads."""

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
        self.tracer: Tracer | None = None
        """Creates spans for group commits. None without tracing."""
        self._queue = _EntryQueue()
        self._known_only_queue = _EntryQueue()
        self._batch: list[_QueueEntry] = []
        """Entries that are being committed."""
        self._in_flight: dict[KeyIdentity | None, _QueueEntry] = {}
        self._items_max = limits.queue_items_max
        self._bytes_max = limits.queue_bytes_max
        self._body_bytes_max = limits.body_bytes_max
        self._joined_count = 0
        self._batch_ms = 0.0
        self._batch_items_target = min(BATCH_ITEMS_TARGET, limits.batch_items_max, limits.queue_items_max)
        self._batch_bytes_target = min(limits.batch_bytes_max, limits.queue_bytes_max) // 2
        self._scheduler = BatchScheduler(self._queue.__len__, self._has_full_batch)
        self._failed_batches = 0
        """How many batches have failed in a row. The committer logs the first failure and the recovery."""
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        """The thread that runs the event loop."""
        self._is_closing = False
        self._arrival_times = ArrivalTimes()
        self._batch_arrived_s = 0.0
        """When the oldest write of the batch in progress arrived, or 0 between batches."""
        self._sync_s = 0.0
        """Duration of the COMMITs of the batch in progress."""
        self.failures = 0
        """How many batches the store could not commit."""
        self.replays = ReplayCounts()
        self.on_batch: Callable[[BatchReport], None] | None = None
        """Called after every group commit."""
        self.phases: PhaseRecorder | None = None
        """Set to measure latencies: then batch reports have phases and the times of requests."""

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future on the log's event loop, for use as a sink.

        Raises RuntimeError in another thread, or after the event loop was closed.
        """
        loop = self._loop or self._get_loop()
        if threading.get_ident() != self._thread_id or loop.is_closed():
            raise RuntimeError(
                "the log was opened in another thread or event loop: open one in this event loop with "
                "`async with oncelog.open(…)`, or share a log between threads with `oncelog.open_blocking(…)`"
            )
        return loop.create_future()

    def bind_to_loop(self) -> None:
        """Remember the running event loop, in which the log is opened."""
        self._get_loop()

    @overload
    def submit(self, item: Item) -> Verdict | asyncio.Future[Verdict]: ...

    @overload
    def submit(self, item: Item, sink: ItemSink) -> Verdict | None: ...

    def submit(self, item: Item, sink: ItemSink | None = None) -> Verdict | asyncio.Future[Verdict] | None:
        """Return the verdict of an item if it is already known. Otherwise the sink receives it once it is durable.

        Without a sink, a future is created for an item that must wait. Retries, the fastest path, need none.
        """
        if self._is_closing:
            raise ClosedError("the log is closed")
        identity, size = None, 0
        if isinstance(item, Submission):
            # `count_payload_bytes` is inlined for common writes, because this runs for every submission.
            size = count_payload_bytes(item) if item.operations or item.delta is not None else len(item.body)
            if size > self._body_bytes_max:
                return self._refuse_too_large(size)
            if item.key:
                identity = key_identity(item)
                if identity in self._cache.answers:
                    known = self._answer_from_cache(item, identity)
                    if known is not None:
                        self.replays.memory += 1
                        return known
        else:
            _check_item(item)
        future = None
        if sink is None:
            sink = future = self.create_future()
        if identity in self._in_flight and self._can_join(item, identity):
            self._join(self._in_flight[identity], sink)
            return future
        return self._enqueue(_QueueEntry(item, sink, size, identity)) or future

    def _enqueue(self, entry: _QueueEntry, items: int = 1) -> Refused | None:
        """Add an entry to the queue, or to the known-only queue if the queue is full. Refuse it if both are full.

        Known-only entries are answered if their keys are stored, and otherwise refused as busy.
        """
        queue = self._queue
        # `_has_room` inlined, as above.
        if queue.items and (queue.items + items > self._items_max or queue.bytes + entry.bytes > self._bytes_max):
            queue = self._known_only_queue
            if not _can_be_known_only(entry) or not self._has_room(queue, entry.bytes, items):
                return self._refuse_busy()
            entry.request = _to_known_only(entry.request)
            entry.identity = None
            entry.is_known_only = True
        elif entry.identity is not None:
            self._in_flight.setdefault(entry.identity, entry)
        if self.tracer is not None:
            entry.submitter = self.tracer.get_submitter()
        if self.phases is not None:
            entry.times = RequestArrival.read_times()
        queue.items += items
        queue.bytes += entry.bytes
        queue.entries.append(entry)
        if self._drain_task is None:
            self._arrival_times.mark_first(time.perf_counter())
            # The task starts in the next iteration of the loop, so submissions of this iteration join its first batch.
            self._drain_task = self._get_loop().create_task(self._drain())
        elif self._scheduler.wakeup is not None:
            self._scheduler.notify_arrival()
        return None

    def _answer_from_cache(self, item: Submission, identity: KeyIdentity) -> Verdict | None:
        """Return the cached answer to a retry, or None if the store must decide."""
        # A caller that is not a member must not learn that the id is known, and a malformed item must be refused first.
        if item.policy.members_only or check_item(item) is not None:
            return None
        remembered = self._cache.get(item.policy, identity, self._clock.wall_ms())
        if remembered is None:
            return None
        if remembered.fingerprint != item.fingerprint and item.policy.name == EVENTS.name:
            return None  # only the store can tell whether another scope has the event (core.rules.duplicates)
        return answer_known_key(item, remembered)

    def _can_join(self, item: Item, identity: KeyIdentity | None) -> bool:
        """Return whether an item may share the outcome of an equal submission in flight."""
        if not isinstance(item, Submission) or item.policy.members_only or self._joined_count >= self._items_max:
            return False
        return check_item(item) is None and self._in_flight[identity].request == item

    def _join(self, in_flight: _QueueEntry, sink: ItemSink) -> None:
        if in_flight.joined_sinks is None:
            in_flight.joined_sinks = []
        self._joined_count += 1
        self.replays.in_flight += 1
        in_flight.joined_sinks.append(sink)

    def submit_request(self, request: Request, sink: RequestSink) -> list[Verdict] | None:
        """Return the verdicts of a request if they are already known. Otherwise the sink receives them once they are
        durable."""
        if self._is_closing:
            raise ClosedError("the log is closed")
        if not request.items:
            return []
        for item in request.items:
            _check_item(item)
        sizes = [count_payload_bytes(item) for item in request.items if isinstance(item, Submission)]
        refused = self._check_request_size(len(request.items), sizes)
        if refused is None:
            known = self._answer_all_from_cache(request)
            if known is not None:
                self.replays.memory += len(known)
                return known
            refused = self._enqueue(_QueueEntry(request, sink, sum(sizes)), len(request.items))
        return None if refused is None else [refused] * len(request.items)

    def _check_request_size(self, items: int, sizes: Sequence[int]) -> Refused | None:
        """Return the refusal of a request that exceeds a limit."""
        items_max = self._limits.request_items_max
        if items > items_max:
            return Refused(Reason.MALFORMED, f"items must have at most {items_max} entries, not {items}", "items")
        if max(sizes, default=0) > self._body_bytes_max:
            return self._refuse_too_large(max(sizes))
        if sum(sizes) > self._bytes_max:
            message = f"items must total at most {self._bytes_max} bytes, not {sum(sizes)}"
            return Refused(Reason.MALFORMED, message, "items")
        return None

    def _answer_all_from_cache(self, request: Request) -> list[Verdict] | None:
        """Return the answers to a request, or None unless all are cached."""
        if request.mode is not Mode.EACH:
            return None
        answers: list[Verdict] = []
        for item in request.items:
            if not isinstance(item, Submission) or not item.key or key_identity(item) not in self._cache.answers:
                return None
            answer = self._answer_from_cache(item, key_identity(item))
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def recall(self, policy: Policy, scope: str, keys: Sequence[bytes]) -> list[Remembered] | None:
        """Return the cached answers for keys, or None unless all are cached and any caller may see them."""
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
        self.replays.memory += len(remembered)
        return remembered

    @property
    def queue_length(self) -> int:
        """Number of writes that are not yet settled."""
        return self._queue.items

    @property
    def queue_age_s(self) -> float:
        """How long the oldest write that is not settled has waited."""
        now_s = time.perf_counter()
        if self._batch_arrived_s:
            return now_s - self._batch_arrived_s
        return now_s - self._arrival_times.get_oldest_s(now_s) if self._queue else 0.0

    async def close(self) -> None:
        """Refuse further submissions, and wait until all accepted ones are settled."""
        self._is_closing = True
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Wait until all accepted submissions are settled."""
        while self._drain_task is not None:
            await asyncio.wait([self._drain_task])

    # --- the queue

    def _refuse_too_large(self, size: int) -> Refused:
        message = f"body must have at most {self._body_bytes_max} bytes, not {size}"
        return Refused(Reason.MALFORMED, message, "body")

    def _has_room(self, queue: _EntryQueue, size: int, items: int) -> bool:
        if not queue.items:
            return True  # `_check_request_size` has checked a single request
        return queue.items + items <= self._items_max and queue.bytes + size <= self._bytes_max

    def _refuse_busy(self) -> Refused:
        batches = 1 + self._queue.items // self._limits.batch_items_max
        retry_after_ms = max(RETRY_AFTER_MS_MIN, round(batches * self._batch_ms))
        message = f"{self._queue.items} writes are waiting for their commit; try again in {retry_after_ms} ms"
        return Refused(Reason.BUSY, message, retry_after_ms=retry_after_ms)

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the only event loop that uses the log. It is cached because `get_running_loop` makes a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread_id = threading.get_ident()
        return self._loop

    # --- group commit

    async def _drain(self) -> None:
        try:
            while self._queue or self._known_only_queue:
                if self._queue:
                    gathered_s = 0.0
                    if self._scheduler.should_wait:
                        gathered_s = time.perf_counter()
                        await self._scheduler.wait(self._get_loop())
                    self._scheduler.start_batch()
                    began = time.perf_counter()
                    if self.phases is not None:
                        self.phases.start(gathered_s or began, began)
                    self._batch = batch = self._form_batch(self._queue)
                    self._batch_arrived_s = arrived_s = self._arrival_times.take(len(batch), len(self._queue), began)
                    items = self._queue.items - sum(len(entry.items) for entry in self._queue.entries)
                    self._sync_s = 0.0
                    await self._commit(batch)
                    duration_s = time.perf_counter() - began
                    self._batch_arrived_s = 0.0
                    self._batch_ms = duration_s * 1000
                    self._scheduler.finish_batch(len(batch))
                    if self.on_batch is not None:
                        report = BatchReport(items, duration_s, self._sync_s, began - arrived_s)
                        self.on_batch(report if self.phases is None else self._add_times(report, batch, self.phases))
                if self._known_only_queue:
                    self._batch = self._form_batch(self._known_only_queue)
                    await self._commit(self._batch)
        except BaseException:
            # No other task will commit them, so settle all submissions: no caller may wait forever.
            waiting = [*self._batch, *self._queue.entries, *self._known_only_queue.entries]
            self._queue.entries.clear()
            self._known_only_queue.entries.clear()
            error = ClosedError("the log was stopped; submit again under the same identity")
            self._fail([entry for entry in waiting if not entry.is_settled], error)
            raise
        finally:
            self._drain_task = None
            self._batch = []
            self._batch_arrived_s = 0.0

    @staticmethod
    def _add_times(report: BatchReport, batch: Sequence[_QueueEntry], phases: PhaseRecorder) -> BatchReport:
        """Add the phases of a settled batch and the times of its requests to its report."""
        requests = [entry.times for entry in batch if entry.times is not None]
        return replace(report, phases=phases.finish(time.perf_counter()), requests=requests)

    def _has_full_batch(self) -> bool:
        """Return whether the queue has enough for a large batch, or is close to its limits."""
        return self._queue.items >= self._batch_items_target or self._queue.bytes >= self._batch_bytes_target

    def _form_batch(self, queue: _EntryQueue) -> list[_QueueEntry]:
        """Remove the next batch from a queue in order of arrival: all entries, or as many as the limits allow."""
        limits, entries = self._limits, queue.entries
        batch: list[_QueueEntry] = []
        if queue.items <= limits.batch_items_max and queue.bytes <= limits.batch_bytes_max:
            if queue is self._queue and self._scheduler.should_pipeline(len(queue)):
                return [entries.popleft() for _ in range(len(entries) // 2)]
            batch.extend(entries)
            entries.clear()
            return batch
        items = size = 0
        while entries:
            entry = entries[0]
            items += len(entry.items)
            size += entry.bytes
            if batch and (items > limits.batch_items_max or size > limits.batch_bytes_max):
                break
            batch.append(entries.popleft())
        return batch

    async def _commit(self, batch: Sequence[_QueueEntry], clock_error: ClockJumpedError | None = None) -> None:
        """Commit a batch and settle its entries. While new writes are refused, only known writes are answered."""
        refusal = self._get_refusal(clock_error)
        requests = [entry.request for entry in batch]
        if refusal is not None:
            requests = [_to_known_only(request) for request in requests]
        try:
            result = await self._save(batch, _group_into_requests(requests))
        except (StoreError, ClosedError) as error:
            level = logging.DEBUG if self._failed_batches else logging.WARNING
            logger.log(level, "a batch of %d requests was not committed: %s", len(batch), error)
            self._failed_batches += 1
            self.failures += 1
            self._write_gate.notify_failure(error)
            if isinstance(error, LogReplacedError):
                self._cache.clear()  # the cached answers belong to the replaced history
            self._fail(batch, error)
        except Exception as error:  # noqa: BLE001 - no error of one submission may fail the others
            if isinstance(error, ClockJumpedError) and clock_error is None:
                logger.warning("new writes are refused: %s", error)
                self._fail([entry for entry in batch if not _can_be_known_only(entry)], error)
                await self._commit([entry for entry in batch if _can_be_known_only(entry)], error)
            elif len(batch) > 1:
                middle = len(batch) // 2
                await self._commit(batch[:middle], clock_error)
                await self._commit(batch[middle:], clock_error)
            elif isinstance(error, UnstorableError):
                # Omit the details of the cause, which quote the rejected row.
                reason = str(error.__cause__ or "").partition("\n")[0]
                logger.warning("a request cannot be stored: %s: %s", error, reason)
                await self._commit_bisected(batch[0], requests[0], refusal)
            else:
                logger.warning("a request was not committed: %s: %s", type(error).__name__, error)
                self._fail(batch, error)
        else:
            if self._failed_batches and not result.changes.is_empty:
                logger.warning("batches commit again, after %d failures", self._failed_batches)
                self._failed_batches = 0
            self._cache.put_batch(result)
            is_cacheable = result.erasures >= self._cache.erasures
            verdicts = chain.from_iterable(result.verdicts)
            self._settle(batch, verdicts, refusal, clock_error, is_cacheable=is_cacheable)
            self._notify_subscribers(result)

    async def _save(self, batch: Sequence[_QueueEntry], requests: Sequence[Request]) -> BatchResult:
        """Commit a batch to the store, with a span if one of its requests is traced."""
        span = None
        if self.tracer is not None:
            span = self.tracer.start_commit([(entry.submitter, len(entry.items)) for entry in batch])
        if span is None:
            result = await self._store.commit(requests, self._validate)
        else:
            with span:
                result = await self._store.commit(requests, self._validate, span.traces)
                span.describe(result)
        self._sync_s += result.sync_s
        if self.phases is not None:
            self.phases.add_commit(result)
        if self.on_batch is not None:
            self.replays.store += sum([list(map(type, verdicts)).count(Replayed) for verdicts in result.verdicts])
        return result

    def _get_refusal(self, clock_error: ClockJumpedError | None) -> Refused | None:
        """Return the verdict for new writes while the log refuses them, after a clock jump or while it is read-only."""
        if clock_error is not None:
            return Refused(Reason.BUSY, str(clock_error), retry_after_ms=RETRY_AFTER_MS_MIN)
        read_only_message = self._write_gate.refresh_message()
        if not read_only_message:
            return None
        message = f"new writes are refused for now: {read_only_message}; try again later"
        return Refused(Reason.READ_ONLY, message, retry_after_ms=RETRY_AFTER_READ_ONLY_MS)

    async def _commit_bisected(
        self, entry: _QueueEntry, request_or_item: Item | Request, refusal: Refused | None
    ) -> None:
        """Commit those items of a request that the store can hold, and permanently refuse the others."""
        request = request_or_item if isinstance(request_or_item, Request) else Request((request_or_item,))
        try:
            verdicts = await self._bisect_request(entry, request)
        except Exception as error:  # noqa: BLE001 - a retry finds the items that were committed
            self._fail([entry], error)
            return
        refused = next((index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused)), None)
        if request.mode is Mode.UNTIL_REFUSED and refused is not None:
            verdicts[refused + 1 :] = [refuse_skipped(refused)] * (len(request.items) - refused - 1)
        self._settle([entry], verdicts, refusal)

    async def _bisect_request(self, entry: _QueueEntry, request: Request, is_known_bad: bool = True) -> list[Verdict]:
        """Bisect the request of an entry around items that the store cannot hold, and return the verdicts.

        In mode UNTIL_REFUSED the verdicts may stop after the first refusal.
        """
        items = request.items
        if not is_known_bad:
            try:
                result = await self._save([replace(entry, request=request)], [request])
            except UnstorableError as error:
                logger.debug("%d items cannot be stored: %s", len(items), error)
            else:
                self._cache.put_batch(result)
                self._notify_subscribers(result)
                return result.verdicts[0]
        if len(items) == 1 or request.mode is Mode.ALL:
            return [Refused(Reason.UNSTORABLE, UNSTORABLE, "body")] * len(items)
        middle = len(items) // 2
        verdicts = await self._bisect_request(entry, replace(request, items=items[:middle]), is_known_bad=False)
        if request.mode is Mode.UNTIL_REFUSED and any(isinstance(verdict, Refused) for verdict in verdicts):
            return verdicts
        verdicts = verdicts + await self._bisect_request(
            entry, replace(request, items=items[middle:]), is_known_bad=False
        )
        refusals = [verdict for verdict in verdicts if isinstance(verdict, Refused) and verdict.reason in LIMIT_REASONS]
        if request.is_admitted_whole and 0 < len(refusals) < len(verdicts):
            # One half was committed before the other reached a limit. A retry finds that half and is admitted as a
            # whole.
            raise StoreUnavailableError("a limit was reached while the request was being bisected; submit it again")
        return verdicts

    def _notify_subscribers(self, result: BatchResult) -> None:
        try:
            self._on_commit(result)
        except Exception:
            logger.exception("subscriber notification failed")

    # --- answers

    def _settle(
        self,
        batch: Sequence[_QueueEntry],
        verdicts: Iterable[Verdict],
        refusal: Refused | None,
        clock_error: ClockJumpedError | None = None,
        *,
        is_cacheable: bool = False,
    ) -> None:
        """Send the verdicts of a batch to its sinks and release its space in the queue.

        `refusal` replaces the verdict NOT_KNOWN. The sinks of a single item get `clock_error` instead, if given.
        Without either, a known-only entry arrived while the queue was full and is refused as busy.
        """
        remaining = iter(verdicts)
        for entry in batch:
            self._dequeue(entry)
            if isinstance(entry.request, Request):
                answers = list(islice(remaining, len(entry.request.items)))
                if refusal is not None or entry.is_known_only:
                    answers = [self._replace_not_known(verdict, refusal) for verdict in answers]
                _send(entry.sink, answers)
                continue
            verdict = next(remaining)
            if clock_error is not None and _is_not_known(verdict):
                _send_error(entry, clock_error)
                continue
            if refusal is not None or entry.is_known_only:
                verdict = self._replace_not_known(verdict, refusal)
            elif is_cacheable and isinstance(verdict, Replayed):
                self._cache_answer(entry, verdict)
            _send(entry.sink, verdict)
            for joined in entry.joined_sinks or ():
                _send(joined, Replayed(verdict.receipt) if isinstance(verdict, Committed) else verdict)

    def _replace_not_known(self, verdict: Verdict, refusal: Refused | None) -> Verdict:
        return (refusal or self._refuse_busy()) if _is_not_known(verdict) else verdict

    def _cache_answer(self, entry: _QueueEntry, verdict: Replayed) -> None:
        """Cache an answer from the store, so that the next retry finds it in the cache."""
        item = entry.request
        if entry.identity is None or not isinstance(item, Submission) or item.policy.client_sequence:
            return
        if verdict.receipt is not None and not verdict.mismatch:
            self._cache.put(entry.identity, Remembered(verdict.receipt, item.fingerprint, verdict.erased))

    def _fail(self, batch: Iterable[_QueueEntry], error: Exception) -> None:
        for entry in batch:
            self._dequeue(entry)
            _send_error(entry, error)

    def _dequeue(self, entry: _QueueEntry) -> None:
        entry.is_settled = True
        queue = self._known_only_queue if entry.is_known_only else self._queue
        queue.items -= len(entry.request.items) if isinstance(entry.request, Request) else 1
        queue.bytes -= entry.bytes
        if entry.joined_sinks is not None:
            self._joined_count -= len(entry.joined_sinks)
        self._in_flight.pop(entry.identity, None)


def _send(sink: VerdictSink[T], outcome: T) -> None:
    """Pass an outcome to a sink. A sink that raises does not affect the others."""
    try:
        if not sink.done():
            sink.set_result(outcome)
    except Exception:
        logger.exception("a sink failed to receive its verdict")


def _send_error(entry: _QueueEntry, error: Exception) -> None:
    for sink in (entry.sink, *(entry.joined_sinks or ())):
        try:
            if not sink.done():
                sink.set_exception(error)
        except Exception:
            logger.exception("a sink failed to receive its error")


def _check_item(item: object) -> None:
    if not isinstance(item, Item):
        raise TypeError(
            f"a submitted item must be a Submission or another Item, not {type(item).__name__}: {_advise(item)}"
        )


def _advise(item: object) -> str:
    """Return advice for a program that submits something other than an item."""
    if inspect.isawaitable(item):
        return "await it first"
    if isinstance(item, list | tuple):
        return "pass several items to submit_many"
    return "build an event with oncelog.event(…), or another write with oncelog.write(…)"


def count_payload_bytes(submission: Submission) -> int:
    """Return the size of a submission's body, values and columns, without names and keys."""
    size = len(submission.body)
    for operation in submission.operations:
        if isinstance(operation, SetEntity):
            size += len(operation.value)
    if submission.delta is not None:
        size += sum(len(value) for _, value in submission.delta.columns)
    return size


def _group_into_requests(entries: Sequence[Item | Request]) -> list[Request]:
    """Merge consecutive single items into one request, in which each item has a separate outcome."""
    if Request not in set(map(type, entries)):
        return [Request(tuple(cast("Sequence[Item]", entries)))]
    requests: list[Request] = []
    for is_request, group in groupby(entries, lambda entry: isinstance(entry, Request)):
        members: list[Any] = list(group)
        requests += members if is_request else [Request(tuple(members))]
    return requests


def _can_be_known_only(entry: _QueueEntry) -> bool:
    return all(map(can_be_known_only, entry.items))


def _to_known_only(request: Item | Request) -> Any:
    """Return the item, or the request with all its items, marked `known_only`."""
    if isinstance(request, Request):
        return replace(request, items=tuple(map(_to_known_only, request.items)))
    return replace(request, known_only=True) if can_be_known_only(request) else request


def _is_not_known(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason is Reason.NOT_KNOWN


def _wrap_validate(validate: Validate) -> Validate:
    """Return a validation that does not raise but reports the text of an error as the fault."""

    def validate_safely(submission: Submission) -> str | None:
        try:
            objection: object = validate(submission)
        except Exception as error:  # noqa: BLE001 - the application may raise anything
            logger.warning("validate raised %s: %s", type(error).__name__, error)
            return str(error) or type(error).__name__
        if objection is None or isinstance(objection, str):
            return objection
        logger.warning("validate must return a string or None, not %s", type(objection).__name__)
        return "the application's validation returned an invalid result"

    return validate_safely
