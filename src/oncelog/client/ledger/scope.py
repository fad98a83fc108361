"""One scope of a ledger: what is written there, and what is read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from importlib import import_module
from typing import Any, TypeVar
from uuid import UUID, uuid4

from oncelog.client.ledger.values import (
    ClientState,
    LedgerBlock,
    LedgerEntity,
    LedgerRelationship,
    LedgerTransaction,
    Outcome,
    PendingWrite,
    Recovered,
    Status,
    TransactionProof,
    UnverifiedError,
)
from oncelog.client.ledger.write_stream import LedgerRuntime, WriteStream
from oncelog.client.runtime.backoff import Backoff, RetryPause
from oncelog.client.runtime.client import StatusSource
from oncelog.client.runtime.values import ConnectionState
from oncelog.core.operations import Operation
from oncelog.core.proof import NO_HASH
from oncelog.error_codes import AUTH_FAILED, NOT_FOUND
from oncelog.errors import LostError, ServerRefusedError, SettingsError

T = TypeVar("T")


class LedgerScope(StatusSource[LedgerRuntime, Status]):
    """An organization, or a vault of one, as one client sees it. Made by `LedgerClient.scope`."""

    def __init__(self, runtime: LedgerRuntime, organization: str, vault: str) -> None:
        self.organization = organization
        self.vault = vault
        self._runtime = runtime
        self._stream: WriteStream | None = None
        self._open_lock = asyncio.Lock()

    # --- writing

    async def write(
        self,
        operations: Operation | Iterable[Operation],
        *,
        key: UUID | bytes | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Commits the operations as one transaction, all or none, and once. Waits for what became of it.

        They are on the disk before they are sent, and sent until there is an outcome: whoever is cancelled or gets a
        TimeoutError does not take the write back. The same key with the same operations is the same write.

        Raises CanonicalError for what cannot be written, LimitExceededError, IdReusedError if another write waits
        under this key, StoreError if the file cannot be written; then nothing was sent. Raises ServerRefusedError
        where the server does not let us write, ForgottenError, UnverifiedError, and ClosedError.
        """
        operation_tuple = tuple(operations) if isinstance(operations, Iterable) else (operations,)
        encoded_key = _encode_key(key)
        # Not in the time that is given: who hears that it is over must find the write kept, and in a stream it is.
        stream = await self._get_stream()
        async with asyncio.timeout(timeout_s):
            return await stream.write(operation_tuple, encoded_key)

    async def recovered(self) -> list[Recovered]:
        """The writes of an earlier run whose outcomes were not known, each with its outcome by now, in their order.

        Waits until all of them are known. Raises ForgottenError where that can never be, ServerRefusedError.
        """
        return await (await self._get_stream()).wait_recovered()

    async def resume(self, *, resend: bool | Collection[UUID]) -> list[Recovered]:
        """After a ForgottenError: says what becomes of the pending writes, and goes on.

        True sends all of them again, as new ones under their old keys; False lets go of them; several keys send
        those and let go of the others. Gives the outcomes of those that were sent.
        """
        return await (await self._get_stream()).resume(resend)

    async def withdraw(self, key: UUID | bytes) -> bool:
        """Stop sending a pending write, so that later writes of the scope go on. Return once that is saved.

        True: the write was not committed and never will be. False: an earlier attempt may have committed it, or a
        delayed copy of it still may; read the ledger to find out. Callers that wait for the write get a ClientError.
        Raises ClientError if no pending write has this key.
        """
        return await (await self._get_stream()).withdraw(_encode_key(key))

    async def pending(self) -> list[PendingWrite]:
        """Writes without an outcome, in their order, those of an earlier run too."""
        return (await self._get_stream()).list_pending()

    def status(self) -> Status:
        """How the scope stands, for a user interface."""
        runtime, stream = self._runtime, self._stream
        if not runtime.is_open:
            pending = 0 if stream is None else stream.pending_count
            return Status(state=ConnectionState.CLOSED, pending=pending, last_error=runtime.failure_text)
        if stream is None:
            return Status(state=ConnectionState.LIVE)
        return Status(state=stream.state, pending=stream.pending_count, last_error=stream.last_error)

    def reconnect_now(self) -> None:
        """End the pause before the next attempt: the application knows that the network is back."""
        self._runtime.check_open()
        if self._stream is not None:
            self._stream.skip_pause()

    @property
    def last_error(self) -> str | None:
        """Why pending writes have no outcome yet: what the server said of them last, or why it cannot be reached.

        None if it is not known, or all is well.
        """
        return None if self._stream is None else self._stream.last_error

    async def open(self) -> WriteStream:
        """Load the pending writes, and send them. For the client alone."""
        runtime, names = self._runtime, (self.organization, self.vault)
        async with self._open_lock:
            if self._stream is None:
                self._stream = WriteStream(runtime, names, await runtime.call_store(runtime.store.load_scope, *names))
        return self._stream

    async def _get_stream(self) -> WriteStream:
        if self._stream is not None:
            return self._stream
        self._runtime.check_open()
        return await self.open()

    async def end(self) -> None:
        """Close the stream of writes. For the client alone."""
        async with self._open_lock:  # it may be opening
            if self._stream is not None:
                await self._stream.close()

    # --- reading

    async def client_state(self) -> ClientState:
        """Where this client stands, as the server says."""
        return await self._runtime.transport.get_client_state(self.organization, self.vault)

    async def get_entity(self, key: str) -> LedgerEntity | None:
        """An entity as it stands; None where there is none."""
        response = await self._call("GetEntity", key=key)
        return self._codec.decode_entity(response.entity) if response.HasField("entity") else None

    async def list_entities(self, prefix: str = "", *, page_size: int = 0) -> AsyncGenerator[LedgerEntity, None]:
        """All entities whose keys begin with that, by key, page by page: not all of one moment."""
        async for page in self._iterate_pages("ListEntities", prefix=prefix, page_size=page_size):
            for entity in page.entities:
                yield self._codec.decode_entity(entity)

    async def list_relationships(
        self, *, resource: str = "", relation: str = "", subject: str = "", page_size: int = 0
    ) -> AsyncGenerator[LedgerRelationship, None]:
        """All relationships of this resource, relation, subject (empty is any), in their order, page by page."""
        names = {"resource": resource, "relation": relation, "subject": subject}
        async for page in self._iterate_pages("ListRelationships", **names, page_size=page_size):
            for relationship in page.relationships:
                yield self._codec.decode_relationship(relationship)

    async def check_relationship(self, resource: str, relation: str, subject: str) -> bool:
        """Whether there is this relationship."""
        response = await self._call("CheckRelationship", resource=resource, relation=relation, subject=subject)
        return bool(response.exists)

    async def get_transaction(self, tx_id: str) -> LedgerTransaction | None:
        """A transaction of the scope; None where there is none."""
        return await self._find("GetTransaction", self._codec.decode_transaction, tx_id=tx_id)

    async def get_block(self, height: int) -> LedgerBlock | None:
        """A block of the scope's lane; None where there is none."""
        return await self._find("GetBlock", self._codec.decode_block, height=height)

    async def get_proof(self, tx_id: str) -> TransactionProof | None:
        """All that proves a transaction, which `is_valid` looks at; None where there is none."""
        return await self._find("GetProof", self._codec.decode_proof, tx_id=tx_id)

    async def watch_blocks(
        self, after_height: int = 0, *, check_chain: bool = True, previous_hash: bytes | None = None
    ) -> AsyncGenerator[LedgerBlock, None]:
        """Every block of the scope's lane after a height, and those to come, each once and in order.

        Goes on by itself after a lost connection. `check_chain` raises UnverifiedError for a block that does not
        follow the one before; give its hash as `previous_hash` to have the first one looked at, too. After a restore
        that lost the block before, its message names the restore and the block to go back to.
        """
        runtime, height, epoch = self._runtime, after_height, ""
        previous = NO_HASH if after_height == 0 else previous_hash
        backoff = Backoff(runtime.limits, runtime.random_source)
        while True:
            has_come = False
            request = self._build_request("WatchBlocks", after_height=height)
            try:
                async with aclosing(runtime.transport.iterate("WatchBlocks", request)) as messages:
                    async for message in messages:
                        found = self._codec.decode_block(message)
                        if check_chain:
                            _check_next_block(found, height, previous, epoch)
                        elif found.block.height <= height:
                            continue
                        height, previous, epoch, has_come = found.block.height, found.hash, found.epoch, True
                        yield found
            except LostError:
                pass
            except ServerRefusedError as error:
                # A stream ends with its token; a function that gave it may have a new one.
                may_renew_token = error.code == AUTH_FAILED and has_come and runtime.transport.may_renew_token
                if not error.is_transient and not may_renew_token:
                    raise
            if has_come:
                backoff.reset()
            await backoff.wait(RetryPause())

    @property
    def _codec(self) -> Any:
        return import_module("oncelog.client.ledger.codec")

    def _build_request(self, method: str, **fields: Any) -> Any:
        self._runtime.check_open()
        kind = getattr(self._codec.pb, f"{method}Request")
        try:
            return kind(organization=self.organization, vault=self.vault, **fields)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{method}: {error}") from error

    async def _call(self, method: str, **fields: Any) -> Any:
        return await self._runtime.transport.call(method, self._build_request(method, **fields))

    async def _find(self, method: str, decode: Callable[[Any], T], **fields: Any) -> T | None:
        try:
            return decode(await self._call(method, **fields))
        except ServerRefusedError as error:
            if error.code == NOT_FOUND:
                return None
            raise

    async def _iterate_pages(self, method: str, **fields: Any) -> AsyncIterator[Any]:
        page = await self._call(method, **fields)
        yield page
        while page.next_page_token:
            page = await self._call(method, **fields, page_token=page.next_page_token)
            yield page


def _check_next_block(found: LedgerBlock, height: int, previous: bytes | None, epoch: str = "") -> None:
    """Raise UnverifiedError for a block that does not follow the last one, whose epoch is given if it is known."""
    block = found.block
    if block.height != height + 1 and not (block.may_follow_gap and block.height > height):
        raise UnverifiedError(f"behind block {height} the server has sent block {block.height}")
    if block.hash != found.hash:
        raise UnverifiedError(f"the hash of block {block.height} is not the one that its header has")
    if previous is None or block.previous == previous:
        return
    if epoch not in ("", found.epoch) or block.height != height + 1:
        reported = f" (epoch {found.epoch}, was {epoch})" if epoch and epoch != found.epoch else ""
        raise UnverifiedError(
            f"block {block.height} does not follow block {height}: the server reports a new history{reported}. Either "
            f"its log was restored from a backup without block {height}, or its history was rewritten: ask the "
            "operator. To continue, watch from the last block that get_block still returns with the same hash"
        )
    raise UnverifiedError(f"block {block.height} does not follow the block before it")


def _encode_key(key: UUID | bytes | None) -> bytes:
    key_bytes = uuid4().bytes if key is None else key.bytes if isinstance(key, UUID) else key
    if not isinstance(key_bytes, bytes) or len(key_bytes) != 16 or not any(key_bytes):
        raise SettingsError("key must be a UUID, or 16 bytes that are not all zero")
    return key_bytes
