"""The Ledger API without its transport: authorization, requests to the log, and answers from verdicts.

The order is that of CO-18: shape, authorization, and only then the log is asked. Nothing is decided here: the API
translates, and `core.plan` has decided.
"""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncelog.core.canonical import nfc
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, SEQUENCE_MAX
from oncelog.core.operations import Entity
from oncelog.core.policy import LEDGER
from oncelog.core.transactions import (
    check_operations,
    decode_operations,
    format_tx_id,
    ledger_scope,
    parse_tx_id,
    transaction,
)
from oncelog.core.values import Committed, Rate, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.engine.log import Log
from oncelog.engine.outcome import Outcome
from oncelog.engine.read_results import Proven
from oncelog.error_codes import BAD_REQUEST, FORBIDDEN, HISTORY_CHANGED, NOT_FOUND
from oncelog.errors import CanonicalError, OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.errors import RETRYABLE_CODES, ApiError, retryable_error, to_api_error, translate_errors
from oncelog.server.ledger.values import (
    ClientState,
    Entities,
    Relationships,
    Scope,
    ScopeBlock,
    Transaction,
    Write,
    WriteAnswer,
    WriteError,
    WriteErrorCode,
    WriteSuccess,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import find_outcome, unknown_error
from oncelog.server.metrics import Counts
from oncelog.storage.store import RelationshipQuery, ScopedBlock

SCOPE_NAME_CHARACTERS_MAX: Final = 80
"""Of an organization, and of a vault: with all of it escaped, a scope still has a name that every store can hold."""
CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")
KEY_BYTES: Final = LEDGER.key_bytes[0]
FROM_MEMORY: Final = "from_memory"
FROM_STORE: Final = "from_store"
COMMITTED: Final = "committed"

_ERROR_CODES: Final = {
    Reason.KEY_EXISTS: WriteErrorCode.KEY_EXISTS,
    Reason.KEY_NOT_FOUND: WriteErrorCode.KEY_NOT_FOUND,
    Reason.VERSION_MISMATCH: WriteErrorCode.VERSION_MISMATCH,
    Reason.VALUE_MISMATCH: WriteErrorCode.VALUE_MISMATCH,
    Reason.IDENTITY_REUSED: WriteErrorCode.IDEMPOTENCY_KEY_REUSED,
    Reason.SEQUENCE_GAP: WriteErrorCode.SEQUENCE_GAP,
    Reason.SEQUENCE_REUSED: WriteErrorCode.SEQUENCE_REUSED,
}
"""Error code of the Ledger API for each reason of a refusal. Other reasons are errors of the call."""
_SEQUENCE_REASONS: Final = (Reason.SEQUENCE_GAP, Reason.SEQUENCE_REUSED)
_CONDITION_REASONS: Final = (Reason.KEY_EXISTS, Reason.KEY_NOT_FOUND, Reason.VERSION_MISMATCH, Reason.VALUE_MISMATCH)
_MESSAGES: Final = {
    Reason.IDENTITY_REUSED: "the idempotency key was used for other operations; nothing was written",
}
_CONDITION_FAILED: Final = "a condition is not met; how the entity stands may not be read"
_FIELD_NAMES: Final = {
    "client_sequence": "sequence",
    "key": "idempotency_key",
    "client": "client_id",
    "body": "operations",
}


OnAnswer = Callable[[WriteAnswer], None]
OnFailure = Callable[[Exception], None]


class _PendingWrite:
    """A write that waits for its verdict, and who wants to know."""

    def __init__(
        self,
        service: "LedgerService",
        submission: Submission,
        principal: Principal,
        answer: OnAnswer,
        fail: OnFailure,
        *,
        is_batch: bool,
    ) -> None:
        self._service = service
        self._is_batch = is_batch
        self._submission = submission
        self._principal = principal
        self._answer = answer
        self._fail = fail

    def done(self) -> bool:
        """As `VerdictSink` says: whether or not the client is there, it is in flight."""
        return False

    def set_result(self, verdict: Verdict, /) -> None:
        """As `VerdictSink` says."""
        try:
            answer = self._service.to_answer(self._submission, verdict, self._principal, is_batch=self._is_batch)
            if answer is None:
                self._service.start_read(self._load_answer(verdict))
            else:
                self._answer(answer)
        except Exception as error:  # noqa: BLE001 - the committer would have nobody to tell
            self._fail(error)

    async def _load_answer(self, verdict: Verdict) -> None:
        try:
            self._answer(await self._service.load_answer(verdict))
        except Exception as error:  # noqa: BLE001 - as above
            self.set_exception(error)

    def set_exception(self, exception: Exception, /) -> None:
        """As `VerdictSink` says."""
        self._fail(to_api_error(exception) if isinstance(exception, OncelogError) else exception)


class LedgerService:
    """One for a server. Every call raises ApiError for what is no outcome of a write."""

    def __init__(self, log: Log, auth_gate: AuthGate, *, limits: ApiLimits, counts: Counts) -> None:
        self.log = log
        self.auth_gate = auth_gate
        self.limits = limits
        self.counts = counts
        per_second = limits.new_events_per_second_max
        self._rate = Rate(per_second, burst=per_second) if per_second else None
        self._read_tasks: set[asyncio.Task[None]] = set()

    # --- writing

    async def write(self, request: Write, principal: Principal) -> WriteAnswer:
        """Commits a transaction, once."""
        submission = self.to_submission(request, principal)
        try:
            verdict = await self.log.submit(submission)
            answer = self.to_answer(submission, verdict, principal, is_batch=request.is_batch)
            return answer or await self.load_answer(verdict)
        except OncelogError as error:
            raise to_api_error(error) from error

    def write_nowait(self, request: Write, principal: Principal, answer: OnAnswer, fail: OnFailure) -> None:
        """The same, for who has no task to wait in. Raises ApiError, or calls one of the two, now or later."""
        submission = self.to_submission(request, principal)
        pending = _PendingWrite(self, submission, principal, answer, fail, is_batch=request.is_batch)
        try:
            verdict = self.log.submit_nowait(submission, pending)
        except OncelogError as error:
            raise to_api_error(error) from error
        if verdict is not None:
            pending.set_result(verdict)

    def to_submission(self, request: Write, principal: Principal) -> Submission:
        """What the log is asked to take. Raises ApiError."""
        scope = parse_scope(request.organization, request.vault)
        client = self.check_client_id(request.client_id, principal)
        if not 1 <= request.sequence <= SEQUENCE_MAX:
            raise _bad_request("sequence", f"must be from 1 to {SEQUENCE_MAX}, not {request.sequence}")
        key = request.key
        if key:
            _check_key(key)
        try:
            check_operations(request.operations, self.limits.entity_value_bytes_max)
            self._check_writable(scope, principal)
            return transaction(
                scope.name,
                client,
                request.sequence,
                request.operations,
                key=key,
                actor=principal.actor,
                rate=self._rate,
                policy=self.log.state.ledger,
            )
        except CanonicalError as error:
            raise value_error(error) from error

    def check_client_id(self, requested: str, principal: Principal) -> str:
        """The client that writes: the credential's. Raises ApiError for another's (LG-1)."""
        own = self.auth_gate.get_client_id(principal)
        if own is None:
            _check_text(requested, "client_id", CLIENT_ID_CHARACTERS_MAX)
            return requested or principal.actor.partition(":")[2]
        if requested and requested != own:
            raise _bad_request("client_id", "must be that of the credential, or be left out")
        return own

    def to_answer(
        self, submission: Submission, verdict: Verdict, principal: Principal, *, is_batch: bool = False
    ) -> WriteAnswer | None:
        """What a verdict is called here; None for a commit for which memory has no room: it must be read."""
        if isinstance(verdict, Committed):
            self.counts.ledger_writes[COMMITTED] += 1
            return self._find_success(verdict.receipt)
        if isinstance(verdict, Replayed):
            return self._to_replay_answer(submission, verdict.receipt, erased=verdict.erased, is_batch=is_batch)
        if isinstance(verdict, Refused):
            return self._to_refusal(verdict, may_read=principal.grants.may_read(submission.scope))
        raise TypeError(f"a write was answered with {verdict!r}")

    def _find_success(self, receipt: Receipt, now_ms: int | None = None) -> WriteSuccess | None:
        attestation = self.log.state.find_attestation(receipt, now_ms)
        if attestation is None:
            return None
        return WriteSuccess(
            format_tx_id(receipt.lane, receipt.position),
            attestation.block,
            attestation.proof,
            attestation.salt,
            receipt.client_sequence,
            receipt.sequence,
            receipt.log_time_ms,
            attestation.actor,
        )

    def start_read(self, read: Coroutine[Any, Any, None]) -> None:
        """Lets it run, and holds on to it while it does."""
        task = asyncio.get_running_loop().create_task(read)
        self._read_tasks.add(task)
        task.add_done_callback(self._read_tasks.discard)

    async def load_answer(self, verdict: Verdict) -> WriteSuccess:
        """Of a commit for which memory has no room."""
        assert isinstance(verdict, Committed)  # noqa: S101 - nothing else is left without an answer
        receipt = verdict.receipt
        proven = await self.log.prove(receipt)
        record = proven.record
        return WriteSuccess(
            format_tx_id(receipt.lane, receipt.position),
            proven.block,
            proven.proof,
            proven.salt,
            receipt.client_sequence,
            receipt.sequence,
            receipt.log_time_ms,
            record.actor,
        )

    def _to_replay_answer(
        self, submission: Submission, receipt: Receipt | None, *, erased: bool, is_batch: bool
    ) -> WriteAnswer:
        """From memory the whole answer, except to a batch; from the store that it was committed, and where.

        See LG-10, LG-11 and LG-17.
        """
        if receipt is not None and not erased and not is_batch:
            success = self._find_success(receipt, self.auth_gate.clock.wall_ms())
            if success is not None:
                self.counts.ledger_writes[FROM_MEMORY] += 1
                return success
        self.counts.ledger_writes[FROM_STORE] += 1
        message = "this transaction has been committed before; nothing was written"
        if receipt is None:
            message = "this sequence was committed before; its record is gone, and nothing was written"
        return WriteError(
            code=WriteErrorCode.ALREADY_COMMITTED,
            message=message,
            tx_id=None if receipt is None else format_tx_id(receipt.lane, receipt.position),
            block_height=None if receipt is None else receipt.height,
            assigned_sequence=submission.client_sequence if receipt is None else receipt.client_sequence,
            erased=erased,
        )

    def _to_refusal(self, refusal: Refused, *, may_read: bool) -> WriteError:
        """Who may write and not read is told that a condition failed, and not what the entity is."""
        reason = refusal.reason
        code = _ERROR_CODES.get(reason)
        if code is None:
            if reason in RETRYABLE_CODES:
                raise retryable_error(refusal)
            field = _FIELD_NAMES.get(refusal.field, refusal.field)
            raise ApiError(BAD_REQUEST, f"{field}: {refusal.message}", field=field)
        self.counts.ledger_writes[code.name.lower()] += 1
        exists = reason in _CONDITION_REASONS and refusal.value is not None and may_read
        return WriteError(
            code=code,
            message=_MESSAGES.get(reason, refusal.message)
            if may_read or reason not in _CONDITION_REASONS
            else _CONDITION_FAILED,
            key=refusal.field if reason in _CONDITION_REASONS else "",
            current_version=refusal.current if exists else None,
            current_value=refusal.value if exists else None,
            operation_index=refusal.index if reason in _CONDITION_REASONS else None,
            last_committed_sequence=refusal.current if reason in _SEQUENCE_REASONS else None,
        )

    # --- reading

    async def load_client_state(
        self, organization: str, vault: str, client_id: str, principal: Principal
    ) -> ClientState:
        """Where a client stands (LG-8)."""
        scope = parse_scope(organization, vault)
        client = self.check_client_id(client_id, principal)
        grants = principal.grants
        if not grants.may_write(scope.name) and not grants.may_read(scope.name):
            raise _forbidden_error("neither be read nor written")
        with translate_errors():
            entry = await self.log.state.client(scope.name, client)
        if entry is None:
            return ClientState()
        return ClientState(entry.sequence, entry.last_seen_ms, entry.last_key, entry.last_fingerprint)

    async def load_entity(
        self, organization: str, vault: str, key: str, principal: Principal
    ) -> tuple[str, Entity] | None:
        """An entity as it stands; None where there is none."""
        scope = parse_scope(organization, vault)
        _check_name(key, "key", ENTITY_KEY_CHARACTERS_MAX)
        self._check_readable(scope, principal)
        with translate_errors():
            found = await self.log.state.entity(scope.name, key)
        return None if found is None else (key, found)

    async def list_entities(
        self,
        organization: str,
        vault: str,
        prefix: str,
        page_token: str,
        page_size: int,
        principal: Principal,
        *,
        after_field: str = "page_token",
    ) -> Entities:
        """A page of entities by key."""
        scope = parse_scope(organization, vault)
        _check_text(prefix, "prefix", ENTITY_KEY_CHARACTERS_MAX)
        (after,) = _decode_token(page_token, 1, after_field) if page_token else ("",)
        self._check_readable(scope, principal)
        with translate_errors():
            page = await self.log.state.entities(
                scope.name, prefix=prefix, after=after, limit=self._get_page_size(page_size)
            )
        return Entities(page.entities, _encode_token(page.entities[-1][0]) if page.has_more else "")

    async def list_relationships(
        self,
        request: RelationshipQuery,
        vault: str,
        page_token: str,
        principal: Principal,
        *,
        after_field: str = "page_token",
    ) -> Relationships:
        """A page of relationships. The query's scope is the organization, its limit the page's size as it was asked."""
        scope = parse_scope(request.scope, vault)
        for name in ("resource", "relation", "subject"):
            _check_text(getattr(request, name), name, ENTITY_KEY_CHARACTERS_MAX)
        if request.relation and not (request.resource or request.subject):
            raise _bad_request("relation", "needs a resource or a subject beside it")
        first, second, third = _decode_token(page_token, 3, after_field) if page_token else ("", "", "")
        self._check_readable(scope, principal)
        query = msgspec.structs.replace(
            request, scope=scope.name, after=(first, second, third), limit=self._get_page_size(request.limit)
        )
        with translate_errors():
            page = await self.log.state.relationships(query)
        return Relationships(page.relationships, _encode_token(*page.relationships[-1][:3]) if page.has_more else "")

    async def find_relationship(
        self, organization: str, vault: str, names: tuple[str, str, str], principal: Principal
    ) -> int:
        """The version that made a relationship; 0 where there is none."""
        scope = parse_scope(organization, vault)
        for field, name in zip(("resource", "relation", "subject"), names, strict=True):
            _check_name(name, field, ENTITY_KEY_CHARACTERS_MAX)
        self._check_readable(scope, principal)
        with translate_errors():
            return await self.log.state.relationship(scope.name, *names) or 0

    # --- transactions, blocks, proofs

    async def load_transaction(self, organization: str, vault: str, tx_id: str, principal: Principal) -> Transaction:
        """A transaction of the scope. Raises ApiError where there is none."""
        record = await self._load_record(parse_scope(organization, vault), tx_id, principal)
        return Transaction(tx_id, record, decode_operations(record))

    async def find_outcome(
        self, organization: str, vault: str, tx_id: str, key: bytes, client_id: str, principal: Principal
    ) -> Outcome:
        """Return what became of a transaction, by its id or its idempotency key. Raises ApiError if it is unknown."""
        if bool(tx_id) == bool(key):
            raise _bad_request("tx_id", "must be given, or idempotency_key in its place")
        if tx_id:
            return await find_outcome(
                self.log, await self._load_record(parse_scope(organization, vault), tx_id, principal)
            )
        scope = parse_scope(organization, vault)
        client = self.check_client_id(client_id, principal)
        _check_key(key)
        self._check_readable(scope, principal)
        policy = self.log.policies[LEDGER.name]
        with translate_errors():
            outcome = await self.log.lookup(key, policy=policy, scope=scope.name, client=client)
        if outcome.record is None:
            raise unknown_error("idempotency_key")
        return outcome

    async def load_proof(self, organization: str, vault: str, tx_id: str, principal: Principal) -> Proven:
        """All that proves a transaction of the scope."""
        record = await self._load_record(parse_scope(organization, vault), tx_id, principal)
        with translate_errors():
            return await self.log.prove(record.receipt)

    async def _load_record(self, scope: Scope, tx_id: str, principal: Principal) -> Record:
        place = parse_tx_id(tx_id)
        if place is None:
            raise _bad_request("tx_id", "must have 16 hexadecimal digits, in lower case")
        self._check_readable(scope, principal)
        with translate_errors():
            record = await self.log.state.record(*place) if place[0] == self.log.state.lane(scope.name) else None
        if record is None or record.scope != scope.name or record.policy != LEDGER.name:
            raise ApiError(NOT_FOUND, "tx_id: the scope has no such transaction", field="tx_id")
        return record

    async def load_block(self, organization: str, vault: str, height: int, principal: Principal) -> ScopeBlock:
        """A block of the scope's lane. Raises ApiError where there is none."""
        scope = parse_scope(organization, vault)
        if height < 1:
            raise _bad_request("height", f"must be from 1 on, not {height}")
        self._check_readable(scope, principal)
        with translate_errors():
            found = await self.log.state.blocks(scope.name, min(height, 2**62) - 1, 1)
        if not found or found[0].block.height != height:
            raise ApiError(NOT_FOUND, "height: the scope's lane has no such block", field="height")
        return self.to_scope_block(found[0])

    def check_watchable(self, organization: str, vault: str, principal: Principal) -> Scope:
        """The scope whose blocks may be watched. Raises ApiError."""
        scope = parse_scope(organization, vault)
        self._check_readable(scope, principal)
        return scope

    async def check_height(self, scope: Scope, after: int, epoch: str, *, after_field: str = "after_height") -> None:
        """Raise ApiError for a height that the lane does not have, or one of another history (CO-40)."""
        with translate_errors():
            heads = await self.log.heads()
        lane = self.log.state.lane(scope.name)
        height = heads[lane].height if lane in heads else 0
        if (epoch and epoch != self.log.epoch) or after > height:
            message = (
                f"{after_field}: must be from 0 to {height}, the newest of the scope's lane, and of this history; "
                "read again from a height that you know"
            )
            raise ApiError(HISTORY_CHANGED, message, field=after_field, epoch=self.log.epoch, height=height)

    async def follow_blocks(self, scope: Scope, after: int) -> AsyncGenerator[Sequence[ScopeBlock], None]:
        """Blocks after a height, and those to come, for a scope that `check_height` has let through."""
        async with aclosing(self.log.state.follow_blocks(scope.name, after)) as batches:
            async for blocks in batches:
                yield [self.to_scope_block(block) for block in blocks]

    def to_scope_block(self, found: ScopedBlock) -> ScopeBlock:
        """A block as readers of a scope see it."""
        lane = found.block.lane
        tx_ids = tuple([format_tx_id(lane, position) for position in found.positions])
        return ScopeBlock(found.block, tx_ids, self.log.epoch)

    # --- rights

    def _check_readable(self, scope: Scope, principal: Principal) -> None:
        if not principal.grants.may_read(scope.name):
            raise _forbidden_error("not be read")

    def _check_writable(self, scope: Scope, principal: Principal) -> None:
        if not principal.grants.may_write(scope.name):
            raise _forbidden_error("not be written")

    def _get_page_size(self, requested: int) -> int:
        limits = self.limits
        return min(requested or limits.page_events_default, limits.page_events_max)


@lru_cache(maxsize=4096)  # the same come again and again
def parse_scope(organization: str, vault: str) -> Scope:
    """A scope of its two names. Raises ApiError."""
    _check_name(organization, "organization", SCOPE_NAME_CHARACTERS_MAX)
    if vault:
        _check_name(vault, "vault", SCOPE_NAME_CHARACTERS_MAX)
    for field, name in (("organization", organization), ("vault", vault)):
        if not name.isascii() and nfc(name) != name:
            # Grants are compared in NFC: two spellings of a name would be two scopes with the same rights.
            raise _bad_request(field, "must be in NFC")
    return Scope(organization, vault, ledger_scope(organization, vault))


def value_error(error: CanonicalError) -> ApiError:
    """What one is told whose request has a value that cannot be."""
    field = error.path.removeprefix("$").removeprefix(".") or "body"
    return _bad_request(field, error.reason)


def _check_name(name: str, field: str, characters_max: int) -> None:
    if not name:
        raise _bad_request(field, f"must have 1 to {characters_max} characters, not 0", limit=characters_max)
    _check_text(name, field, characters_max)


def _check_text(text: str, field: str, characters_max: int) -> None:
    if len(text) > characters_max:
        raise _bad_request(
            field, f"must have at most {characters_max} characters, not {len(text)}", limit=characters_max
        )
    if "\0" in text:
        raise _bad_request(field, "must not have U+0000")


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise _bad_request("idempotency_key", f"must have {KEY_BYTES} bytes, not {len(key)}", limit=KEY_BYTES)
    if not any(key):
        raise _bad_request("idempotency_key", "must not be all zero")


def _bad_request(field: str, reason: str, **details: int) -> ApiError:
    return ApiError(BAD_REQUEST, f"{field}: {reason}", field=field, **details)


def _forbidden_error(action: str) -> ApiError:
    return ApiError(FORBIDDEN, f"organization, vault: may {action}", field="organization")


def _encode_token(*names: str) -> str:
    """A page's token: after what to go on."""
    return urlsafe_b64encode(msgspec.json.encode(names)).decode()


_TOKEN_DECODER: Final = msgspec.json.Decoder(tuple[str, ...])


def _decode_token(token: str, count: int, field: str) -> tuple[str, ...]:
    try:
        names = _TOKEN_DECODER.decode(urlsafe_b64decode(token.encode("ascii")))
    except (ValueError, msgspec.MsgspecError):
        names = ()
    if len(names) != count or any("\0" in name for name in names):
        raise _bad_request(field, "must be one that a page has given")
    return names
