from collections.abc import AsyncIterator

import pytest

from client.ledger.ledgers import address_of, ledger_of
from oncelog.client.ledger import LedgerClient
from server.running_server import Serving


@pytest.fixture
async def ledger(served: Serving) -> AsyncIterator[LedgerClient]:
    """An open ledger client of `served` with an in-memory store."""
    async with ledger_of(address_of(served)) as opened:
        yield opened
