"""Ledger clients for tests, with short pauses."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from oncelog.client.ledger import LedgerClient, LedgerLimits, RefusalCode, Refused, Written
from oncelog.client.ledger.entries import WriteCall
from oncelog.client.ledger.transport import LedgerTransport
from oncelog.client.ledger.values import Outcome
from server.running_server import Serving

HERE: Final = Path(__file__).parent
LIMITS: Final = LedgerLimits(
    pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, refused_pause_ms_max=20, close_timeout_ms=10_000
)
UNREACHABLE_ADDRESS: Final = "127.0.0.1:9"
"""No server listens on this port."""


def address_of(served: Serving) -> str:
    rpc = served.server.grpc_service
    assert rpc is not None
    return f"127.0.0.1:{rpc.port}"


def ledger_of(address: str, path: Path | str = ":memory:", **options: Any) -> LedgerClient:
    """Return a client with short pauses."""
    chosen = {"organization": "acme", "client_id": "billing-1", "limits": LIMITS, **options}
    return LedgerClient(address, path=path, **chosen)


def expect_written(outcome: Outcome | Exception | None) -> Written:
    assert isinstance(outcome, Written), outcome
    return outcome


async def keys_of(ledger: LedgerClient) -> list[str]:
    """Return the keys of all entities, in the order in which they were set."""
    found = [(one.version, one.key) async for one in ledger.list_entities()]
    return [key for _, key in sorted(found)]


def code_of(outcome: Any) -> RefusalCode:
    """Assert that a write was refused, and return the code."""
    assert isinstance(outcome, Refused), outcome
    return outcome.code


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the transport's call with one that records the sequence of each write in the returned list."""
    sent: list[int] = []
    write = LedgerTransport.write

    async def record_sequence(self: LedgerTransport, organization: str, vault: str, call: WriteCall) -> Any:
        sent.append(call.sequence)
        return await write(self, organization, vault, call)

    monkeypatch.setattr(LedgerTransport, "write", record_sequence)
    return sent


async def transactions_of(ledger: LedgerClient) -> AsyncIterator[Any]:
    """Iterate over the transactions of all blocks."""
    height = 1
    while (block := await ledger.get_block(height)) is not None:
        for tx_id in block.tx_ids:
            yield await ledger.get_transaction(tx_id)
        height += 1
