"""The asyncio client of a ledger.

    async with LedgerClient("127.0.0.1:7271", path="billing.db", organization="acme", client_id="billing-1") as ledger:
        outcome = await ledger.write([set_entity("user:1", b"…", must_not_exist=True), relate("doc", "owner", "ann")])

The client is also its first scope. `ledger.scope("acme", "main")` returns another scope, with a separate stream in the
same file. The `protocol` makes all decisions, the `store` saves the state, and one `write_stream` per scope does the
I/O.
"""

import asyncio
import os
import random
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oncelog.client.ledger.scope import LedgerScope
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.values import LedgerLimits, Status
from oncelog.client.ledger.write_stream import LedgerRuntime, logger
from oncelog.client.runtime.client import BaseClient
from oncelog.client.runtime.options import Token, check_client_id, check_limits, check_path, check_token
from oncelog.errors import SettingsError
from oncelog.extras import explain_missing_package

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

SCOPE_NAME_CHARACTERS_MAX: Final = 80
_ADDRESS_PATTERN: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:@/\[\]]+):[0-9]{1,5}", re.IGNORECASE)


class LedgerClient(BaseClient[LedgerRuntime, Status], LedgerScope):
    """A client for one ledger, with its own file. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - keyword arguments, most with a default
        self,
        address: str,
        *,
        path: str | os.PathLike[str],
        organization: str,
        vault: str = "",
        client_id: str,
        token: Token = None,
        tls: bool | str | os.PathLike[str] | None = None,
        verify: bool = True,
        limits: LedgerLimits | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """Store the configuration. Opening the client opens the file.

        `address` is HOST:PORT of the server's gRPC port. `path` is the client's file, which is created if it is
        missing, or ":memory:" for writes that need not survive a restart. `client_id` is the client id of the
        credential; the file permanently belongs to this id. `token` is a string, or a function that returns one and is
        called before every call to the server. `tls` is True to use the machine's root certificates, or the path of a
        PEM file with root certificates. `verify` checks the proof of every write. Raises SettingsError for an invalid
        argument.
        """
        if not isinstance(address, str) or not _ADDRESS_PATTERN.fullmatch(address):
            raise SettingsError(f"address must be HOST:PORT of a gRPC port, such as 127.0.0.1:7271, not {address!r}")
        self.address = address
        self.limits = check_limits(limits, LedgerLimits)
        check_token(token)
        checked_id = check_client_id(client_id)
        if checked_id is None:
            raise SettingsError("client_id must be given: each client has separate sequences")
        self.client_id = checked_id
        roots = Path(tls) if isinstance(tls, str | os.PathLike) else bool(tls)

        runtime = LedgerRuntime("ledger", logger, LedgerStore(check_path(path)), self.limits, chance)
        runtime.transport = _build_transport(
            address, client_id=checked_id, token=token, tls=roots, limits=self.limits, is_verifying=verify
        )
        LedgerScope.__init__(self, runtime, _check_name(organization, "organization"), _check_vault(vault))
        self._scopes: dict[tuple[str, str], LedgerScope] = {(self.organization, self.vault): self}

    # --- opening and closing

    async def _open(self) -> None:
        runtime = self._runtime
        pending_scopes = await runtime.call_store(runtime.store.open, self.client_id)
        runtime.transport.open()
        for names in [(self.organization, self.vault), *pending_scopes]:
            await self._add_scope(*names).open()

    async def _drain(self) -> None:
        """Wait for the answers to calls in flight, for at most `close_timeout_ms`."""
        await self._end_scopes()

    async def _release(self) -> None:
        await self._end_scopes()  # `_drain` is skipped if opening was cancelled, and a scope may have opened since
        await self._runtime.transport.close()

    async def _end_scopes(self) -> None:
        await asyncio.gather(*(scope.end() for scope in self._scopes.values()))

    def scope(self, organization: str, vault: str = "") -> LedgerScope:
        """Return a scope of this client. Each scope has separate sequences in the same file."""
        self._runtime.check_open()
        return self._add_scope(_check_name(organization, "organization"), _check_vault(vault))

    def _add_scope(self, organization: str, vault: str) -> LedgerScope:
        return self._scopes.setdefault((organization, vault), LedgerScope(self._runtime, organization, vault))

    @property
    def scopes(self) -> list[LedgerScope]:
        """All open scopes: this one, the results of `scope`, and scopes with pending writes."""
        return list(self._scopes.values())


def _build_transport(address: str, **options: Any) -> "LedgerTransport":
    """Create the transport. Raises SettingsError if gRPC is not installed."""
    with explain_missing_package("oncelog.client.ledger", "ledger"):
        module = import_module("oncelog.client.ledger.transport")
    transport: LedgerTransport = module.LedgerTransport(address, **options)
    return transport


def _check_name(name: str, field: str) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= SCOPE_NAME_CHARACTERS_MAX or "\0" in name:
        raise SettingsError(f"{field} must be a string of 1 to {SCOPE_NAME_CHARACTERS_MAX} characters without U+0000")
    return name


def _check_vault(vault: str) -> str:
    return _check_name(vault, "vault") if vault != "" else vault
