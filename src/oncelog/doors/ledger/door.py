"""What all ways into the ledger door share: who may do what, what is asked, and what a verdict is called there.

The order is that of CO-18: shape, authorization, and only then the log is asked. Nothing is decided here: the door
translates, and `core.plan` has decided.
"""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncelog.codes import BAD_REQUEST, FORBIDDEN, HISTORY_CHANGED, NOT_FOUND
from oncelog.core.canonical import nfc
from oncelog.core.limits import ENTITY_KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, SEQUENCE_MAX
from oncelog.core.operations import Entity
from oncelog.core.policy import LEDGER
from oncelog.core.transactions import (
    check_operations,
    ledger_scope,
    operations_of,
    place_of,
    transaction,
    tx_id_of,
)
from oncelog.core.values import Committed, Rate, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.doors.entrance import Entrance
from oncelog.doors.faults import NOT_NOW, DoorError, error_of, not_now, telling
from oncelog.doors.ledger.values import (
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
from oncelog.doors.limits import DoorLimits
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.engine.cursors import Proven
from oncelog.engine.log import Log
from oncelog.errors import CanonicalError, OncelogError
from oncelog.stores.protocol import RelationshipQuery, ScopedBlock

SCOPE_NAME_CHARACTERS_MAX: Final = 80
"""Of an organization, and of a vault: with all of it escaped, a scope still has a name that every store can hold."""
CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")
KEY_BYTES: Final = LEDGER.key_bytes[0]
FROM_MEMORY: Final = "from_memory"
FROM_STORE: Final = "from_store"
COMMITTED: Final = "committed"

_CODES: Final = {
    Reason.KEY_EXISTS: WriteErrorCode.KEY_EXISTS,
    Reason.KEY_NOT_FOUND: WriteErrorCode.KEY_NOT_FOUND,
    Reason.VERSION_MISMATCH: WriteErrorCode.VERSION_MISMATCH,
    Reason.VALUE_MISMATCH: WriteErrorCode.VALUE_MISMATCH,
    Reason.IDENTITY_REUSED: WriteErrorCode.IDEMPOTENCY_KEY_REUSED,
    Reason.SEQUENCE_GAP: WriteErrorCode.SEQUENCE_GAP,
    Reason.SEQUENCE_REUSED: WriteErrorCode.SEQUENCE_REUSED,
}
"""The one table from the reasons of a refusal to the words of this wire. The others are errors of the call."""
_SEQUENCES: Final = (Reason.SEQUENCE_GAP, Reason.SEQUENCE_REUSED)
_CONDITIONS: Final = (Reason.KEY_EXISTS, Reason.KEY_NOT_FOUND, Reason.VERSION_MISMATCH, Reason.VALUE_MISMATCH)
_MESSAGES: Final = {
    Reason.IDENTITY_REUSED: "the idempotency key was used for other operations; nothing was written",
}
_UNMET: Final = "a condition is not met; how the entity stands may not be read"
_FIELDS: Final = {"client_sequence": "sequence", "key": "idempotency_key", "client": "client_id", "body": "operations"}


Answered = Callable[[WriteAnswer], None]
Failed = Callable[[Exception], None]


class _Writing:
    """A write that waits for its verdict, and who wants to know."""

    def __init__(
        self,
        door: "LedgerDoor",
        submission: Submission,
        principal: Principal,
        answer: Answered,
        fail: Failed,
        *,
        is_batch: bool,
    ) -> None:
        self._door = door
        self._is_batch = is_batch
        self._submission = submission
        self._principal = principal
        self._answer = answer
        self._fail = fail

    def done(self) -> bool:
        """As `Receiver` says: whether or not the client is there, it is in flight."""
        return False

    def set_result(self, verdict: Verdict, /) -> None:
        """As `Receiver` says."""
        try:
            answer = self._door.answer_of(self._submission, verdict, self._principal, is_batch=self._is_batch)
            if answer is None:
                self._door.read_later(self._read(verdict))
            else:
                self._answer(answer)
        except Exception as error:  # noqa: BLE001 - the committer would have nobody to tell
            self._fail(error)

    async def _read(self, verdict: Verdict) -> None:
        try:
            self._answer(await self._door.read_answer(verdict))
        except Exception as error:  # noqa: BLE001 - as above
            self.set_exception(error)

    def set_exception(self, exception: Exception, /) -> None:
        """As `Receiver` says."""
        self._fail(error_of(exception) if isinstance(exception, OncelogError) else exception)


class LedgerDoor:
    """One for a server. Every call raises DoorError for what is no outcome of a write."""

    def __init__(self, log: Log, entrance: Entrance, *, limits: DoorLimits, counts: Counts) -> None:
        self.log = log
        self.entrance = entrance
        self.limits = limits
        self.counts = counts
        per_second = limits.new_events_per_second_max
        self._rate = Rate(per_second, burst=per_second) if per_second else None
        self._reading: set[asyncio.Task[None]] = set()

    # --- writing

    async def write(self, asked: Write, principal: Principal) -> WriteAnswer:
        """Commits a transaction, once."""
        submission = self.submission(asked, principal)
        try:
            verdict = await self.log.submit(submission)
            answer = self.answer_of(submission, verdict, principal, is_batch=asked.is_batch)
            return answer or await self.read_answer(verdict)
        except OncelogError as error:
            raise error_of(error) from error

    def write_nowait(self, asked: Write, principal: Principal, answer: Answered, fail: Failed) -> None:
        """The same, for who has no task to wait in. Raises DoorError, or calls one of the two, now or later."""
        submission = self.submission(asked, principal)
        writing = _Writing(self, submission, principal, answer, fail, is_batch=asked.is_batch)
        try:
            verdict = self.log.submit_nowait(submission, writing)
        except OncelogError as error:
            raise error_of(error) from error
        if verdict is not None:
            writing.set_result(verdict)

    def submission(self, asked: Write, principal: Principal) -> Submission:
        """What the log is asked to take. Raises DoorError."""
        scope = read_scope(asked.organization, asked.vault)
        client = self.client_of(asked.client_id, principal)
        if not 1 <= asked.sequence <= SEQUENCE_MAX:
            raise _bad("sequence", f"must be from 1 to {SEQUENCE_MAX}, not {asked.sequence}")
        key = asked.key
        if key and len(key) != KEY_BYTES:
            raise _bad("idempotency_key", f"must have {KEY_BYTES} bytes, not {len(key)}", limit=KEY_BYTES)
        if key and not any(key):
            raise _bad("idempotency_key", "must not be all zero")
        try:
            check_operations(asked.operations, self.limits.entity_value_bytes_max)
            self._demand_writable(scope, principal)
            return transaction(
                scope.name,
                client,
                asked.sequence,
                asked.operations,
                key=key,
                actor=principal.actor,
                rate=self._rate,
                policy=self.log.books.ledger,
            )
        except CanonicalError as error:
            raise bad_value(error) from error

    def client_of(self, asked: str, principal: Principal) -> str:
        """The client that writes: the credential's. Raises DoorError for another's (LG-1)."""
        own = self.entrance.client_of(principal)
        if own is None:
            _check_text(asked, "client_id", CLIENT_ID_CHARACTERS_MAX)
            return asked or principal.actor.partition(":")[2]
        if asked and asked != own:
            raise _bad("client_id", "must be that of the credential, or be left out")
        return own

    def answer_of(
        self, submission: Submission, verdict: Verdict, principal: Principal, *, is_batch: bool = False
    ) -> WriteAnswer | None:
        """What a verdict is called here; None for a commit for which memory has no room: it must be read."""
        if isinstance(verdict, Committed):
            self.counts.ledger_writes[COMMITTED] += 1
            return self._success(verdict.receipt)
        if isinstance(verdict, Replayed):
            return self._replayed(submission, verdict.receipt, erased=verdict.erased, is_batch=is_batch)
        if isinstance(verdict, Refused):
            return self._refused(verdict, may_read=principal.grants.may_read(submission.scope))
        raise TypeError(f"a write was answered with {verdict!r}")

    def _success(self, receipt: Receipt, now_ms: int | None = None) -> WriteSuccess | None:
        attested = self.log.books.attested(receipt, now_ms)
        if attested is None:
            return None
        return WriteSuccess(
            tx_id_of(receipt.lane, receipt.position),
            attested.block,
            attested.proof,
            attested.salt,
            receipt.client_sequence,
            receipt.sequence,
            receipt.log_time_ms,
            attested.actor,
        )

    def read_later(self, reading: Coroutine[Any, Any, None]) -> None:
        """Lets it run, and holds on to it while it does."""
        task = asyncio.get_running_loop().create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def read_answer(self, verdict: Verdict) -> WriteSuccess:
        """Of a commit for which memory has no room."""
        assert isinstance(verdict, Committed)  # noqa: S101 - nothing else is left without an answer
        receipt = verdict.receipt
        proven = await self.log.prove(receipt)
        record = proven.record
        return WriteSuccess(
            tx_id_of(receipt.lane, receipt.position),
            proven.block,
            proven.proof,
            proven.salt,
            receipt.client_sequence,
            receipt.sequence,
            receipt.log_time_ms,
            record.actor,
        )

    def _replayed(
        self, submission: Submission, receipt: Receipt | None, *, erased: bool, is_batch: bool
    ) -> WriteAnswer:
        """From memory the whole answer, except to a batch; from the store that it was committed, and where.

        See LG-10, LG-11 and LG-17.
        """
        if receipt is not None and not erased and not is_batch:
            success = self._success(receipt, self.entrance.clock.wall_ms())
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
            tx_id=None if receipt is None else tx_id_of(receipt.lane, receipt.position),
            block_height=None if receipt is None else receipt.height,
            assigned_sequence=submission.client_sequence if receipt is None else receipt.client_sequence,
            erased=erased,
        )

    def _refused(self, refused: Refused, *, may_read: bool) -> WriteError:
        """Who may write and not read is told that a condition failed, and not what the entity is."""
        reason = refused.reason
        code = _CODES.get(reason)
        if code is None:
            if reason in NOT_NOW:
                raise not_now(refused)
            field = _FIELDS.get(refused.field, refused.field)
            raise DoorError(BAD_REQUEST, f"{field}: {refused.message}", field=field)
        self.counts.ledger_writes[code.name.lower()] += 1
        exists = reason in _CONDITIONS and refused.value is not None and may_read
        return WriteError(
            code=code,
            message=_MESSAGES.get(reason, refused.message) if may_read or reason not in _CONDITIONS else _UNMET,
            key=refused.field if reason in _CONDITIONS else "",
            current_version=refused.current if exists else None,
            current_value=refused.value if exists else None,
            operation_index=refused.index if reason in _CONDITIONS else None,
            last_committed_sequence=refused.current if reason in _SEQUENCES else None,
        )

    # --- reading

    async def client_state(self, organization: str, vault: str, client_id: str, principal: Principal) -> ClientState:
        """Where a client stands (LG-8)."""
        scope = read_scope(organization, vault)
        client = self.client_of(client_id, principal)
        grants = principal.grants
        if not grants.may_write(scope.name) and not grants.may_read(scope.name):
            raise _forbidden("neither be read nor written")
        with telling():
            entry = await self.log.books.client(scope.name, client)
        if entry is None:
            return ClientState()
        return ClientState(entry.sequence, entry.last_seen_ms, entry.last_key, entry.last_fingerprint)

    async def entity(self, organization: str, vault: str, key: str, principal: Principal) -> tuple[str, Entity] | None:
        """An entity as it stands; None where there is none."""
        scope = read_scope(organization, vault)
        _check_name(key, "key", ENTITY_KEY_CHARACTERS_MAX)
        self._demand_readable(scope, principal)
        with telling():
            found = await self.log.books.entity(scope.name, key)
        return None if found is None else (key, found)

    async def entities(
        self, organization: str, vault: str, prefix: str, page_token: str, page_size: int, principal: Principal
    ) -> Entities:
        """A page of entities by key."""
        scope = read_scope(organization, vault)
        _check_text(prefix, "prefix", ENTITY_KEY_CHARACTERS_MAX)
        (after,) = _tokens(page_token, 1) if page_token else ("",)
        self._demand_readable(scope, principal)
        with telling():
            page = await self.log.books.entities(
                scope.name, prefix=prefix, after=after, limit=self._page_size(page_size)
            )
        return Entities(page.entities, _token(page.entities[-1][0]) if page.has_more else "")

    async def relationships(
        self, asked: RelationshipQuery, vault: str, page_token: str, principal: Principal
    ) -> Relationships:
        """A page of relationships. The query's scope is the organization, its limit the page's size as it was asked."""
        scope = read_scope(asked.scope, vault)
        for name in ("resource", "relation", "subject"):
            _check_text(getattr(asked, name), name, ENTITY_KEY_CHARACTERS_MAX)
        if asked.relation and not (asked.resource or asked.subject):
            raise _bad("relation", "needs a resource or a subject beside it")
        first, second, third = _tokens(page_token, 3) if page_token else ("", "", "")
        self._demand_readable(scope, principal)
        query = msgspec.structs.replace(
            asked, scope=scope.name, after=(first, second, third), limit=self._page_size(asked.limit)
        )
        with telling():
            page = await self.log.books.relationships(query)
        return Relationships(page.relationships, _token(*page.relationships[-1][:3]) if page.has_more else "")

    async def relationship(
        self, organization: str, vault: str, names: tuple[str, str, str], principal: Principal
    ) -> int:
        """The version that made a relationship; 0 where there is none."""
        scope = read_scope(organization, vault)
        for field, name in zip(("resource", "relation", "subject"), names, strict=True):
            _check_name(name, field, ENTITY_KEY_CHARACTERS_MAX)
        self._demand_readable(scope, principal)
        with telling():
            return await self.log.books.relationship(scope.name, *names) or 0

    # --- transactions, blocks, proofs

    async def transaction(self, organization: str, vault: str, tx_id: str, principal: Principal) -> Transaction:
        """A transaction of the scope. Raises DoorError where there is none."""
        record = await self._record(read_scope(organization, vault), tx_id, principal)
        return Transaction(tx_id, record, operations_of(record))

    async def proof(self, organization: str, vault: str, tx_id: str, principal: Principal) -> Proven:
        """All that proves a transaction of the scope."""
        record = await self._record(read_scope(organization, vault), tx_id, principal)
        with telling():
            return await self.log.prove(record.receipt)

    async def _record(self, scope: Scope, tx_id: str, principal: Principal) -> Record:
        place = place_of(tx_id)
        if place is None:
            raise _bad("tx_id", "must have 16 hexadecimal digits, in lower case")
        self._demand_readable(scope, principal)
        with telling():
            record = await self.log.books.record(*place) if place[0] == self.log.books.lane(scope.name) else None
        if record is None or record.scope != scope.name or record.policy != LEDGER.name:
            raise DoorError(NOT_FOUND, "tx_id: the scope has no such transaction", field="tx_id")
        return record

    async def block(self, organization: str, vault: str, height: int, principal: Principal) -> ScopeBlock:
        """A block of the scope's lane. Raises DoorError where there is none."""
        scope = read_scope(organization, vault)
        if height < 1:
            raise _bad("height", f"must be from 1 on, not {height}")
        self._demand_readable(scope, principal)
        with telling():
            found = await self.log.books.blocks(scope.name, min(height, 2**62) - 1, 1)
        if not found or found[0].block.height != height:
            raise DoorError(NOT_FOUND, "height: the scope's lane has no such block", field="height")
        return self.scope_block(found[0])

    def watched(self, organization: str, vault: str, principal: Principal) -> Scope:
        """The scope whose blocks may be watched. Raises DoorError."""
        scope = read_scope(organization, vault)
        self._demand_readable(scope, principal)
        return scope

    async def demand_height(self, scope: Scope, after: int, epoch: str) -> None:
        """Raises DoorError for a height that the lane has not, or one of another history (CO-40)."""
        with telling():
            heads = await self.log.heads()
        lane = self.log.books.lane(scope.name)
        height = heads[lane].height if lane in heads else 0
        if (epoch and epoch != self.log.epoch) or after > height:
            message = (
                f"after_height: must be from 0 to {height}, the newest of the scope's lane, and of this history; "
                "read again from a height that you know"
            )
            raise DoorError(HISTORY_CHANGED, message, field="after_height", epoch=self.log.epoch, height=height)

    async def watch(self, scope: Scope, after: int) -> AsyncGenerator[Sequence[ScopeBlock], None]:
        """Blocks after a height, and those to come, for a scope that `demand_height` has let through."""
        async with aclosing(self.log.books.follow_blocks(scope.name, after)) as several:
            async for blocks in several:
                yield [self.scope_block(one) for one in blocks]

    def scope_block(self, found: ScopedBlock) -> ScopeBlock:
        """A block as readers of a scope see it."""
        lane = found.block.lane
        tx_ids = tuple([tx_id_of(lane, position) for position in found.positions])
        return ScopeBlock(found.block, tx_ids, self.log.epoch)

    # --- rights

    def _demand_readable(self, scope: Scope, principal: Principal) -> None:
        if not principal.grants.may_read(scope.name):
            raise _forbidden("not be read")

    def _demand_writable(self, scope: Scope, principal: Principal) -> None:
        if not principal.grants.may_write(scope.name):
            raise _forbidden("not be written")

    def _page_size(self, asked: int) -> int:
        limits = self.limits
        return min(asked or limits.page_events_default, limits.page_events_max)


@lru_cache(maxsize=4096)  # the same come again and again
def read_scope(organization: str, vault: str) -> Scope:
    """A scope of its two names. Raises DoorError."""
    _check_name(organization, "organization", SCOPE_NAME_CHARACTERS_MAX)
    if vault:
        _check_name(vault, "vault", SCOPE_NAME_CHARACTERS_MAX)
    for field, name in (("organization", organization), ("vault", vault)):
        if not name.isascii() and nfc(name) != name:
            # Grants are compared in NFC: two spellings of a name would be two scopes with the same rights.
            raise _bad(field, "must be in NFC")
    return Scope(organization, vault, ledger_scope(organization, vault))


def bad_value(error: CanonicalError) -> DoorError:
    """What one is told whose request has a value that cannot be."""
    field = error.path.removeprefix("$").removeprefix(".") or "body"
    return _bad(field, error.reason)


def _check_name(name: str, field: str, characters_max: int) -> None:
    if not name:
        raise _bad(field, f"must have 1 to {characters_max} characters, not 0", limit=characters_max)
    _check_text(name, field, characters_max)


def _check_text(text: str, field: str, characters_max: int) -> None:
    if len(text) > characters_max:
        raise _bad(field, f"must have at most {characters_max} characters, not {len(text)}", limit=characters_max)
    if "\0" in text:
        raise _bad(field, "must not have U+0000")


def _bad(field: str, reason: str, **details: int) -> DoorError:
    return DoorError(BAD_REQUEST, f"{field}: {reason}", field=field, **details)


def _forbidden(what: str) -> DoorError:
    return DoorError(FORBIDDEN, f"organization, vault: may {what}", field="organization")


def _token(*names: str) -> str:
    """A page's token: after what to go on."""
    return urlsafe_b64encode(msgspec.json.encode(names)).decode()


_TOKEN: Final = msgspec.json.Decoder(tuple[str, ...])


def _tokens(token: str, count: int) -> tuple[str, ...]:
    try:
        names = _TOKEN.decode(urlsafe_b64decode(token.encode("ascii")))
    except (ValueError, msgspec.MsgspecError):
        names = ()
    if len(names) != count or any("\0" in name for name in names):
        raise _bad("page_token", "must be one that a page has given")
    return names
