"""Audit records of a log (CO-43): a queue of actions to commit, and pages of audit records."""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.canonical import JsonValue, canonical
from oncelog.core.limits import ACT_DETAILS_BYTES_MAX
from oncelog.core.rules.audit import AuditEntry, decode_audit_entry
from oncelog.core.tenants import Tenant
from oncelog.core.values import Committed, Item, Reason, Record, RecordAct, Refused, Replayed, Verdict
from oncelog.engine import logger
from oncelog.errors import ClockJumpedError, DiskFullError, HistoryChangedError, OncelogError
from oncelog.storage.clock import Clock

QUEUED_ACTS_MAX: Final = 1000
"""Maximum number of acts that wait to be committed, for example while the disk is full. Further acts appear only in the
process's log output."""
PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 5.0
CLOSE_S: Final = 2.0
"""How long `close` tries to record the waiting acts."""
SCAN_RECORDS_MAX: Final = 1000
"""Maximum number of audit records that one page reads, including records that do not match."""
LOG_ACTOR: Final = "system:log"
"""Actor for acts by the log itself, such as refusing new writes while the disk is full."""
UNRECORDABLE: Final = (ClockJumpedError, DiskFullError)
"""Errors of a transaction that might succeed without its audit record."""
NAMED_TENANTS_MAX: Final = 20
"""Maximum number of tenants listed in the record of a quota change. Its counts include all tenants."""
NAME_CHARACTERS_SHOWN: Final = 64
_READ_RECORDS: Final = 200
_CURSOR_CHARACTERS_MAX: Final = 2**20
_SEPARATOR: Final = "~"
_EPOCH: Final = re.compile("[0-9a-f]+")


class ActQueue:
    """Commits acts in order of arrival, and retries until each is recorded.

    The queue is in memory: if the process exits, a waiting act remains only in the server's log output.
    """

    def __init__(self, submit: Callable[[Item], Awaitable[Verdict]], clock: Clock, is_full: Callable[[], bool]) -> None:
        self._submit = submit
        self._is_full = is_full
        self._clock = clock
        self.waiting: deque[RecordAct] = deque()
        """Acts that are not yet recorded."""
        self._task: asyncio.Task[None] | None = None
        self._is_started = False
        self._is_closing = False

    def put(self, act: RecordAct) -> None:
        """Queue an act with the current time. Does not wait for its commit."""
        if len(self.waiting) >= QUEUED_ACTS_MAX:
            logger.error("%s by %s was not recorded: %d acts are waiting", act.act, act.actor, QUEUED_ACTS_MAX)
            return
        self.waiting.append(act if act.time_ms else replace(act, time_ms=self._clock.wall_ms()))
        if self._is_started:
            self._ensure_running()

    def start(self) -> None:
        """Start committing the queued acts. The log calls this method once it is open."""
        self._is_started = True
        self._ensure_running()

    def _ensure_running(self) -> None:
        if self.waiting and self._task is None:
            with suppress(RuntimeError):  # the log's event loop has been closed
                self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Try once more to record the waiting acts, for at most `CLOSE_S`."""
        self._is_closing = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if self._task is not None:
                self._task.cancel()
        for act in self.waiting:
            logger.error("%s by %s was not recorded: the log was closed before its commit", act.act, act.actor)

    async def _run(self) -> None:
        pause_s, has_logged = PAUSE_S_MIN, False
        try:
            while self.waiting:
                problem = await self._try_record(self.waiting[0])
                if problem is None:
                    self.waiting.popleft()
                    pause_s, has_logged = PAUSE_S_MIN, False
                    continue
                if not has_logged:
                    has_logged = True
                    logger.warning("%d acts are waiting to be recorded: %s", len(self.waiting), problem)
                await asyncio.sleep(PAUSE_S_MIN if self._is_closing else pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        finally:
            self._task = None

    async def _try_record(self, act: RecordAct) -> str | None:
        """Return why an act cannot be recorded now, or None if it is recorded or can never be recorded."""
        if self._is_full():
            return "the disk is full"  # a failing commit would fail the other writes of its batch
        try:
            verdict = await self._submit(act)
        except OncelogError as error:
            return str(error)
        if isinstance(verdict, Committed | Replayed):
            return None
        if isinstance(verdict, Refused) and verdict.reason is Reason.MALFORMED:
            logger.error("%s by %s was not recorded: %s %s", act.act, act.actor, verdict.field, verdict.message)
            return None
        return verdict.message if isinstance(verdict, Refused) else repr(verdict)


def describe_quota_change(before: Sequence[Tenant], after: Sequence[Tenant]) -> dict[str, JsonValue]:
    """Describe a quota change: how many tenants were added, changed and removed, and the names of some of them.

    `limits` has the old and new value of each limit that changed. The limits of an absent tenant are all 0.
    """
    old, new = {tenant.prefix: tenant for tenant in before}, {tenant.prefix: tenant for tenant in after}
    groups = {
        "added": sorted(new.keys() - old.keys()),
        "changed": sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
        "removed": sorted(old.keys() - new.keys()),
    }
    named = [name for names in groups.values() for name in names][:NAMED_TENANTS_MAX]
    shortened = [name[:NAME_CHARACTERS_SHOWN] for name in named]
    counts: dict[str, JsonValue] = {group: len(names) for group, names in groups.items()}
    details: dict[str, JsonValue] = {**counts, "tenants": [*shortened], "limits": {}}
    limits: dict[str, JsonValue] = {}
    for prefix, name in zip(named, shortened, strict=True):
        changed = _diff_limits(old.get(prefix) or Tenant(prefix), new.get(prefix) or Tenant(prefix))
        if changed:
            longer: dict[str, JsonValue] = {**details, "limits": {**limits, name: changed}}
            if name in limits or len(canonical(longer)) > ACT_DETAILS_BYTES_MAX:
                break  # truncated names can be equal, and one entry cannot show the limits of two tenants
            limits[name], details = changed, longer
    return details


def _diff_limits(old: Tenant, new: Tenant) -> dict[str, JsonValue]:
    pairs = {name: [getattr(old, name), getattr(new, name)] for name in Tenant.__struct_fields__}
    return {name: [before, after] for name, (before, after) in pairs.items() if before != after}


class AuditFilter(Struct, frozen=True, kw_only=True):
    """Selects acts. An empty field matches all acts."""

    act: str = ""
    actor: str = ""
    stream: str = ""
    target: str = ""
    since_ms: int = 0
    until_ms: int | None = None
    """End of the time range, exclusive."""

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether an act is selected."""
        return (
            self.act in ("", entry.act)
            and self.actor in ("", entry.actor)
            and self.stream in ("", entry.scope)
            and self.target in ("", entry.target)
            and self.since_ms <= entry.time_ms
            and (self.until_ms is None or entry.time_ms < self.until_ms)
        )


def entry_to_json(entry: AuditEntry) -> dict[str, JsonValue]:
    """Convert an act to JSON for the command line and HTTP."""
    return {
        "time_ms": entry.time_ms,
        "act": entry.act,
        "actor": entry.actor,
        "stream": entry.scope,
        "target": entry.target,
        "details": dict(entry.details),
        "lane": entry.lane,
        "position": entry.position,
        "log_time_ms": entry.log_time_ms,
        "erased": entry.erased,
    }


class AuditPage(Struct, frozen=True):
    """A page of acts in log-time order, and where the next page begins."""

    entries: list[AuditEntry]
    after: Mapping[int, int]
    """The position in each lane up to which audit records were read."""
    has_more: bool
    """Whether more records may follow. This can be true for an empty page, because some records do not match."""


class AuditScan:
    """Collects matching acts from several reads into a page."""

    def __init__(self, after: Mapping[int, int], limit: int, audit_filter: AuditFilter) -> None:
        self.after = dict(after)
        """The position in each lane after which to read."""
        self._limit = limit
        self._filter = audit_filter
        self._entries: list[AuditEntry] = []
        self._read_count = 0

    @property
    def next_read_count(self) -> int:
        """How many records to read next."""
        return min(_READ_RECORDS, SCAN_RECORDS_MAX - self._read_count)

    def add(self, records: Sequence[Record]) -> AuditPage | None:
        """Add the result of a read with the limit `next_read_count`, and return the page once it is complete."""
        is_last = len(records) < self.next_read_count
        for record in records:
            entry = decode_audit_entry(record)
            if self._filter.matches(entry):
                if len(self._entries) == self._limit:
                    return AuditPage(self._entries, self.after, has_more=True)
                self._entries.append(entry)
            self.after[record.lane] = record.position
            self._read_count += 1
        is_complete = is_last or self.next_read_count <= 0
        return AuditPage(self._entries, self.after, has_more=not is_last) if is_complete else None


def encode_cursor(epoch: str, after: Mapping[int, int]) -> str:
    """Encode a cursor: the epoch, and a position for each lane."""
    return _SEPARATOR.join([epoch, *(f"{lane}-{position}" for lane, position in sorted(after.items()))])


def decode_cursor(text: str, epoch: str, lanes: int) -> dict[int, int]:
    """Decode a cursor. Raises ValueError if it is malformed, or HistoryChangedError if it is from a different epoch."""
    if not text:
        return {}
    of_epoch, *places = text[:_CURSOR_CHARACTERS_MAX].split(_SEPARATOR)
    after: dict[int, int] = {}
    for place in places:
        lane, dash, position = place.partition("-")
        if not (dash and place.isascii() and lane.isdecimal() and position.isdecimal()) or len(place) > 32:
            raise ValueError("must be a cursor of an earlier page")
        after[int(lane)] = min(int(position), 2**48)
    is_epoch = of_epoch == epoch or (len(of_epoch) == len(epoch) and _EPOCH.fullmatch(of_epoch) is not None)
    if not is_epoch or len(after) != len(places) or max(after, default=0) > lanes:
        raise ValueError("must be a cursor of an earlier page")
    if of_epoch != epoch:
        raise HistoryChangedError("the cursor belongs to a different history; read from the beginning", epoch, 0)
    return after
