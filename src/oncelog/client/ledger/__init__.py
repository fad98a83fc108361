"""Ledger client: each write survives crashes and commits once, in order. See docs/guides/ledger-client.md."""

from typing import TYPE_CHECKING

from oncelog.client.ledger.values import (
    ClientState,
    ForgottenError,
    LedgerBlock,
    LedgerEntity,
    LedgerLimits,
    LedgerRelationship,
    LedgerTransaction,
    Outcome,
    PendingWrite,
    Recovered,
    RefusalCode,
    Refused,
    Status,
    TransactionProof,
    UnverifiedError,
    Written,
    delete_entity,
    relate,
    set_entity,
    unrelate,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.lazy_names import import_lazily

if TYPE_CHECKING:
    from oncelog.client.ledger.blocking import BlockingLedgerClient, BlockingLedgerScope
    from oncelog.client.ledger.client import LedgerClient
    from oncelog.client.ledger.scope import LedgerScope

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "BlockingLedgerClient": "oncelog.client.ledger.blocking",
        "BlockingLedgerScope": "oncelog.client.ledger.blocking",
        "LedgerClient": "oncelog.client.ledger.client",
        "LedgerScope": "oncelog.client.ledger.scope",
    },
)


__all__ = [
    "BlockingLedgerClient",
    "BlockingLedgerScope",
    "ClientState",
    "ConnectionState",
    "ForgottenError",
    "LedgerBlock",
    "LedgerClient",
    "LedgerEntity",
    "LedgerLimits",
    "LedgerRelationship",
    "LedgerScope",
    "LedgerTransaction",
    "Outcome",
    "PendingWrite",
    "Recovered",
    "RefusalCode",
    "Refused",
    "Status",
    "TransactionProof",
    "UnverifiedError",
    "Written",
    "delete_entity",
    "relate",
    "set_entity",
    "unrelate",
]
