"""The Ledger API's writes, for gRPC and HTTP: authorization, submission, and answers from verdicts.

CO-18 sets the order: shape, authorization, and only then the log. `core.plan` makes the decisions; this module
translates requests and verdicts.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from msgspec import Struct

from oncelog.background_tasks import BackgroundTasks
from oncelog.core.canonical import nfc
from oncelog.core.limits import NAME_CHARACTERS_MAX, SEQUENCE_MAX
from oncelog.core.policy import LEDGER
from oncelog.core.proof import Attestation
from oncelog.core.transactions import check_operations, format_tx_id, ledger_scope, transaction
from oncelog.core.values import Committed, Reason, Receipt, Refused, Replayed, Submission, Verdict
from oncelog.engine.log import Log
from oncelog.error_codes import FORBIDDEN
from oncelog.errors import CanonicalError, OncelogError
from oncelog.server.api_service import ApiService, new_rate
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.errors import RETRYABLE_CODES, ApiError, field_error, retryable_error, to_api_error
from oncelog.server.ledger.values import Members, Write, WriteAnswer, WriteError, WriteErrorCode, WriteSuccess
from oncelog.server.messages import value_error

SCOPE_NAME_CHARACTERS_MAX: Final = 80
"""Longest name of an organization or vault. Even if all characters are escaped, every store can hold the scope."""
CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")
KEY_BYTES: Final = LEDGER.key_bytes[0]

_ERROR_CODES: Final = {
    Reason.KEY_EXISTS: WriteErrorCode.KEY_EXISTS,
    Reason.KEY_NOT_FOUND: WriteErrorCode.KEY_NOT_FOUND,
    Reason.VERSION_MISMATCH: WriteErrorCode.VERSION_MISMATCH,
    Reason.VALUE_MISMATCH: WriteErrorCode.VALUE_MISMATCH,
    Reason.IDENTITY_REUSED: WriteErrorCode.IDEMPOTENCY_KEY_REUSED,
    Reason.SEQUENCE_GAP: WriteErrorCode.SEQUENCE_GAP,
    Reason.SEQUENCE_REUSED: WriteErrorCode.SEQUENCE_REUSED,
}
"""Ledger API error code for each refusal reason. Refusals for other reasons make the call fail."""
_CONDITION_REASONS: Final = (Reason.KEY_EXISTS, Reason.KEY_NOT_FOUND, Reason.VERSION_MISMATCH, Reason.VALUE_MISMATCH)
_FIELD_NAMES: Final = {
    "client_sequence": "sequence",
    "key": "idempotency_key",
    "client": "client_id",
    "body": "operations",
}


OnAnswer = Callable[[WriteAnswer], None]
OnFailure = Callable[[Exception], None]


class _PendingWrite(Struct, eq=False, gc=False):
    """A write whose verdict is outstanding, and the committer's `VerdictSink` for it."""

    service: "LedgerService"
    submission: Submission
    principal: Principal
    is_batch: bool
    answer: OnAnswer
    fail: OnFailure

    def done(self) -> bool:
        """Return False, because the write is in flight even if its client has disconnected."""
        return False

    def set_result(self, verdict: Verdict, /) -> None:
        """Pass the answer on. If the commit is no longer in memory, load the answer from the log first."""
        try:
            answer = self.service.to_answer(self.submission, verdict, self.principal, is_batch=self.is_batch)
            if answer is None:
                assert isinstance(verdict, Committed)  # noqa: S101 - `to_answer` answers all other verdicts
                self.service.reads.start(self._load_answer(verdict.receipt))
            else:
                self.answer(answer)
        except Exception as error:  # noqa: BLE001 - the error must not affect the committer
            self.fail(error)

    async def _load_answer(self, receipt: Receipt) -> None:
        try:
            proven = await self.service.log.prove(receipt)
            attestation = Attestation(proven.block, proven.proof, proven.salt, proven.record.actor)
            self.answer(WriteSuccess(receipt, attestation))
        except Exception as error:  # noqa: BLE001 - the caller must receive every error
            self.set_exception(error)

    def set_exception(self, exception: Exception, /) -> None:
        """Pass on the failure of the write."""
        self.fail(to_api_error(exception) if isinstance(exception, OncelogError) else exception)


class LedgerService(ApiService):
    """The Ledger API's writes, and its rules for scopes and clients. A write without an outcome raises ApiError."""

    def __init__(self, log: Log, auth_gate: AuthGate) -> None:
        super().__init__(log, auth_gate)
        self._rate = new_rate(self.limits.new_events_per_second_max)
        self.reads = BackgroundTasks()
        """Background reads of answers that are no longer in memory."""

    # --- writing

    async def write(self, request: Write, principal: Principal) -> WriteAnswer:
        """Commit a transaction once. Raises ApiError if the write has no outcome."""
        answered: asyncio.Future[WriteAnswer] = asyncio.get_running_loop().create_future()
        self.write_nowait(request, principal, answered.set_result, answered.set_exception)
        return await asyncio.shield(answered)  # the write is in flight even if its caller is gone

    def write_nowait(self, request: Write, principal: Principal, answer: OnAnswer, fail: OnFailure) -> None:
        """Commit a transaction without creating a task. Raises ApiError, or calls `answer` or `fail` now or later."""
        submission = self.to_submission(request, principal)
        pending = _PendingWrite(self, submission, principal, request.is_batch, answer, fail)
        try:
            verdict = self.log.submit_nowait(submission, pending)
        except OncelogError as error:
            raise to_api_error(error) from error
        if verdict is not None:
            pending.set_result(verdict)

    def to_submission(self, request: Write, principal: Principal) -> Submission:
        """Check a write and return its submission. Raises ApiError if the write is invalid or not allowed."""
        scope = parse_scope(request.organization, request.vault)
        client = self.check_client_id(request.client_id, principal)
        if not 1 <= request.sequence <= SEQUENCE_MAX:
            raise field_error("sequence", f"must be from 1 to {SEQUENCE_MAX}, not {request.sequence}")
        key = request.key
        if key:
            check_key(key)
        try:
            check_operations(request.operations, self.limits.entity_value_bytes_max)
            if not principal.grants.may_write(scope):
                raise forbidden_error("write access")
            return transaction(
                scope,
                client,
                request.sequence,
                request.operations,
                key=key,
                actor=principal.actor,
                rate=self._rate,
                policy=self.log.policies[LEDGER.name],
            )
        except CanonicalError as error:
            raise value_error(error) from error

    def check_client_id(self, requested: str, principal: Principal) -> str:
        """Return the credential's client id. Raises ApiError if the request contains a different one (LG-1)."""
        own = self.auth_gate.get_client_id(principal)
        if own is None:
            return check_text(requested, "client_id", CLIENT_ID_CHARACTERS_MAX) or principal.actor.partition(":")[2]
        if requested and requested != own:
            raise field_error("client_id", "must be the credential's client, or be omitted")
        return own

    def to_answer(
        self, submission: Submission, verdict: Verdict, principal: Principal, *, is_batch: bool = False
    ) -> WriteAnswer | None:
        """Return the answer to a write, or None if the commit is no longer in memory and must be loaded."""
        if isinstance(verdict, Committed):
            self.counts.ledger_writes["committed"] += 1
            return self._find_success(verdict.receipt)
        if isinstance(verdict, Replayed):
            return self._to_replay_answer(submission, verdict.receipt, erased=verdict.erased, is_batch=is_batch)
        if isinstance(verdict, Refused):
            return self._to_refusal(verdict, may_read=principal.grants.may_read(submission.scope))
        raise TypeError(f"a write was answered with {verdict!r}")

    def _find_success(self, receipt: Receipt, now_ms: int | None = None) -> WriteSuccess | None:
        attestation = self.log.state.find_attestation(receipt, now_ms)
        return None if attestation is None else WriteSuccess(receipt, attestation)

    def _to_replay_answer(
        self, submission: Submission, receipt: Receipt | None, *, erased: bool, is_batch: bool
    ) -> WriteAnswer:
        """Return the first answer if it is in memory (never for a batch), or ALREADY_COMMITTED with the position.

        See LG-10, LG-11 and LG-17.
        """
        if receipt is not None and not erased and not is_batch:
            success = self._find_success(receipt, self.auth_gate.clock.wall_ms())
            if success is not None:
                self.counts.ledger_writes["from_memory"] += 1
                return success
        self.counts.ledger_writes["from_store"] += 1
        if receipt is None:
            message = "this sequence was already committed, and its record has been removed; nothing was written"
            members: Members = {"assigned_sequence": submission.client_sequence}
        else:
            message = "this transaction was already committed; nothing was written"
            members = {
                "committed_tx_id": format_tx_id(receipt.lane, receipt.position),
                "block_height": receipt.height,
                "assigned_sequence": receipt.client_sequence,
            }
        return WriteError(WriteErrorCode.ALREADY_COMMITTED, message, {**members, "erased": True} if erased else members)

    def _to_refusal(self, refusal: Refused, *, may_read: bool) -> WriteError:
        """Return the answer to a refused write, with the entity only if the principal may read the scope."""
        reason, message = refusal.reason, refusal.message
        code = _ERROR_CODES.get(reason)
        if code is None:
            if reason in RETRYABLE_CODES:
                raise retryable_error(refusal)
            raise field_error(_FIELD_NAMES.get(refusal.field, refusal.field), refusal.message)
        self.counts.ledger_writes[code.name.lower()] += 1
        members: Members = {}
        if reason in _CONDITION_REASONS:
            members = {"key": refusal.field, "operation_index": refusal.index}
            if not may_read:
                message = "a condition is not met; the credential has no read access to the state of the entity"
            elif refusal.value is not None:
                members |= {"current_version": refusal.current, "current_value": refusal.value}
        elif reason is Reason.IDENTITY_REUSED:
            message = "the idempotency key was used for different operations; nothing was written"
        else:
            members = {"last_committed_sequence": refusal.current}
        return WriteError(code, message, members)


@lru_cache(maxsize=4096)
def parse_scope(organization: str, vault: str) -> str:
    """Return the scope of an organization or vault. Raises ApiError. Cached, because few scopes get most requests."""
    check_name(organization, "organization", SCOPE_NAME_CHARACTERS_MAX)
    check_text(vault, "vault", SCOPE_NAME_CHARACTERS_MAX)
    for field, name in (("organization", organization), ("vault", vault)):
        if not name.isascii() and nfc(name) != name:
            # Grants are compared in NFC, so two spellings of a name would be two scopes covered by the same grant.
            raise field_error(field, "must be in NFC")
    return ledger_scope(organization, vault)


def check_name(name: str, field: str, characters_max: int) -> str:
    """Return a non-empty string that every store can hold. Raises ApiError for any other string."""
    if not name:
        raise field_error(field, f"must have 1 to {characters_max} characters, not 0", limit=characters_max)
    return check_text(name, field, characters_max)


def check_text(text: str, field: str, characters_max: int) -> str:
    """Return a string that every store can hold. Raises ApiError for any other string."""
    if len(text) > characters_max:
        message = f"must have at most {characters_max} characters, not {len(text)}"
        raise field_error(field, message, limit=characters_max)
    if "\0" in text:
        raise field_error(field, "must not contain U+0000")
    return text


def check_key(key: bytes) -> None:
    """Raise ApiError if an idempotency key has the wrong length or consists of zeros."""
    if len(key) != KEY_BYTES:
        raise field_error("idempotency_key", f"must have {KEY_BYTES} bytes, not {len(key)}", limit=KEY_BYTES)
    if not any(key):
        raise field_error("idempotency_key", "must not be all zero")


def forbidden_error(right: str) -> ApiError:
    """Return the error for an action that the caller's grants do not allow on the scope."""
    return ApiError(
        FORBIDDEN, f"organization, vault: the credential has no {right} to this scope", field="organization"
    )
