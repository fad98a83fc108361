"""Reloads parts of a running server: settings that need no restart, the certificate, schemas and credential files."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from oncelog.background_tasks import BackgroundTasks
from oncelog.core.tenants import Tenant
from oncelog.errors import OncelogError
from oncelog.server import logger
from oncelog.server.apis import Apis
from oncelog.server.audit.endpoints import SERVER_ACTOR
from oncelog.server.auth.authenticator import Authenticator
from oncelog.server.settings import ServerSettings

CREDENTIALS_POLL_S: Final = 1.0
"""How often credential files are checked for changes."""


@dataclass(slots=True, eq=False)
class Reloader:
    """Holds the current settings of a server, and reloads them together with the files."""

    settings: ServerSettings
    _load_settings: Callable[[], ServerSettings] | None
    _apis: Apis
    _authenticator: Authenticator
    _loaders: list[Callable[[], None]]
    """Functions that load one file each. A function that fails raises OncelogError and leaves the previous content
    in use."""
    _tasks: BackgroundTasks
    run_checks: Callable[[], None]
    """Checks the rights of open connections."""
    _tenants_task: asyncio.Task[None] | None = None
    _wanted_tenants: tuple[Tenant, ...] | None = None
    """Quotas that have been requested but not set yet."""

    def start(self) -> None:
        """Start polling the credential files for changes."""
        if self._authenticator.files:
            self._tasks.start(self._poll_credentials())

    def load_files(self) -> None:
        """Load all files. Raises OncelogError for the first one that cannot be loaded."""
        for load in self._loaders:
            load()

    def reload(self) -> None:
        """Reload all parts, independently of each other, and recheck open connections.

        If a part cannot be loaded, the failure is logged and its previous content remains in use.
        """
        failures = 0
        for load in (*self._loaders, self._reload_settings):
            try:
                load()
            except OncelogError as error:
                failures += 1
                logger.error("not reloaded: %s", error)  # noqa: TRY400 - the message names the cause
        self.run_checks()
        if not failures:
            logger.info("keys, grants and certificates were reloaded")

    def _reload_settings(self) -> None:
        self.apply_settings(self.settings if self._load_settings is None else self._load_settings())

    def apply_settings(self, new: ServerSettings) -> None:
        """Apply the settings that need no restart: read-only mode, disk limits and quotas."""
        guard = self._apis.log.write_gate
        guard.set_read_only(is_read_only=new.read_only, actor=SERVER_ACTOR)
        if new.disk != self.settings.disk:
            guard.set_limits(new.disk)
        self._wanted_tenants = new.tenants
        if self._tenants_task is None:
            self._tenants_task = self._tasks.start(self._update_tenants())
        self.settings = replace(self.settings, read_only=new.read_only, disk=new.disk)

    async def _update_tenants(self) -> None:
        """Set the most recently requested quotas. Another reload may request new ones during the slow count."""
        try:
            # Set them even if this server already has the same quotas, because a different server may have changed
            # them.
            while (wanted := self._wanted_tenants) is not None:
                self._wanted_tenants = None
                is_changed = await self._apis.log.set_tenants(wanted, SERVER_ACTOR)
                self._apis.events_service.set_tenants(wanted)
                self.settings = replace(self.settings, tenants=wanted)
                if is_changed:
                    logger.info("quotas were reloaded", extra={"tenants": len(wanted)})
        except OncelogError as error:
            logger.error("the quotas were not reloaded: %s", error)  # noqa: TRY400
        finally:
            self._tenants_task = None

    async def _poll_credentials(self) -> None:
        """Reload changed credential files, and close the connections whose credentials are no longer valid."""
        credential_files = self._authenticator.files
        while True:
            await asyncio.sleep(CREDENTIALS_POLL_S)
            try:
                changes = await asyncio.to_thread(credential_files.load_changes)
                has_changed, failures = credential_files.apply(changes)
                for failure in failures:
                    logger.error("not reloaded; %s", failure)
                self._authenticator.report_expired()
                if has_changed:
                    self.run_checks()
            except Exception:
                logger.exception("the credential files could not be polled")
