"""State that the scopes of one ledger client share: a store, and a channel to the server."""

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.values import LedgerLimits
from oncelog.client.runtime.client import ClientRuntime

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

logger: Final = logging.getLogger("oncelog.client.ledger")


class LedgerRuntime(ClientRuntime[LedgerStore, LedgerLimits]):
    """State of one ledger client."""

    def __init__(
        self,
        store: LedgerStore,
        new_transport: Callable[[], "LedgerTransport"],
        *,
        limits: LedgerLimits,
        random_source: random.Random | None,
        has_token_function: bool,
    ) -> None:
        super().__init__("ledger", logger, store, limits, random_source)
        self.has_token_function = has_token_function
        self._new_transport = new_transport
        self._transport: LedgerTransport | None = None

    @property
    def transport(self) -> "LedgerTransport":
        """Raises ClosedError where the client is not open."""
        if self.is_ended:
            raise self.end_error
        if self._transport is None:
            raise self.not_open_error
        return self._transport

    async def open(self, client_id: str) -> list[tuple[str, str]]:
        """Return the scopes in which writes are pending."""
        transport = self._new_transport()
        scopes = await self.call_store(self.store.open, client_id)
        transport.open()
        self._transport = transport
        return scopes

    async def close_transport(self) -> None:
        """Close the channel, if there is one."""
        if self._transport is not None:
            await self._transport.close()
