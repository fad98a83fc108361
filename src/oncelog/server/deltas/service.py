"""Transport-independent part of the Deltas API: authorizes requests, calls the log, and turns verdicts into results.

The service decodes a push and computes its ids. `core.plan` decides which deltas are new, known or refused.
"""

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from oncelog import error_codes
from oncelog.core.canonical import INTEGER_MAX
from oncelog.core.deltas import (
    GATEWAY_CHARACTERS_MAX,
    OP_FINGERPRINTS,
    PUSH_DELTAS_MAX,
    DecodedPush,
    DeltaJson,
    WrongIdError,
    build_submission,
    check_delta_id,
    decode_canonical_push,
    decode_push,
    deltas_scope,
    find_gateway_fault,
    has_canonical_columns,
    to_row_delta,
)
from oncelog.core.hlc import parse_hlc, wall_ms
from oncelog.core.limits import CLOCK_DRIFT_MS_MAX
from oncelog.core.policy import DELTAS
from oncelog.core.values import (
    Committed,
    Mode,
    Reason,
    Receipt,
    Record,
    Refused,
    Remembered,
    Replayed,
    Submission,
    Verdict,
)
from oncelog.engine.committer import count_payload_bytes
from oncelog.engine.log import Log
from oncelog.engine.read_results import Reading
from oncelog.errors import CanonicalError, HistoryChangedError
from oncelog.server.api_service import (
    ApiService,
    decode_page_token,
    describe_outcome,
    encode_page_token,
    load_outcome,
    new_rate,
)
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.deltas import codec
from oncelog.server.deltas.codec import PushResult
from oncelog.server.errors import RETRYABLE_CODES, ApiError, field_error, retryable_error, translate_errors
from oncelog.server.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX
from oncelog.server.messages import decode_struct, run_long

COMPACT_GRANT: Final = "compact"
"""Suffix of the stream name in a grant that allows compaction."""
KNOWN: Final = "known"
KNOWN_UNDER_ANOTHER_OP: Final = "known_under_another_op"
_ERROR_CODES: Final = {
    Reason.CLOCK_DRIFT: error_codes.CLOCK_DRIFT,
    Reason.INVALID: error_codes.INVALID,
    Reason.TOO_MANY_COLUMNS: error_codes.INVALID,
    Reason.ROW_TOO_LARGE: error_codes.INVALID,
}
"""Deltas API error codes by refusal reason. Refusals for other reasons can be retried (`RETRYABLE_CODES`) or are client
errors."""

SNAPSHOT_POSITION: Final = msgspec.json.Decoder(tuple[Annotated[int, Meta(ge=0)], int | None, str, str])
"""Decodes a page token: the snapshot's cursor and horizon, and the last row of the previous page."""


class DeltasService(ApiService):
    """A server's Deltas API. Calls raise ApiError, or OncelogError if the log cannot be read."""

    def __init__(self, log: Log, auth_gate: AuthGate) -> None:
        super().__init__(log, auth_gate)
        per_second = self.limits.new_events_per_second_max
        # The log admits all deltas of a push or none. With a burst smaller than a push, it would refuse large pushes
        # forever.
        self._rate = new_rate(per_second, burst=max(per_second, PUSH_DELTAS_MAX))
        self._previous_epochs: tuple[str, ...] | None = None
        """Earlier epochs that this history continues, or None until they have been read."""

    # --- rights

    def check_writable(self, gateway: str, principal: Principal) -> str:
        """Return the stream of a gateway. Raises ApiError unless the principal may write it."""
        return _check_right(gateway, principal.grants.may_write, "has no write access to this gateway")

    def check_readable(self, gateway: str, principal: Principal) -> str:
        """Return the stream of a gateway. Raises ApiError unless the principal may read it."""
        return _check_right(gateway, principal.grants.may_read, "has no read access to this gateway")

    def check_compactable(self, gateway: str, principal: Principal) -> str:
        """Return the stream of a gateway. Raises ApiError unless the principal may compact it."""
        may_write = principal.grants.may_write
        return _check_right(
            gateway, lambda scope: may_write(f"{scope}/{COMPACT_GRANT}"), "may not compact this gateway", COMPACT_GRANT
        )

    # --- push

    async def push(self, scope: str, body: bytes, principal: Principal) -> bytes:
        """Commit all deltas of a push or none of them. Returns the encoded answer."""
        results = await self._push(scope, body, principal)
        if self._previous_epochs is None:  # read only once, because an open log keeps its epoch
            self._previous_epochs = await self.log.previous_epochs()
        return codec.encode_push(results, self.log.epoch, self._previous_epochs, self.clock.wall_ms())

    async def _push(self, scope: str, body: bytes, principal: Principal) -> list[PushResult]:
        own = self.auth_gate.get_client_id(principal)
        plain = await run_long(len(body), lambda: decode_canonical_push(body))
        if plain is not None:
            _check_pushable(plain.deltas, own)
            known = self.log.recall(DELTAS, scope, plain.keys)
            if known is not None:
                return self._to_known_results(plain.deltas, known)
        deltas, submissions = await run_long(
            len(body), lambda: self._to_submissions(scope, _check_push(plain, body, own), principal)
        )
        if plain is None:
            # Also answer a known push from memory if its JSON is formatted differently, so that it does not wait for a
            # commit or for capacity.
            known = self.log.recall(DELTAS, scope, [submission.key for submission in submissions])
            if known is not None:
                return self._to_known_results(deltas, known)
        verdicts = await self.log.submit_many(submissions, Mode.ALL)
        if verdicts and isinstance(verdicts[0], Refused):
            raise _refusal_error(verdicts, deltas, submissions)  # the log refuses the whole push
        return self._to_results(deltas, verdicts)

    def _to_submissions(
        self, scope: str, decoded: DecodedPush, principal: Principal
    ) -> tuple[list[DeltaJson], list[Submission[Receipt]]]:
        value_bytes_max, actor, rate = self.limits.column_value_bytes_max, principal.actor, self._rate
        submissions = []
        for index, (delta, key, body) in enumerate(zip(decoded.deltas, decoded.keys, decoded.bodies, strict=True)):
            try:
                change = to_row_delta(delta, key, "", value_bytes_max)
            except CanonicalError as error:
                raise _delta_error(error, index) from error
            submissions.append(build_submission(scope, change, body, actor=actor, rate=rate))
        return decoded.deltas, submissions

    def _to_known_results(self, deltas: Sequence[DeltaJson], known: Sequence[Remembered]) -> list[PushResult]:
        """Return the results of a push that the log still has in memory."""
        other_op = sum(
            [receipt.fingerprint != OP_FINGERPRINTS[delta.op] for receipt, delta in zip(known, deltas, strict=True)]
        )
        self.counts.deltas[KNOWN] += len(deltas) - other_op
        self.counts.deltas[KNOWN_UNDER_ANOTHER_OP] += other_op
        return [(delta.delta_id, receipt.receipt.sequence, True) for receipt, delta in zip(known, deltas, strict=True)]

    def _to_results(self, deltas: Sequence[DeltaJson], verdicts: Sequence[Verdict]) -> list[PushResult]:
        results: list[PushResult] = []
        committed = other_op = 0
        for delta, verdict in zip(deltas, verdicts, strict=True):
            match verdict:
                case Replayed(receipt, mismatch):
                    other_op += mismatch
                    results.append((delta.delta_id, receipt.sequence if receipt else 0, True))
                case Committed(receipt):
                    committed += 1
                    results.append((delta.delta_id, receipt.sequence, False))
                case _:
                    raise TypeError(f"a delta was answered with {verdict!r}")
        self.counts.deltas["committed"] += committed
        self.counts.deltas[KNOWN] += len(results) - committed - other_op
        self.counts.deltas[KNOWN_UNDER_ANOTHER_OP] += other_op
        return results

    # --- read

    async def pull(self, scope: str, since: int, limit: int | None, epoch: str | None) -> bytes:
        """Return the deltas after a sequence, in arrival order (DE-9)."""
        self._check_epoch(epoch)
        page = await self._read(scope, since, limit=self.page_sizes.clamp(limit))
        deltas, is_compacted = split_at_compaction(page.records)
        self.counts.deliveries += len(deltas)
        if not is_compacted:
            cursor, has_more = page.cursor.position, page.has_more
        elif deltas:
            cursor, has_more = deltas[-1].sequence, True
        else:
            await self._check_tombstones(scope, since)
            cursor, has_more = since, True
        is_snapshot = is_compacted and not deltas
        return codec.encode_pull(deltas, cursor, self.log.epoch, has_more=has_more, is_snapshot=is_snapshot)

    async def check_cursor(self, scope: str, since: int, epoch: str | None) -> None:
        """Raise ApiError if a cursor belongs to a different history."""
        self._check_epoch(epoch)
        await self._read(scope, since, upto=since, limit=1)

    async def follow(self, scope: str, since: int) -> AsyncGenerator[Sequence[Record] | None, None]:
        """Yield deltas after a sequence, then new ones. Yields None and stops if the next deltas were compacted."""
        async with aclosing(self.log.follow_several(stream=scope, after=since)) as batches:
            async for records in batches:
                deltas, is_snapshot = split_at_compaction(records)
                if deltas:
                    self.counts.deliveries += len(deltas)
                    since = deltas[-1].sequence
                    yield deltas
                if is_snapshot:
                    await self._check_tombstones(scope, since)
                    yield None
                    return

    async def _check_tombstones(self, scope: str, since: int) -> None:
        """Raise ApiError if the snapshot may lack a tombstone that the reader has not seen.

        The reader may hold a row whose tombstone was dropped, so it must replace its rows with the snapshot's rows.
        All client versions do this when they receive this error code. A reader at 0 has no rows to replace.
        """
        newest, horizon = await self.log.state.newest_and_horizon(scope)
        if since and horizon is not None:
            reason = (
                "is older than the compaction, which has dropped deleted rows; replace all rows with the rows of the "
                "snapshot, and continue from its cursor"
            )
            raise self._history_error("since", reason, newest=newest, snapshot=True)

    async def load_rows(self, scope: str, table: str, row_id: str | None, after: str, limit: int | None) -> bytes:
        """Return a page of a table's existing rows, or a single row."""
        if row_id is not None:
            row = await self.log.state.row(scope, table, row_id)
            return codec.encode_rows([] if row is None else [(row_id, row)], "")
        page = await self.log.state.rows(scope, table=table, after=(table, after), limit=self.page_sizes.clamp(limit))
        rows = [(found_id, found) for _, found_id, found in page.rows]
        return codec.encode_rows(rows, rows[-1][0] if page.has_more else "")

    async def find_delta(self, scope: str, delta_id: str) -> Mapping[str, Any]:
        """Return the outcome of a delta. Raises ApiError if the gateway has no such delta."""
        outcome = await load_outcome(self.log, "deltaId", bytes.fromhex(delta_id), policy=DELTAS, scope=scope)
        return await describe_outcome(self.log, outcome, "delta", codec.encode_delta)

    async def load_snapshot(self, scope: str, page_token: str, limit: int | None, field: str) -> bytes:
        """Return a page of all rows, including deleted ones, and the cursor of the first page.

        Rows may be newer than the cursor. Raises ApiError if tombstones have been dropped since the first page: without
        the tombstone, an older delta after the cursor would restore the row.
        """
        state = self.log.state
        if page_token:
            cursor, horizon, table, row_id = decode_page_token(page_token, field, SNAPSHOT_POSITION)
        else:
            table = row_id = ""
            cursor, horizon = await state.newest_and_horizon(scope)
        page = await state.rows(scope, after=(table, row_id), limit=self.page_sizes.clamp(limit))
        if await state.horizon(scope) != horizon:
            reason = "deleted rows were dropped while the snapshot was being read; read it again from its first page"
            raise self._history_error(field, reason, snapshot=True)
        following = encode_page_token(cursor, horizon, *page.rows[-1][:2]) if page.has_more else ""
        return codec.encode_snapshot(page.rows, cursor, following, self.log.epoch, horizon)

    # --- compaction

    async def compact(self, scope: str, body: bytes, actor: str) -> bytes:
        """Drop the bodies of old deltas and then old deleted rows, up to the limits of one request."""
        request = _decode_compact(body)
        with translate_errors():
            compacted = await self.log.compact(
                scope, **request, limit=COMPACT_DELTAS_MAX, rows_max=COMPACT_ROWS_MAX, actor=actor
            )
        return codec.encode_compaction(compacted)

    # --- cursors

    def _check_epoch(self, epoch: str | None) -> None:
        if epoch and epoch != self.log.epoch:
            reason = "belongs to another history; read the snapshot, and continue from its cursor"
            raise self._history_error("epoch", reason)

    def _history_error(self, field: str, reason: str, **details: Any) -> ApiError:
        return field_error(field, reason, error_codes.HISTORY_CHANGED, epoch=self.log.epoch, **details)

    async def _read(self, scope: str, since: int, **bounds: Any) -> Reading:
        """Read a gateway's stream. Raises ApiError if the cursor is ahead of the log."""
        try:
            return await self.log.read_untraced(scope, after=since, **bounds)
        except HistoryChangedError as error:
            reason = f"must be at most {error.newest}, the newest; read the snapshot, and continue from its cursor"
            raise self._history_error("since", reason, newest=error.newest) from error


def _check_push(plain: DecodedPush | None, body: bytes, own_client: str | None) -> DecodedPush:
    """Return the deltas of a push with ids that the server has computed itself (DE-3).

    Raises ApiError if the push is invalid.
    """
    if plain is not None and has_canonical_columns(plain.deltas):
        return plain
    try:
        decoded = decode_push(body)
    except CanonicalError as error:
        raise _body_error(error) from error
    _check_pushable(decoded.deltas, own_client)
    for index, (delta, key) in enumerate(zip(decoded.deltas, decoded.keys, strict=True)):
        if delta.delta_id != key.hex():
            try:
                to_row_delta(delta, key, "")  # a malformed delta gets its own error, not one about its id
                check_delta_id(delta, key, "")
            except CanonicalError as error:
                raise _delta_error(error, index) from error
    return decoded


def _check_pushable(deltas: Sequence[DeltaJson], own_client: str | None) -> None:
    """Raise ApiError for too many deltas, or for a delta of a client other than `own_client` (None allows any)."""
    if len(deltas) > PUSH_DELTAS_MAX:
        reason = f"must have at most {PUSH_DELTAS_MAX} entries, not {len(deltas)}"
        raise field_error("deltas", reason, error_codes.TOO_LARGE, limit=PUSH_DELTAS_MAX)
    if own_client is None:
        return
    for index, delta in enumerate(deltas):
        if delta.client_id != own_client:
            field = f"deltas[{index}].clientId"
            raise field_error(field, "must be the credential's client", error_codes.FORBIDDEN, index=index)


def split_at_compaction(records: Sequence[Record]) -> tuple[list[Record], bool]:
    """Return the deltas before the first compacted one, and whether there is a compacted one."""
    deltas: list[Record] = []
    for record in records:
        if record.policy != DELTAS.name:
            continue
        if record.erased:
            return deltas, True
        deltas.append(record)
    return deltas, False


@lru_cache(maxsize=4096)
def parse_gateway(name: str) -> str:
    """Return the stream of a gateway. Raises ApiError for an invalid name.

    Cached, because most requests go to a few gateways.
    """
    problem = find_gateway_fault(name)
    if problem is not None:
        raise field_error("gateway", problem, limit=GATEWAY_CHARACTERS_MAX)
    return deltas_scope(name)


def _refusal_error(
    verdicts: Sequence[Verdict], deltas: Sequence[DeltaJson], submissions: Sequence[Submission]
) -> ApiError:
    """Return the error for the refused delta. The log has not decided the others."""
    index, refused = next(
        (index, verdict)
        for index, verdict in enumerate(verdicts)
        if isinstance(verdict, Refused) and verdict.reason is not Reason.NOT_PROCESSED
    )
    if refused.field == "items":  # the log's limit on items per request is lower
        return field_error("deltas", refused.message.removeprefix("items "), error_codes.TOO_LARGE)
    if refused.reason is Reason.MALFORMED and refused.field == "body":  # a single delta is too long
        index = max(range(len(submissions)), key=lambda place: count_payload_bytes(submissions[place]))
        return ApiError(error_codes.TOO_LARGE, f"deltas[{index}]: {refused.message}", index=index)
    reason = refused.reason
    if reason is Reason.UNSTORABLE and len(deltas) > 1:
        # The store does not report which delta it cannot hold. All client versions split a push when they receive this
        # code without an index.
        advice = (
            f"the store cannot hold one of these {len(deltas)} deltas; nothing was written. Push fewer deltas at a "
            "time: a push of that delta alone is refused with its index"
        )
        return field_error("deltas", advice, error_codes.TOO_LARGE)
    if reason in RETRYABLE_CODES:
        return retryable_error(refused)
    code = _ERROR_CODES.get(reason, error_codes.BAD_REQUEST)
    if reason is Reason.CLOCK_DRIFT:
        ahead_ms = wall_ms(parse_hlc(deltas[index].hlc)) - refused.current
        details = {"server_time_ms": refused.current, "retry_after_ms": max(1, ahead_ms - CLOCK_DRIFT_MS_MAX)}
        return field_error(f"deltas[{index}].hlc", refused.message, code, index=index, **details)
    separator = "." if reason is Reason.INVALID else ": "  # a schema error's message begins with the name of a member
    return ApiError(code, f"deltas[{index}]{separator}{refused.message}", field=f"deltas[{index}]", index=index)


def _delta_error(error: CanonicalError, index: int) -> ApiError:
    """Return the error for a malformed delta. The path in `error` is relative to the delta."""
    field = f"deltas[{index}]{error.path}"
    if isinstance(error, WrongIdError):
        return field_error(field, error.reason, error_codes.DELTA_ID_MISMATCH, index=index, expected=error.expected)
    return field_error(field, error.reason, index=index)


def _body_error(error: CanonicalError) -> ApiError:
    field = error.path.removeprefix("$").removeprefix(".") or "body"
    found = _INDEX.match(field)
    details = {} if found is None else {"field": field, "index": int(found[1])}
    return ApiError(error_codes.BAD_REQUEST, f"{field}: {error.reason}", **details)


_INDEX: Final = re.compile(r"deltas\[(\d+)\]")


def _check_right(gateway: str, may: Callable[[str], bool], problem: str, right: str = "") -> str:
    scope = parse_gateway(gateway)
    if not may(scope):
        needed = f"write access to {scope}/{right}" if right else "it"
        reason = f"the credential {problem}; its grants must include {needed}"
        raise field_error("gateway", reason, error_codes.FORBIDDEN)
    return scope


# --- requests to compact ------------------------------------------------------------------------------------


_Number = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class _CompactJson(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    upto: _Number | UnsetType = UNSET
    keep: _Number | UnsetType = UNSET
    tombstone_age_ms: _Number | UnsetType = UNSET
    after: str = ""
    page: str = ""
    """The previous name of `after`."""


_COMPACT_DECODER: Final = msgspec.json.Decoder(_CompactJson)


def _decode_compact(body: bytes) -> dict[str, Any]:
    """Return the arguments for `Log.compact` that a request contains. Raises ApiError if it is invalid."""
    request = decode_struct(body, _COMPACT_DECODER)
    names = ("upto", "keep", "tombstone_age_ms")
    numbers = {name: number for name in names if (number := getattr(request, name)) is not UNSET}
    if ("upto" in numbers) == ("keep" in numbers):
        raise ApiError(error_codes.BAD_REQUEST, "body: must have exactly one of upto and keep")
    if request.after and request.page:
        raise field_error("page", "must not be combined with after")
    field, token = ("page", request.page) if request.page else ("after", request.after)
    after_row = decode_page_token(token, field, SNAPSHOT_POSITION)[2:] if token else ("", "")
    return {**numbers, "after_row": after_row}
