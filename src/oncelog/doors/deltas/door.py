"""What the deltas door does, whatever the wire: who may do what, what is asked, and what a verdict is called there.

Nothing is decided here. A push is read, and its ids are made again; what of it is new, known or refused, `core.plan`
says.
"""

import asyncio
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from oncelog import codes
from oncelog.core.canonical import INTEGER_MAX, canonical_text
from oncelog.core.deltas import (
    GATEWAY_CHARACTERS_MAX,
    PUSH_DELTAS_MAX,
    ROW_ID_CHARACTERS_MAX,
    DeltaJson,
    Pushed,
    WrongIdError,
    are_canonical,
    deltas_scope,
    demand_identity,
    gateway_fault,
    is_identifier,
    op_name,
    read_plain_push,
    read_push,
    row_delta,
    submission_of,
)
from oncelog.core.hlc import parse_hlc, wall_ms
from oncelog.core.limits import CLOCK_DRIFT_MS_MAX
from oncelog.core.merge import Row
from oncelog.core.policy import DELTAS
from oncelog.core.values import (
    Committed,
    Mode,
    Rate,
    Reason,
    Record,
    Refused,
    Remembered,
    Replayed,
    Submission,
    Verdict,
)
from oncelog.doors.entrance import Entrance
from oncelog.doors.faults import NOT_NOW, DoorError, error_of, not_now, telling
from oncelog.doors.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX, LONG_FRAME_BYTES, DoorLimits
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.engine.committer import size_of
from oncelog.engine.cursors import Compacted
from oncelog.engine.log import Log
from oncelog.errors import CanonicalError, HistoryChangedError, OncelogError

COMPACT: Final = "compact"
"""What a gateway's stream is called in a grant, with this behind it, for those who may compact it."""
COMMITTED: Final = "committed"
KNOWN: Final = "known"
KNOWN_UNDER_ANOTHER_OP: Final = "known_under_another_op"
_CODES: Final = {
    Reason.CLOCK_DRIFT: codes.CLOCK_DRIFT,
    Reason.INVALID: codes.INVALID,
    Reason.TOO_MANY_COLUMNS: codes.INVALID,
    Reason.ROW_TOO_LARGE: codes.INVALID,
}
"""The one table from the reasons of a refusal to the words of this wire. Others come at a bad moment (`NOT_NOW`) or
are faults of the request."""
T = TypeVar("T")

Result = tuple[str, int, bool]
"""Of a pushed delta: its id, its sequence, and whether it was known."""


class Pulled(Struct, frozen=True):
    """A page of deltas; or none, where they are in a snapshot only."""

    deltas: list[Record]
    cursor: int
    has_more: bool
    is_snapshot: bool = False


class Snapshot(Struct, frozen=True):
    """A page of rows with their stamps, and after which delta to go on when all pages have been read."""

    rows: list[tuple[str, str, Row]]
    cursor: int
    following: str
    horizon: int | None
    """The tombstone horizon: None if no deleted row was ever dropped."""


class DeltasDoor:
    """One for a server. Every call raises DoorError for what is no success."""

    def __init__(self, log: Log, entrance: Entrance, *, limits: DoorLimits, counts: Counts) -> None:
        self.log = log
        self.entrance = entrance
        self.limits = limits
        self.counts = counts
        per_second = limits.new_events_per_second_max
        # A push is taken as a whole: with less than its size at once a large one would be put off for ever.
        self._rate = Rate(per_second, burst=max(per_second, PUSH_DELTAS_MAX)) if per_second else None

        self._previous_epochs: tuple[str, ...] | None = None

    async def previous_epochs(self) -> tuple[str, ...]:
        """Return the epochs that this history continues. They are read once: an open log keeps its epoch."""
        if self._previous_epochs is None:
            self._previous_epochs = await self.log.previous_epochs()
        return self._previous_epochs

    # --- push

    def demand_writable(self, gateway: str, principal: Principal) -> str:
        """The stream of a gateway that may be pushed to. Raises DoorError."""
        scope = read_gateway(gateway)
        if not principal.grants.may_write(scope):
            raise _forbidden("not be written")
        return scope

    async def push(self, scope: str, body: bytes, principal: Principal) -> list[Result]:
        """Takes all of a push, or nothing of it."""
        own = self.entrance.client_of(principal)
        plain = await _beside(len(body), lambda: read_plain_push(body))
        try:
            if plain is not None:
                _demand_pushable(plain.deltas, own)
                known = self.log.recall(DELTAS, scope, plain.keys)
                if known is not None:
                    return self._known(plain.deltas, known)
            deltas, submissions = await _beside(
                len(body), lambda: self._submissions(scope, _checked(plain, body, own), principal)
            )
            # In another spelling it is answered from memory too: it must wait neither for a commit nor for room.
            known = self.log.recall(DELTAS, scope, [one.key for one in submissions]) if plain is None else None
            if known is not None:
                return self._known(deltas, known)
            verdicts = await self.log.submit_many(submissions, Mode.ALL)
        except OncelogError as error:
            raise error_of(error) from error
        if verdicts and isinstance(verdicts[0], Refused):
            raise _refused(verdicts, deltas, submissions)  # of all or nothing
        return self._results(deltas, verdicts)

    def _submissions(
        self, scope: str, pushed: Pushed, principal: Principal
    ) -> tuple[list[DeltaJson], list[Submission]]:
        value_bytes_max, actor, rate = self.limits.column_value_bytes_max, principal.actor, self._rate
        submissions = []
        for index, (delta, key, body) in enumerate(zip(pushed.deltas, pushed.keys, pushed.bodies, strict=True)):
            try:
                change = row_delta(delta, key, "", value_bytes_max)
            except CanonicalError as error:
                raise _bad_delta(error, index) from error
            submissions.append(submission_of(scope, change, body, actor=actor, rate=rate))
        return pushed.deltas, submissions

    def _known(self, given: Sequence[DeltaJson], known: Sequence[Remembered]) -> list[Result]:
        """From memory: nothing is decided, and nothing is written."""
        other_op = sum([one.fingerprint != op_name(delta.op) for one, delta in zip(known, given, strict=True)])
        self.counts.deltas[KNOWN] += len(given) - other_op
        self.counts.deltas[KNOWN_UNDER_ANOTHER_OP] += other_op
        return [(delta.delta_id, one.receipt.sequence, True) for one, delta in zip(known, given, strict=True)]

    def _results(self, given: Sequence[DeltaJson], verdicts: Sequence[Verdict]) -> list[Result]:
        results: list[Result] = []
        committed = other_op = 0
        for delta, verdict in zip(given, verdicts, strict=True):
            match verdict:
                case Replayed(receipt, mismatch):
                    other_op += mismatch
                    results.append((delta.delta_id, receipt.sequence if receipt else 0, True))
                case Committed(receipt):
                    committed += 1
                    results.append((delta.delta_id, receipt.sequence, False))
                case _:
                    raise TypeError(f"a delta was answered with {verdict!r}")
        self.counts.deltas[COMMITTED] += committed
        self.counts.deltas[KNOWN] += len(results) - committed - other_op
        self.counts.deltas[KNOWN_UNDER_ANOTHER_OP] += other_op
        return results

    # --- read

    def demand_readable(self, gateway: str, principal: Principal) -> str:
        """The stream of a gateway that may be read. Raises DoorError."""
        scope = read_gateway(gateway)
        if not principal.grants.may_read(scope):
            raise _forbidden("not be read")
        return scope

    async def pull(self, scope: str, since: int, limit: int | None, epoch: str) -> Pulled:
        """Deltas after a sequence, in the order of their arrival (DE-9)."""
        self._demand_epoch(epoch)
        with _telling_history():
            reading = await self.log.read(stream=scope, after=since, limit=self._page_size(limit))
        deltas, is_snapshot = until_compacted(reading.records)
        if is_snapshot and not deltas:
            await self._demand_tombstones(scope, since)
            return Pulled([], since, has_more=True, is_snapshot=True)
        self.counts.deliveries += len(deltas)
        if is_snapshot:
            return Pulled(deltas, deltas[-1].sequence, has_more=True)
        return Pulled(deltas, reading.cursor.position, reading.has_more)

    async def demand_cursor(self, scope: str, since: int, epoch: str) -> None:
        """Raises DoorError for a cursor that is not of this history."""
        self._demand_epoch(epoch)
        with _telling_history():
            await self.log.read(stream=scope, after=since, upto=since, limit=1)

    async def follow(self, scope: str, since: int) -> AsyncGenerator[Sequence[Record] | None, None]:
        """Deltas after a sequence, then those to come. None, and nothing more, where they are in a snapshot only."""
        async with aclosing(self.log.follow_several(stream=scope, after=since)) as several:
            async for records in several:
                deltas, is_snapshot = until_compacted(records)
                if deltas:
                    self.counts.deliveries += len(deltas)
                    since = deltas[-1].sequence
                    yield deltas
                if is_snapshot:
                    await self._demand_tombstones(scope, since)
                    yield None
                    return

    async def _demand_tombstones(self, scope: str, since: int) -> None:
        """Raise DoorError if the snapshot may lack a tombstone that the reader has not read.

        The reader may have a row whose tombstone was dropped, so it must replace its rows by the snapshot. Clients of
        all versions do that for this code. A reader without rows, at 0, has nothing to replace.
        """
        with telling():
            newest, horizon = await self.log.books.newest_and_horizon(scope)
        if since and horizon is not None:
            message = (
                "since: is older than the compaction, which has dropped deleted rows; replace all rows by those of the "
                "snapshot, and go on from its cursor"
            )
            details = {"epoch": self.log.epoch, "newest": newest, "snapshot": True}
            raise DoorError(codes.HISTORY_CHANGED, message, field="since", **details)

    async def rows(self, scope: str, table: str, after: str, limit: int | None) -> tuple[list[tuple[str, Row]], str]:
        """The rows of a table that exist, and after which to go on; "" behind the last."""
        _check_table(table)
        with telling():
            page = await self.log.books.rows(scope, table=table, after=(table, after), limit=self._page_size(limit))
        existing = [(row_id, row) for _, row_id, row in page.rows if row.exists]
        return existing, page.rows[-1][1] if page.has_more else ""

    async def row(self, scope: str, table: str, row_id: str) -> list[tuple[str, Row]]:
        """One row, if it exists."""
        _check_table(table)
        check_row_id(row_id, "rowId")
        with telling():
            row = await self.log.books.row(scope, table, row_id)
        return [] if row is None or not row.exists else [(row_id, row)]

    async def snapshot(self, scope: str, page_token: str, limit: int | None) -> Snapshot:
        """A page of all rows, deleted ones too. The cursor is that of the first page: rows may be newer than it.

        Raises DoorError if tombstones were dropped since the first page: a reader that misses one of them would restore
        its row with an older delta behind the cursor.
        """
        books = self.log.books
        with telling():
            if page_token:
                cursor, horizon, table, row_id = _place_of(page_token)
            else:
                table = row_id = ""
                cursor, horizon = await books.newest_and_horizon(scope)
            page = await books.rows(scope, after=(table, row_id), limit=self._page_size(limit))
            if await books.horizon(scope) != horizon:
                message = (
                    "page: deleted rows were dropped while the snapshot was read; read it again from its first page"
                )
                raise DoorError(codes.HISTORY_CHANGED, message, field="page", epoch=self.log.epoch, snapshot=True)
        following = _token(cursor, horizon, *page.rows[-1][:2]) if page.has_more else ""
        return Snapshot(page.rows, cursor, following, horizon)

    # --- compaction

    def demand_compactable(self, gateway: str, principal: Principal) -> str:
        """The stream of a gateway that may be compacted. Raises DoorError."""
        scope = read_gateway(gateway)
        if not principal.grants.may_write(f"{scope}/{COMPACT}"):
            raise _forbidden("not be compacted")
        return scope

    async def compact(self, scope: str, body: bytes, actor: str) -> Compacted:
        """Drop the bodies of old deltas, then old deleted rows; as many as one request may."""
        asked = _read_compact(body)
        with telling():
            return await self.log.compact(
                scope,
                upto=asked.upto,
                keep=asked.keep,
                limit=COMPACT_DELTAS_MAX,
                tombstone_age_ms=asked.tombstone_age_ms,
                after_row=asked.after_row,
                rows_max=COMPACT_ROWS_MAX,
                actor=actor,
            )

    # --- cursors

    def _demand_epoch(self, epoch: str) -> None:
        if epoch and epoch != self.log.epoch:
            message = "epoch: is that of another history; read the snapshot, and go on from its cursor"
            raise DoorError(codes.HISTORY_CHANGED, message, field="epoch", epoch=self.log.epoch)

    def _page_size(self, asked: int | None) -> int:
        limits = self.limits
        return max(1, min(limits.page_events_default if asked is None else asked, limits.page_events_max))


@contextmanager
def _telling_history() -> Iterator[None]:
    """As `telling`, and of a cursor that is ahead of the log."""
    with telling():
        try:
            yield
        except HistoryChangedError as error:
            message = f"since: must be at most {error.newest}, the newest; read the snapshot, and go on from its cursor"
            details = {"epoch": error.epoch, "newest": error.newest}
            raise DoorError(codes.HISTORY_CHANGED, message, field="since", **details) from error


async def _beside(size: int, work: Callable[[], T]) -> T:
    """What is long is done in a thread: others must not wait for it."""
    return await asyncio.to_thread(work) if size > LONG_FRAME_BYTES else work()


def _checked(plain: Pushed | None, body: bytes, own: str | None) -> Pushed:
    """The deltas of a push, whose ids are made here (DE-3). Raises DoorError."""
    if plain is not None and are_canonical(plain.deltas):
        return plain
    try:
        pushed = read_push(body)
    except CanonicalError as error:
        raise _bad(error) from error
    _demand_pushable(pushed.deltas, own)
    for index, (delta, key) in enumerate(zip(pushed.deltas, pushed.keys, strict=True)):
        if delta.delta_id != key.hex():
            try:
                row_delta(delta, key, "")  # what it says may be no delta at all: that is told first
                demand_identity(delta, key, "")
            except CanonicalError as error:
                raise _bad_delta(error, index) from error
    return pushed


def _demand_pushable(deltas: Sequence[DeltaJson], own: str | None) -> None:
    """Raises DoorError for too many, and for one of another client; `own` is None where everybody may be anybody."""
    if len(deltas) > PUSH_DELTAS_MAX:
        message = f"deltas: must be at most {PUSH_DELTAS_MAX}, not {len(deltas)}"
        raise DoorError(codes.TOO_LARGE, message, field="deltas", limit=PUSH_DELTAS_MAX)
    if own is None:
        return
    for index, delta in enumerate(deltas):
        if delta.client_id != own:
            message = f"deltas[{index}].clientId: must be that of the credential"
            raise DoorError(codes.FORBIDDEN, message, field="clientId", index=index)


def until_compacted(records: Sequence[Record]) -> tuple[list[Record], bool]:
    """The deltas among them up to the first without a body, and whether there is one."""
    deltas: list[Record] = []
    for record in records:
        if record.policy != DELTAS.name:
            continue
        if record.erased:
            return deltas, True
        deltas.append(record)
    return deltas, False


@lru_cache(maxsize=4096)  # the same come again and again
def read_gateway(name: str) -> str:
    """The stream of a gateway. Raises DoorError."""
    fault = gateway_fault(name)
    if fault is not None:
        raise DoorError(codes.BAD_REQUEST, f"gateway: {fault}", field="gateway", limit=GATEWAY_CHARACTERS_MAX)
    return deltas_scope(name)


def _refused(verdicts: Sequence[Verdict], given: Sequence[DeltaJson], submissions: Sequence[Submission]) -> DoorError:
    """What is told of the one at fault; the others were not looked at."""
    index, refused = next(
        (index, verdict)
        for index, verdict in enumerate(verdicts)
        if isinstance(verdict, Refused) and verdict.reason is not Reason.NOT_PROCESSED
    )
    if refused.field == "items":  # none of them is at fault: they are more than the log takes at once
        return DoorError(codes.TOO_LARGE, f"deltas: {refused.message.removeprefix('items ')}", field="deltas")
    if refused.reason is Reason.MALFORMED and refused.field == "body":  # all are told it, and one is too long
        index = max(range(len(submissions)), key=lambda place: size_of(submissions[place]))
        return DoorError(codes.TOO_LARGE, f"deltas[{index}]: {refused.message}", index=index)
    reason = refused.reason
    if reason is Reason.UNSTORABLE and len(given) > 1:
        # The store does not say which one. Clients of all versions divide a push that gets this code without an index.
        message = (
            f"deltas: the store cannot hold one of these {len(given)}; nothing was written. Push fewer at a time: "
            "pushed alone, the delta at fault is refused with its index"
        )
        return DoorError(codes.TOO_LARGE, message, field="deltas")
    if reason in NOT_NOW:
        return not_now(refused)
    code = _CODES.get(reason, codes.BAD_REQUEST)
    if reason is Reason.CLOCK_DRIFT:
        ahead_ms = wall_ms(parse_hlc(given[index].hlc)) - refused.current
        return DoorError(
            code,
            f"deltas[{index}].hlc: {refused.message}",
            index=index,
            server_time_ms=refused.current,
            retry_after_ms=max(1, ahead_ms - CLOCK_DRIFT_MS_MAX),
        )
    separator = "." if reason is Reason.INVALID else ": "  # a schema names the member, as the path goes on
    return DoorError(code, f"deltas[{index}]{separator}{refused.message}", index=index)


def _bad_delta(error: CanonicalError, index: int) -> DoorError:
    """The same of one that is no delta: its path is that inside the delta."""
    message = f"deltas[{index}]{error.path}: {error.reason}"
    if isinstance(error, WrongIdError):
        return DoorError(codes.DELTA_ID_MISMATCH, message, index=index, expected=error.expected)
    return DoorError(codes.BAD_REQUEST, message, index=index)


def _bad(error: CanonicalError) -> DoorError:
    field = error.path.removeprefix("$").removeprefix(".") or "body"
    found = _INDEX.match(field)
    details = {} if found is None else {"index": int(found[1])}
    return DoorError(codes.BAD_REQUEST, f"{field}: {error.reason}", **details)


_INDEX: Final = re.compile(r"deltas\[(\d+)\]")


def _forbidden(what: str) -> DoorError:
    return DoorError(codes.FORBIDDEN, f"gateway: may {what}", field="gateway")


def _check_table(table: str) -> None:
    if not is_identifier(table):
        raise DoorError(
            codes.BAD_REQUEST, "table: must be an identifier (letters, digits and _, no digit first)", field="table"
        )


def check_row_id(row_id: str, field: str) -> None:
    """Raises DoorError for what no row is called; none is named by an empty one."""
    if len(row_id) > ROW_ID_CHARACTERS_MAX or "\0" in row_id:
        message = f"{field}: must have at most {ROW_ID_CHARACTERS_MAX} characters, and no U+0000"
        raise DoorError(codes.BAD_REQUEST, message, field=field, limit=ROW_ID_CHARACTERS_MAX)


# --- smaller messages ---------------------------------------------------------------------------------------


class _CompactJson(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    upto: int | UnsetType = UNSET
    keep: int | UnsetType = UNSET
    tombstone_age_ms: int | UnsetType = UNSET
    page: str = ""


class _Compact(Struct, frozen=True):
    """What a request to compact asks for."""

    upto: int | None
    keep: int | None
    tombstone_age_ms: int | None
    after_row: tuple[str, str]


_COMPACT: Final = msgspec.json.Decoder(_CompactJson)
_PLACE: Final = msgspec.json.Decoder(tuple[int, int | None, str, str])


def _read_compact(body: bytes) -> _Compact:
    try:
        given = _COMPACT.decode(canonical_text(body))
    except CanonicalError as error:
        raise _bad(error) from error
    except msgspec.ValidationError as error:
        raise DoorError(codes.BAD_REQUEST, f"body: {error}") from error
    upto, keep, age_ms = (
        None if number is UNSET else number for number in (given.upto, given.keep, given.tombstone_age_ms)
    )
    if (upto is None) == (keep is None):
        raise DoorError(codes.BAD_REQUEST, "body: must have one of upto and keep")
    for field, number in (("upto", upto), ("keep", keep), ("tombstoneAgeMs", age_ms)):
        if number is not None and not 0 <= number <= INTEGER_MAX:
            raise DoorError(codes.BAD_REQUEST, f"{field}: must be a whole number from 0 to 2^53−1", field=field)
    return _Compact(upto, keep, age_ms, _place_of(given.page)[2:] if given.page else ("", ""))


def row_token(place: tuple[str, str] | None) -> str:
    """Where a compaction goes on to look for deleted rows, for its next request; empty if all rows were read."""
    return "" if place is None else _token(0, None, *place)


def _token(cursor: int, horizon: int | None, table: str, row_id: str) -> str:
    return urlsafe_b64encode(msgspec.json.encode((cursor, horizon, table, row_id))).decode()


def _place_of(token: str) -> tuple[int, int | None, str, str]:
    try:
        cursor, horizon, table, row_id = _PLACE.decode(urlsafe_b64decode(token.encode("ascii")))
    except (ValueError, msgspec.MsgspecError) as error:
        raise DoorError(codes.BAD_REQUEST, "page: must be one that a page has given", field="page") from error
    if cursor < 0 or "\0" in table + row_id:
        raise DoorError(codes.BAD_REQUEST, "page: must be one that a page has given", field="page")
    return cursor, horizon, table, row_id
