"""What the scopes of one client have in common: a file, its thread, and a channel to the server."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from oncelog.client.cancelling import carried
from oncelog.client.desk import end_store_thread
from oncelog.client.ledger.limits import LedgerLimits
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.stream import Stream, closed
from oncelog.errors import ClosedError

if TYPE_CHECKING:
    from oncelog.client.ledger.wire import Wire

T = TypeVar("T")


class Shared:
    """Opened once, and closed once."""

    def __init__(
        self,
        store: LedgerStore,
        new_wire: Callable[[], "Wire"],
        *,
        limits: LedgerLimits,
        chance: random.Random,
        has_token_function: bool,
    ) -> None:
        self.limits = limits
        self.chance = chance
        self.has_token_function = has_token_function
        self._store = store
        self._new_wire = new_wire
        self._wire: Wire | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._is_closing = False

    @property
    def was_opened(self) -> bool:
        """Or at least tried to be."""
        return self._thread is not None

    @property
    def wire(self) -> "Wire":
        """Raises ClosedError where the client is not open."""
        if self._is_closing:
            raise closed()
        if self._wire is None:
            raise ClosedError("the ledger's client is not open: use `async with`")
        return self._wire

    async def open(self, client_id: str) -> list[tuple[str, str]]:
        """Gives the scopes in which writes are pending. Whatever it raises, it is to be closed."""
        wire = self._new_wire()
        self._thread = ThreadPoolExecutor(1, "oncelog-ledger")
        scopes = await self._in_store(self._store.open, client_id)
        wire.open()
        self._wire = wire
        return scopes

    async def new_stream(self, organization: str, vault: str) -> Stream:
        """The writes of a scope, with what the file has of it."""
        wire = self.wire
        kept = await self._in_store(self._store.scope, organization, vault)
        return Stream(
            organization,
            vault,
            kept,
            store=self._store,
            in_store=self._in_store,
            wire=wire,
            limits=self.limits,
            chance=self.chance,
        )

    def end(self) -> None:
        """From now on nothing new is begun."""
        self._is_closing = True

    async def close(self) -> None:
        """When all streams are closed."""
        try:
            if self._wire is not None:
                await self._wire.close()
        finally:
            if self._thread is not None:
                await end_store_thread(self._thread, self._store.close)

    async def _in_store(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None:
            raise closed()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, carried, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise closed() from error
        return await called
