"""What the scopes of one client have in common: a file, its thread, and a channel to the server."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from oncelog.client.ledger.limits import LedgerLimits
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.write_stream import WriteStream, build_closed_error
from oncelog.client.runtime.cancellation import call_in_thread
from oncelog.client.runtime.client import close_store_thread
from oncelog.errors import ClosedError

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

T = TypeVar("T")


class LedgerRuntime:
    """Opened once, and closed once."""

    def __init__(
        self,
        store: LedgerStore,
        new_transport: Callable[[], "LedgerTransport"],
        *,
        limits: LedgerLimits,
        random_source: random.Random,
        has_token_function: bool,
    ) -> None:
        self.limits = limits
        self.random_source = random_source
        self.has_token_function = has_token_function
        self._store = store
        self._new_transport = new_transport
        self._transport: LedgerTransport | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._is_closing = False

    @property
    def was_opened(self) -> bool:
        """Or at least tried to be."""
        return self._thread is not None

    @property
    def transport(self) -> "LedgerTransport":
        """Raises ClosedError where the client is not open."""
        if self._is_closing:
            raise build_closed_error()
        if self._transport is None:
            raise ClosedError("the ledger's client is not open: use `async with`")
        return self._transport

    async def open(self, client_id: str) -> list[tuple[str, str]]:
        """Gives the scopes in which writes are pending. Whatever it raises, it is to be closed."""
        transport = self._new_transport()
        self._thread = ThreadPoolExecutor(1, "oncelog-ledger")
        scopes = await self._run_in_store(self._store.open, client_id)
        transport.open()
        self._transport = transport
        return scopes

    async def new_stream(self, organization: str, vault: str) -> WriteStream:
        """The writes of a scope, with what the file has of it."""
        transport = self.transport
        stored = await self._run_in_store(self._store.load_scope, organization, vault)
        return WriteStream(
            organization,
            vault,
            stored,
            store=self._store,
            run_in_store=self._run_in_store,
            transport=transport,
            limits=self.limits,
            random_source=self.random_source,
        )

    def end(self) -> None:
        """From now on nothing new is begun."""
        self._is_closing = True

    async def close(self) -> None:
        """When all streams are closed."""
        try:
            if self._transport is not None:
                await self._transport.close()
        finally:
            if self._thread is not None:
                await close_store_thread(self._thread, self._store.close)

    async def _run_in_store(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None:
            raise build_closed_error()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, call_in_thread, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise build_closed_error() from error
        return await called
