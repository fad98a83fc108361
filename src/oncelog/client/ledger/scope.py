"""A scope of a ledger: its writes and reads."""

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
    """A scope of a ledger: an organization or one of its vaults. Created by `LedgerClient.scope`."""

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
        """Commit operations as one atomic transaction, exactly once, and wait for the outcome.

        The write is on disk before it is sent, and is retried until it has an outcome. Cancellation and TimeoutError do
        not withdraw it. The same key with the same operations is the same write.

        Raises:
            CanonicalError: an operation is invalid.
            LimitExceededError: a limit of the client would be exceeded.
            IdReusedError: a write with different operations is pending under this key.
            StoreError: the file cannot be written; nothing was sent.
            ServerRefusedError: the server denies access.
            ForgottenError: the server has lost this client's state; see `resume`.
            UnverifiedError: the proof of the write does not verify.
            ClosedError: the client is not open.
        """
        operation_tuple = tuple(operations) if isinstance(operations, Iterable) else (operations,)
        encoded_key = _encode_key(key)
        # The timeout does not include opening the stream, because after a TimeoutError the write must be pending.
        stream = await self._get_stream()
        async with asyncio.timeout(timeout_s):
            return await stream.write(operation_tuple, encoded_key)

    async def recovered(self) -> list[Recovered]:
        """Wait for the outcomes of the writes that an earlier run left pending, and return these writes in order.

        Raises ForgottenError if the outcomes can no longer be determined, or ServerRefusedError if the server denies
        access.
        """
        return await (await self._get_stream()).wait_recovered()

    async def resume(self, *, resend: bool | Collection[UUID]) -> list[Recovered]:
        """Continue after a ForgottenError. Resend the chosen pending writes and return their outcomes.

        `resend` is True for all pending writes, False for none, or a set of keys. The client sends these writes as new
        ones under their old keys, and withdraws the others.
        """
        return await (await self._get_stream()).resume(resend)

    async def withdraw(self, key: UUID | bytes) -> bool:
        """Stop sending a pending write, so that later writes of the scope can proceed. Return once this is saved.

        Returns True if the write was not committed and never will be. Returns False if an earlier attempt or a delayed
        copy of it may still commit: read the ledger to find out. Callers waiting for the write get a ClientError.
        Raises ClientError if no pending write has this key.
        """
        return await (await self._get_stream()).withdraw(_encode_key(key))

    async def pending(self) -> list[PendingWrite]:
        """Return the writes without an outcome, in order, including writes of earlier runs."""
        return (await self._get_stream()).outbox.list_pending()

    def status(self) -> Status:
        """Return the scope's current status, for example for a user interface."""
        runtime, stream = self._runtime, self._stream
        pending = 0 if stream is None else len(stream.outbox.pending)
        if not runtime.is_open:
            return Status(state=ConnectionState.CLOSED, pending=pending, last_error=runtime.failure_text)
        state = ConnectionState.LIVE if stream is None else stream.state
        return Status(state=state, pending=pending, last_error=self.last_error)

    def reconnect_now(self) -> None:
        """Skip the pause before the next attempt, for example because the network is back."""
        self._runtime.check_open()
        if self._stream is not None:
            self._stream.skip_pause()

    @property
    def last_error(self) -> str | None:
        """Why pending writes have no outcome yet: the last refusal, or the reason why the server cannot be reached.

        None if no reason is known.
        """
        return None if self._stream is None else self._stream.last_error or self._runtime.store_error

    async def open(self) -> None:
        """Load the pending writes and send them. For internal use by the client."""
        await self._load_stream()

    async def _get_stream(self) -> WriteStream:
        if self._stream is not None:
            return self._stream
        self._runtime.check_open()
        return await self._load_stream()

    async def _load_stream(self) -> WriteStream:
        runtime, names = self._runtime, (self.organization, self.vault)
        async with self._open_lock:
            if self._stream is None:
                self._stream = WriteStream(runtime, names, await runtime.call_store(runtime.store.load_scope, *names))
        return self._stream

    async def end(self) -> None:
        """Close the write stream. For internal use by the client."""
        async with self._open_lock:  # the stream may still be opening
            if self._stream is not None:
                await self._stream.close()

    # --- reads

    async def client_state(self) -> ClientState:
        """Return the state that the server stores for this client in this scope."""
        return await self._runtime.transport.get_client_state(self.organization, self.vault)

    async def get_entity(self, key: str) -> LedgerEntity | None:
        """Return an entity, or None if it does not exist."""
        response = await self._call("GetEntity", key=key)
        return self._codec.decode_entity(response.entity) if response.HasField("entity") else None

    async def list_entities(self, prefix: str = "", *, page_size: int = 0) -> AsyncGenerator[LedgerEntity, None]:
        """Yield the entities whose keys begin with a prefix, ordered by key.

        The pages are read one after another, so together they are not a consistent snapshot.
        """
        async for page in self._iterate_pages("ListEntities", prefix=prefix, page_size=page_size):
            for entity in page.entities:
                yield self._codec.decode_entity(entity)

    async def list_relationships(
        self, *, resource: str = "", relation: str = "", subject: str = "", page_size: int = 0
    ) -> AsyncGenerator[LedgerRelationship, None]:
        """Yield the relationships that match, in order, page by page. An empty argument matches any value."""
        names = {"resource": resource, "relation": relation, "subject": subject}
        async for page in self._iterate_pages("ListRelationships", **names, page_size=page_size):
            for relationship in page.relationships:
                yield self._codec.decode_relationship(relationship)

    async def check_relationship(self, resource: str, relation: str, subject: str) -> bool:
        """Return whether a relationship exists."""
        response = await self._call("CheckRelationship", resource=resource, relation=relation, subject=subject)
        return bool(response.exists)

    async def get_transaction(self, tx_id: str) -> LedgerTransaction | None:
        """Return a transaction of the scope, or None if it does not exist."""
        return await self._find("GetTransaction", self._codec.decode_transaction, tx_id=tx_id)

    async def get_block(self, height: int) -> LedgerBlock | None:
        """Return a block of the scope's lane, or None if it does not exist."""
        return await self._find("GetBlock", self._codec.decode_block, height=height)

    async def get_proof(self, tx_id: str) -> TransactionProof | None:
        """Return the proof of a transaction, or None if the transaction does not exist. `is_valid` checks the proof."""
        return await self._find("GetProof", self._codec.decode_proof, tx_id=tx_id)

    async def watch_blocks(
        self, after_height: int = 0, *, check_chain: bool = True, previous_hash: bytes | None = None
    ) -> AsyncGenerator[LedgerBlock, None]:
        """Yield the blocks of the scope's lane above a height, and then each new block, in order and exactly once.

        The iterator reconnects after a lost connection. With `check_chain` it raises UnverifiedError for a block that
        does not follow the previous one. To check the first block too, pass the hash of block `after_height` as
        `previous_hash`. If a restore has lost the previous block, the error message explains how to continue.
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
                # The server closes a stream when its token expires. A token function may return a new token.
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
    """Raise UnverifiedError for a block that does not follow the previous one.

    `epoch` is the epoch of the previous block, or empty if unknown.
    """
    block = found.block
    if block.height != height + 1 and not (block.may_follow_gap and block.height > height):
        raise UnverifiedError(f"the server sent block {block.height} after block {height}")
    if block.hash != found.hash:
        raise UnverifiedError(f"the hash of block {block.height} does not match its header")
    if previous is None or block.previous == previous:
        return
    if epoch not in ("", found.epoch) or block.height != height + 1:
        reported = f" (its epoch is {found.epoch}, but was {epoch})" if epoch and epoch != found.epoch else ""
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
