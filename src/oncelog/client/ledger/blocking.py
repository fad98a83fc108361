"""The blocking twin of `LedgerClient`: the same methods, each of which waits for its result.

    with BlockingLedgerClient("127.0.0.1:7271", path="pay.db", organization="acme", client_id="billing-1") as ledger:
        outcome = ledger.write([set_entity("user:1", b"…")], timeout_s=10)

Any number of threads may share one.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from oncelog.client.ledger.client import LedgerClient
from oncelog.client.ledger.scope import LedgerScope
from oncelog.client.ledger.values import (
    ClientState,
    LedgerBlock,
    LedgerEntity,
    LedgerRelationship,
    LedgerTransaction,
    Outcome,
    PendingWrite,
    Recovered,
    TransactionProof,
)
from oncelog.client.runtime.client import build_closed_error
from oncelog.core.operations import Operation
from oncelog.portal import Portal


class BlockingLedgerScope:
    """A scope. Each method does what `LedgerScope`'s of that name does."""

    def __init__(self, scope: LedgerScope, portal: Portal | None) -> None:
        self._scope = scope
        self._open_portal = portal

    @property
    def organization(self) -> str:
        """As `LedgerScope.organization`."""
        return self._scope.organization

    @property
    def vault(self) -> str:
        """As `LedgerScope.vault`."""
        return self._scope.vault

    @property
    def _portal(self) -> Portal:
        if self._open_portal is None:
            raise build_closed_error("ledger")
        return self._open_portal

    def write(
        self,
        operations: Operation | Iterable[Operation],
        *,
        key: UUID | bytes | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """As `LedgerScope.write`."""
        return self._portal.call(self._scope.write, operations, key=key, timeout_s=timeout_s)

    def recovered(self) -> list[Recovered]:
        """As `LedgerScope.recovered`."""
        return self._portal.call(self._scope.recovered)

    def resume(self, *, resend: bool | Collection[UUID]) -> list[Recovered]:
        """As `LedgerScope.resume`."""
        return self._portal.call(self._scope.resume, resend=resend)

    def withdraw(self, key: UUID | bytes) -> bool:
        """As `LedgerScope.withdraw`."""
        return self._portal.call(self._scope.withdraw, key)

    def pending(self) -> list[PendingWrite]:
        """As `LedgerScope.pending`."""
        return self._portal.call(self._scope.pending)

    @property
    def last_error(self) -> str | None:
        """As `LedgerScope.last_error`."""
        return self._scope.last_error

    def client_state(self) -> ClientState:
        """As `LedgerScope.client_state`."""
        return self._portal.call(self._scope.client_state)

    def get_entity(self, key: str) -> LedgerEntity | None:
        """As `LedgerScope.get_entity`."""
        return self._portal.call(self._scope.get_entity, key)

    def list_entities(self, prefix: str = "", *, page_size: int = 0) -> Iterator[LedgerEntity]:
        """As `LedgerScope.list_entities`."""
        return self._portal.iterate(self._scope.list_entities(prefix, page_size=page_size))

    def list_relationships(
        self, *, resource: str = "", relation: str = "", subject: str = "", page_size: int = 0
    ) -> Iterator[LedgerRelationship]:
        """As `LedgerScope.list_relationships`."""
        found = self._scope.list_relationships(
            resource=resource, relation=relation, subject=subject, page_size=page_size
        )
        return self._portal.iterate(found)

    def check_relationship(self, resource: str, relation: str, subject: str) -> bool:
        """As `LedgerScope.check_relationship`."""
        return self._portal.call(self._scope.check_relationship, resource, relation, subject)

    def get_transaction(self, tx_id: str) -> LedgerTransaction | None:
        """As `LedgerScope.get_transaction`."""
        return self._portal.call(self._scope.get_transaction, tx_id)

    def get_block(self, height: int) -> LedgerBlock | None:
        """As `LedgerScope.get_block`."""
        return self._portal.call(self._scope.get_block, height)

    def get_proof(self, tx_id: str) -> TransactionProof | None:
        """As `LedgerScope.get_proof`."""
        return self._portal.call(self._scope.get_proof, tx_id)

    def watch_blocks(
        self, after_height: int = 0, *, check_chain: bool = True, previous_hash: bytes | None = None
    ) -> Iterator[LedgerBlock]:
        """As `LedgerScope.watch_blocks`."""
        blocks = self._scope.watch_blocks(after_height, check_chain=check_chain, previous_hash=previous_hash)
        return self._portal.iterate(blocks)


class BlockingLedgerClient(BlockingLedgerScope):
    """For code without an event loop. Takes what `LedgerClient` takes."""

    def __init__(self, address: str, **options: Any) -> None:
        self._client = LedgerClient(address, **options)
        super().__init__(self._client, None)

    def __enter__(self) -> Self:
        portal = Portal("oncelog-ledger-loop", partial(build_closed_error, "ledger"))
        try:
            portal.call(self._client.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `LedgerClient.close`."""
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._client.close)
            finally:
                portal.close()

    def scope(self, organization: str, vault: str = "") -> BlockingLedgerScope:
        """As `LedgerClient.scope`."""
        return BlockingLedgerScope(self._client.scope(organization, vault), self._portal)
