"""The log that an application opens: lifecycle, writes and operator functions.

async with oncelog.open("app.db") as log:
    verdict = await log.append({"type": "order.placed", "order": 17}, id=id, partitions=["orders"])
    async for record in log.follow(partition="orders"):
        ...
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self, overload
from uuid import UUID, uuid4

from oncelog.context_errors import AsyncContext
from oncelog.core.builders import event as build_event
from oncelog.core.canonical import JsonValue, canonical
from oncelog.core.limits import STORED_INTEGER_MAX
from oncelog.core.plan import Validate
from oncelog.core.policy import EVENTS, LEDGER, Policy
from oncelog.core.rules.audit import (
    APPLICATION_ACTOR,
    QUOTA_CHANGE,
    READ_ONLY_OFF,
    READ_ONLY_ON,
)
from oncelog.core.tenants import Tenant, check_tenants
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    EventVerdict,
    Granted,
    Item,
    Mode,
    OpenStream,
    Receipt,
    ReceiptT,
    RecordAct,
    Refused,
    Release,
    Remembered,
    Renew,
    Replayed,
    Request,
    RequestedSettings,
    SetCursor,
    SetMember,
    Settings,
    Submission,
    Verdict,
)
from oncelog.deprecation import alias_method, alias_property
from oncelog.engine import logger
from oncelog.engine.answer_cache import AnswerCache, CacheUpdater, ResultCache
from oncelog.engine.audit import (
    LOG_ACTOR,
    UNRECORDABLE,
    ActQueue,
    describe_quota_change,
)
from oncelog.engine.batch_report import BatchReport, PhaseRecorder, ReplayCounts
from oncelog.engine.committer import Committer, VerdictSink
from oncelog.engine.eraser import Eraser
from oncelog.engine.leases import LeaseManager
from oncelog.engine.limits import Limits
from oncelog.engine.log_reader import LogReader, build_identity, check_integer, resolve_cursor
from oncelog.engine.policy_registry import PolicyRegistry
from oncelog.engine.read_results import Compacted, Cursor
from oncelog.engine.state_reader import StateReader
from oncelog.engine.tracing import Tracer
from oncelog.engine.write_gate import DiskLimits, ReadOnlyReason, WriteGate
from oncelog.errors import (
    ClosedError,
    PolicyError,
)
from oncelog.file_modes import OWNER_ONLY, check_file_mode
from oncelog.storage.address import POSTGRES_TIMEOUTS, check_scheme, create_postgres_store, is_address
from oncelog.storage.clock import Clock, SystemClock
from oncelog.storage.pauses import PauseLog
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import MemoryDriver, SqliteDriver
from oncelog.storage.store import BatchResult, Store

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Log(LogReader, AsyncContext):
    """A log, opened in this process. Create it with `oncelog.open`, and use it in one event loop with `async with`."""

    def __init__(  # noqa: PLR0913 - all are keyword arguments
        self,
        store: Store,
        *,
        policies: Sequence[Policy] = (),
        validate: Validate | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        room: DiskLimits | None = None,
        tenants: Sequence[Tenant] | None = None,
        actor: str = APPLICATION_ACTOR,
        tracing: "bool | TracerProvider" = False,
    ) -> None:
        if tenants is not None:
            check_tenants(tenants)
        self._tenants = tenants
        self._actor = actor
        self._tracer = None if tracing is False else Tracer(None if tracing is True else tracing)
        super().__init__(store, limits or Limits(), self._tracer)
        self._write_gate = WriteGate(store, room)
        self._clock = clock or SystemClock()
        self._policies = PolicyRegistry(store, policies)
        self._cache = AnswerCache(self._limits.cache_entries_max, self._limits.cache_ttl_ms)
        self._committer = Committer(
            store, self._cache, self._clock, self._limits, validate, self._on_commit, self._write_gate
        )
        self._committer.tracer = self._tracer
        self._results = ResultCache(self._clock, self._limits.results_bytes_max, self._limits.cache_ttl_ms)
        self._cache_updater = CacheUpdater(store, self._cache, self._results, self._tailers.drop_buffered)
        self._lease_manager = LeaseManager(self._submit_work, store, self._results, self._cache_updater.put_result)
        self._act_queue = ActQueue(
            self._submit_work, self._clock, lambda: ReadOnlyReason.FULL in self._write_gate.reasons
        )
        self._eraser = Eraser(
            store, self._submit_work, self._act_queue, self._tailers.drop_buffered, self._cache_updater.clear
        )
        self._write_gate.on_change = self._record_read_only
        self._state_reader = StateReader(
            store,
            self._cache,
            self._tailers,
            self._limits,
            lambda: self._open_store,
            lambda: self._policies.by_name[LEDGER.name],
        )
        self._close_task: asyncio.Task[None] | None = None
        self._was_opened = False
        self._evictions = 0
        self._evicted_clients = 0

    # --- opening and closing

    def _name_openers(self) -> tuple[str, str]:
        return "oncelog.open(…)", "oncelog.open_blocking(…)"

    async def __aenter__(self) -> Self:
        if self._was_opened:
            raise ClosedError("a log can be opened only once; create another one with `oncelog.open(…)`")
        await self._store.open()
        try:
            if self._tracer is not None:
                await self._store.enable_traces()
            await self._policies.declare_all()
            self._cache.erasures = await self._store.erasures()
            if self._tenants is not None:
                await self._replace_tenants(self._tenants, self._actor)
            await self._write_gate.start()
        except BaseException:
            await self._store.close()
            raise
        self._committer.bind_to_loop()
        self._is_open = self._was_opened = True
        self._act_queue.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse further calls, commit the accepted writes, end all followers and close the store."""
        if self._is_open:
            self._is_open = False
            self._close_task = asyncio.get_running_loop().create_task(self._close())
        if self._close_task is not None:
            await asyncio.shield(self._close_task)  # the log is closed even if the caller is cancelled

    async def _close(self) -> None:
        try:
            await self._lease_manager.close()
            await self._act_queue.close()
            await self._committer.close()
        finally:
            await self._write_gate.stop()
            self._cache_updater.stop()
            await self._tailers.close()
            await self._store.close()

    @property
    def policies(self) -> Mapping[str, Policy]:
        """All policies of the log, by name."""
        return self._policies.by_name

    @property
    def leases(self) -> LeaseManager:
        """Leases for work that runs once, as used by `oncelog.once`, `Runs` and the middleware."""
        return self._lease_manager

    @property
    def state(self) -> StateReader:
        """State derived from the records: clients, entities, rows, relationships, members and blocks."""
        return self._state_reader

    # --- for operators

    @property
    def write_gate(self) -> WriteGate:
        """Whether the log accepts new writes, the reason if it does not, and how full the disk is. For servers."""
        return self._write_gate

    @property
    def tracer(self) -> Tracer | None:
        """Creates the spans of the log, or None without tracing. For servers."""
        return self._tracer

    books = alias_property("Log.books", "state")
    guard = alias_property("Log.guard", "write_gate")
    read_brief = alias_method("Log.read_brief", "read_views")
    evicted_clients = alias_property("Log.evicted_clients", "client_evictions")
    queued = alias_property("Log.queued", "queue_length")
    settled = alias_method("Log.settled", "wait_idle")
    works = alias_property("Log.works", "leases")

    @property
    def evictions(self) -> int:
        """How many evictions this process's commits have made. For servers."""
        return self._evictions

    @property
    def client_evictions(self) -> int:
        """How many client entries this process's commits have evicted. For servers."""
        return self._evicted_clients

    @property
    def read_only(self) -> str:
        """Why this process refuses new writes, or an empty string if it accepts them."""
        return self._write_gate.message

    def set_read_only(self, is_read_only: bool = True, actor: str = APPLICATION_ACTOR) -> None:
        """Make this process refuse or accept new writes. A read-only log still answers reads and retries."""
        self._write_gate.set_read_only(is_read_only=is_read_only, actor=actor)

    def _record_read_only(self, is_read_only: bool, reason: str, actor: str) -> None:
        act = READ_ONLY_ON if is_read_only else READ_ONLY_OFF
        self.record(RecordAct(act=act, actor=actor or LOG_ACTOR, details=canonical({"reason": reason})))

    def record(self, act: RecordAct) -> None:
        """Add an audit record for an act outside the log. The record waits in memory while the log is not writable."""
        self._act_queue.put(act)

    async def set_tenants(self, tenants: Sequence[Tenant], actor: str = APPLICATION_ACTOR) -> bool:
        """Replace the quotas of the log for all processes. Return False if the log already has these quotas.

        Counting the usage of a new tenant reads every record once.
        """
        self._check_open()
        check_tenants(tenants)
        return await self._replace_tenants(tenants, actor)

    async def _replace_tenants(self, tenants: Sequence[Tenant], actor: str) -> bool:
        before = [tenant for tenant, _ in await self._store.usage()]
        act = RecordAct(act=QUOTA_CHANGE, actor=actor, details=canonical(describe_quota_change(before, tenants)))
        try:
            is_changed = await self._store.set_tenants(tenants, act)
        except UNRECORDABLE:
            is_changed = await self._store.set_tenants(tenants)
            if is_changed:
                self.record(act)
        if is_changed and before:
            logger.warning(
                "quotas replaced: of %d tenants, %d were removed or changed; %d are active now",
                len(before),
                len(set(before) - set(tenants)),
                len(tenants),
            )
        return is_changed

    # --- writing

    async def append(
        self,
        event: JsonValue,
        *,
        partitions: Sequence[str],
        id: UUID | str | None = None,  # noqa: A002 - its name in the JSON message
        actor: str = "",
        client: str = "",
        scope: str = "",
        expected_position: int | None = None,
    ) -> EventVerdict:
        """Append an event and return its verdict once it is durable, like `submit(oncelog.event(…))`.

            verdict = await log.append({"type": "order.placed", "order": 17}, id=order_id, partitions=["orders"])
            receipt = verdict.unwrap()

        `event` is a JSON object with a `type`. `id` is a UUID that identifies the event. A call with the same `id` and
        the same content is a retry: it gets the receipt of the first call and writes nothing. Without an `id`, the log
        generates one, and each call appends a new event, even if the caller repeats it because an earlier answer was
        lost. The other parameters are those of `oncelog.event`.

        Raises CanonicalError for a malformed argument, and the errors of `submit`.
        """
        item = build_event(
            uuid4() if id is None else id,
            event,
            partitions,
            actor=actor,
            client=client,
            scope=scope,
            expected_position=expected_position,
        )
        return await self.submit(item)

    @overload
    async def submit(self, item: Submission[ReceiptT]) -> Committed | Replayed[ReceiptT] | Refused: ...

    @overload
    async def submit(self, item: Claim) -> Granted | Replayed[Receipt] | Refused: ...

    @overload
    async def submit(self, item: Renew) -> Granted | Refused: ...

    @overload
    async def submit(self, item: Release | OpenStream | SetMember | Acknowledge | SetCursor) -> Applied | Refused: ...

    @overload
    async def submit(self, item: Item) -> Verdict: ...

    async def submit(self, item: Item) -> Verdict:
        """Submit a write and return its verdict once it is durable: Committed, Replayed or Refused.

            verdict = await log.submit(oncelog.event(id, {"type": "order.placed"}, ["orders"]))
            if verdict.ok:
                print(verdict.receipt.position)

        `Committed` and `Replayed` have the receipt: where the write is stored. `Refused` has the reason. `unwrap`
        returns the receipt or raises RefusedError. Retry a write by submitting it again with the same identity.

        Raises StoreUnavailableError if the disk fails, and ClockJumpedError after a clock jump. The outcome is then
        unknown: submit the write again with the same identity.
        """
        if not self._has_policy(item):
            await self._policies.declare(item)
        outcome = self._committer.submit(item)
        return await outcome if isinstance(outcome, asyncio.Future) else outcome

    def submit_nowait(self, item: Item, receiver: VerdictSink[Verdict]) -> Verdict | None:
        """Submit a write without waiting. Return its verdict if it is already known, otherwise None. For servers.

        After None, the receiver gets the verdict once it is durable. Raises PolicyError for an undeclared policy.
        """
        if not self._has_policy(item):
            raise PolicyError("the policy must be declared when the log is opened")
        return self._committer.submit(item, receiver)

    def submit_many_nowait(
        self,
        items: Sequence[Item],
        receiver: VerdictSink[list[Verdict]],
        mode: Mode = Mode.EACH,
        *,
        is_admitted_whole: bool = False,
    ) -> list[Verdict] | None:
        """Submit several writes like `submit_many`, but without waiting, like `submit_nowait`."""
        items = tuple(items)
        if not all(map(self._has_policy, items)):
            raise PolicyError("the policy must be declared when the log is opened")
        return self._committer.submit_request(Request(items, mode, is_admitted_whole), receiver)

    async def _submit_work(self, item: Item) -> Verdict:
        """Like `submit`, but also works while the log is closing, so that running work can finish."""
        if not self._was_opened:
            self._check_open()
        if not self._policies.knows(item):
            await self._policies.declare(item)
        outcome = self._committer.submit(item)
        return await outcome if isinstance(outcome, asyncio.Future) else outcome

    @overload
    async def submit_many(
        self, items: Sequence[Submission[ReceiptT]], mode: Mode = Mode.EACH, *, is_admitted_whole: bool = False
    ) -> list[Committed | Replayed[ReceiptT] | Refused]: ...

    @overload
    async def submit_many(
        self, items: Sequence[Item], mode: Mode = Mode.EACH, *, is_admitted_whole: bool = False
    ) -> list[Verdict]: ...

    async def submit_many(
        self, items: Sequence[Item], mode: Mode = Mode.EACH, *, is_admitted_whole: bool = False
    ) -> Sequence[Verdict]:
        """Submit several writes and return their verdicts in order. `mode` sets how a refusal affects the other items.

        With `is_admitted_whole`, a rate limit or quota that refuses one new item refuses all new items.
        """
        items = _check_items(items)
        for item in items:
            if not self._has_policy(item):
                await self._policies.declare(item)
        future: asyncio.Future[list[Verdict]] = self._committer.create_future()
        verdicts = self._committer.submit_request(Request(items, mode, is_admitted_whole), future)
        return await future if verdicts is None else verdicts

    def recall(self, policy: Policy, scope: str, keys: Sequence[bytes]) -> list[Remembered] | None:
        """Return the cached answers for the keys, or None unless all are cached. For servers, after authorization."""
        self._check_open()
        return self._committer.recall(policy, scope, keys)

    async def erase(
        self,
        *,
        key: bytes | UUID | str | None = None,
        policy: Policy = EVENTS,
        scope: str | None = None,
        client: str = "",
        partition: str | None = None,
        stream: str | None = None,
        actor: str = APPLICATION_ACTOR,
    ) -> int:
        """Erase the record bodies of an identity, a partition or a stream. Return the number of erased bodies.

        Position, identity, fingerprint and hashes remain; a retry still gets its answer, marked as erased. Each
        transaction that erases bodies adds an audit record with the `actor`. `scope` is the scope of the key, as in
        `lookup`.
        """
        self._check_open()
        if (key is not None) + (partition is not None) + (stream is not None) != 1:
            raise ValueError("erase needs exactly one of key, partition and stream")
        if key is not None:
            if scope is None and policy.name == EVENTS.name:
                await self.lookup(key)  # raises LookupError if the id may belong to a tenant
            return await self._eraser.erase_identity(build_identity(policy, scope or "", client, key), actor)
        if stream is not None:
            return await self._eraser.erase_stream(stream, actor)
        return await self._eraser.erase_partition(partition or "", actor)

    async def compact(  # noqa: PLR0913 - all but the first are keyword arguments
        self,
        scope: str,
        *,
        upto: int | None = None,
        keep: int | None = None,
        limit: int = 2**53,
        tombstone_age_ms: int | None = None,
        after_row: tuple[str, str] = ("", ""),
        rows_max: int = 2**53,
        actor: str = APPLICATION_ACTOR,
    ) -> Compacted:
        """Drop a stream's delta bodies up to a sequence, or all but the newest `keep`; then drop old tombstones.

        Ids, sequences, hashes and existing rows remain. A call drops at most `limit` bodies, and continues where an
        earlier call stopped. The tombstone of a deleted row is dropped once the body of its DELETE is gone, the DELETE
        is older than `tombstone_age_ms` (default: `limits.tombstone_age_ms`), and every named consumer of the stream
        has read it. A call reads at most `rows_max` rows; to read more, pass `next_row` of the result as `after_row`.
        """
        self._check_open()
        if (upto is None) == (keep is None):
            raise ValueError("compact needs exactly one of upto and keep")
        age_ms = self._limits.tombstone_age_ms if tombstone_age_ms is None else tombstone_age_ms
        if type(age_ms) is not int or not 0 <= age_ms <= STORED_INTEGER_MAX:
            raise ValueError(f"tombstone_age_ms must be a whole number from 0 to {STORED_INTEGER_MAX}, not {age_ms!r}")
        return await self._eraser.compact(
            scope,
            upto=None if upto is None else check_integer(upto, "upto"),
            keep=0 if keep is None else check_integer(keep, "keep"),
            limit=check_integer(limit, "limit"),
            tombstone_age_ms=age_ms,
            after_row=after_row,
            rows_max=rows_max,
            actor=actor,
        )

    def watch_commits(self, watcher: Callable[[int, float], None]) -> None:
        """Call `watcher` after every group commit, with the number of writes and the duration. It must not raise."""
        self.watch_batches(lambda batch: watcher(batch.items, batch.duration_s))

    def watch_batches(self, watcher: Callable[[BatchReport], None]) -> None:
        """Call `watcher` after every group commit, with its measurements. It must not raise. For servers."""
        self._committer.on_batch = watcher

    def measure_latency(self) -> PauseLog:
        """Add phases and the times of requests to the reports of `watch_batches` from now on. For servers.

        Returns the log of pauses, to which the store adds its own.
        """
        self._committer.phases = PhaseRecorder()
        pauses = self._store.pauses if isinstance(self._store, SqliteStore) else PauseLog()
        pauses.is_on = True
        return pauses

    async def wait_idle(self) -> None:
        """Wait until all accepted writes have a verdict."""
        await self._committer.wait_idle()

    @property
    def queue_length(self) -> int:
        """Number of writes that are waiting to be committed."""
        return self._committer.queue_length

    @property
    def queue_age_s(self) -> float:
        """How long the oldest write without a verdict has waited, in seconds. For servers."""
        return self._committer.queue_age_s

    @property
    def failed_batches(self) -> int:
        """How many group commits the store could not make durable. For servers."""
        return self._committer.failures

    @property
    def replays(self) -> ReplayCounts:
        """How many retries got the original receipt, by where it was found. For servers."""
        return self._committer.replays

    # --- named consumers

    async def commit_cursor(
        self, consumer: str, cursor: int | Cursor | str | None, *, stream: str = "", rewind: bool = False
    ) -> Applied | Refused:
        """Store a consumer's cursor in the log. None removes it.

        A cursor before the stored one is refused unless `rewind` is set.
        """
        position = None if cursor is None else await resolve_cursor(self._store, cursor, stream or None)
        return await self.submit(SetCursor(consumer, position, stream, rewind))

    async def confirm_clock(self) -> None:
        """Accept the current wall-clock time after a clock jump has stopped new writes."""
        await self._open_store.confirm_clock()

    # --- inside

    def _has_policy(self, item: Item) -> bool:
        if not self._is_open:
            self._check_open()
        return self._policies.knows(item)

    def _on_commit(self, result: BatchResult) -> None:
        if not result.changes.is_empty:
            self._tailers.notify_commit(result.changes)
            self._count_evictions(result)
        if not self._cache.is_empty:
            self._cache_updater.start()

    def _count_evictions(self, result: BatchResult) -> None:
        interval, before = self._store.settings.eviction_interval, self._evictions
        for block in result.sealed.blocks:
            last = block.first_position + block.count - 1
            self._evictions += last // interval - (block.first_position - 1) // interval
        self._evicted_clients += result.evicted_clients
        if self._evictions > before or result.evicted_clients:
            logger.debug(
                "%d evictions; %d entries of forgotten clients deleted",
                self._evictions - before,
                result.evicted_clients,
            )


def open_log(  # noqa: PLR0913 - all but the first are keyword arguments
    path: str | os.PathLike[str],
    *,
    policies: Sequence[Policy] = (),
    validate: Validate | None = None,
    settings: Settings | RequestedSettings | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    room: DiskLimits | None = None,
    tenants: Sequence[Tenant] | None = None,
    actor: str = APPLICATION_ACTOR,
    file_mode: int = OWNER_ONLY,
    tracing: "bool | TracerProvider" = False,
) -> Log:
    """Return the log in the file at `path`, for `async with`. Without an event loop, use `open_blocking`.

        async with oncelog.open("app.db") as log:
            await log.append({"type": "order.placed", "order": 17}, id=order_id, partitions=["orders"])
            page = await log.read(partition="orders")

    Entering the `async with` block opens the log, and creates the file if it does not exist. Any number of processes
    may open the same file. `:memory:` is a log that is lost when it is closed. An address such as
    `postgresql://user@host/database` selects a log in a database (`pip install oncelog[postgres]`).

    `policies` are the policies of the application, and `validate` checks its new writes. `settings` applies only to a
    new log. `room` limits disk usage. `tenants` replaces the quotas of the log (None keeps them), and `actor` is
    recorded as the author of that change. `file_mode` is the mode of a new file: 0o600, or 0o640 or 0o660 to give a
    group access.

    With `tracing`, the log creates OpenTelemetry spans and stores trace contexts with the records
    (`pip install oncelog[opentelemetry]`). True selects the tracer provider of the process.

    Raises SettingsError for an unsupported address or file mode.
    """
    _check_arguments(path, settings, limits, room)
    limits = limits or Limits()
    store = _build_store(os.fspath(path), settings, limits, clock, check_file_mode(file_mode))
    return Log(
        store,
        policies=policies,
        validate=validate,
        limits=limits,
        clock=clock,
        room=room,
        tenants=tenants,
        actor=actor,
        tracing=tracing,
    )


def _check_arguments(path: object, settings: object, limits: object, room: object) -> None:
    """Raise TypeError for an argument of a wrong type, before it fails in a place that does not name it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of a file, or postgresql://…, not {type(path).__name__}")
    for name, value, kinds in (
        ("settings", settings, Settings | RequestedSettings),
        ("limits", limits, Limits),
        ("room", room, DiskLimits),
    ):
        if value is not None and not isinstance(value, kinds):
            expected = kinds.__name__ if isinstance(kinds, type) else Settings.__name__
            raise TypeError(f"{name} must be oncelog.{expected}(…) or None, not {type(value).__name__}")


def _check_items(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return items as a tuple. Raises TypeError for a single item."""
    if isinstance(items, Item):
        raise TypeError("items must be a list of items, not one item: use submit for a single item")
    return tuple(items)


open_log.__qualname__ = "oncelog.open"  # errors about its arguments show the public name


def _build_store(
    path: str, settings: Settings | RequestedSettings | None, limits: Limits, clock: Clock | None, file_mode: int
) -> Store:
    jump_ms_max = limits.clock_jump_ms_max
    if is_address(path):
        timeouts_ms = {name: getattr(limits, f"postgres_{name}") for name in POSTGRES_TIMEOUTS}
        return create_postgres_store(path, settings, clock=clock, jump_ms_max=jump_ms_max, timeouts_ms=timeouts_ms)
    check_scheme(path)
    driver = MemoryDriver() if path == ":memory:" else SqliteDriver(file_mode)
    return SqliteStore(path, settings, clock=clock, jump_ms_max=jump_ms_max, driver=driver)
