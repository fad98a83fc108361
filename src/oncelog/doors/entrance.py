"""Who may come in at all, over every door: credentials, and how often one may guess."""

import logging
from typing import Final

from oncelog.codes import AUTH_FAILED, RATE_LIMITED
from oncelog.doors.faults import DoorError
from oncelog.doors.identity import Authenticates
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.doors.rates import Rates
from oncelog.errors import AuthError
from oncelog.stores.clock import Clock

logger: Final = logging.getLogger("oncelog.doors")


class Entrance:
    """One for a server."""

    def __init__(self, authenticator: Authenticates, counts: Counts, clock: Clock, auth_failures: Rates) -> None:
        self._authenticator = authenticator
        self._counts = counts
        self.clock = clock
        self._auth_failures = auth_failures

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in (development mode)."""
        return self._authenticator.is_open

    def authenticate(self, credential: str | None, address: str) -> Principal:
        """Who that is. Raises DoorError: whoever guesses gets one text for all, and not many tries (CO-21)."""
        if not self._auth_failures.allows(address):
            retry_after_ms = self._auth_failures.retry_after_ms(address)
            raise DoorError(RATE_LIMITED, "too many failed attempts to authenticate", retry_after_ms=retry_after_ms)
        try:
            return self._authenticator.authenticate(credential)
        except AuthError as error:
            self._count(address, error.reason)
            raise DoorError(AUTH_FAILED, str(error)) from None

    def refuse_client(self, address: str, client_id: str) -> DoorError:
        """For a token of another client: as wrong as a wrong token (EV-1)."""
        self._count(address, f"not the client {client_id!r}")
        return DoorError(AUTH_FAILED, "authentication failed")

    def current(self, principal: Principal) -> Principal | None:
        """The principal with the rights of now; None if their connection must end."""
        return self._authenticator.current(principal, self.clock.wall_ms())

    def client_of(self, principal: Principal) -> str | None:
        """The one client that a credential writes as; None in development mode, where everybody may be anybody.

        Without a client of its own it is the actor, all of it: a user and an API key may have one name.
        """
        return principal.actor if principal.client_id is None and not self.is_open else principal.client_id

    def still(self, principal: Principal) -> Principal:
        """The same where there must be some. Raises DoorError: they may have been taken away while a body came."""
        current = self.current(principal)
        if current is None:
            raise has_ended()
        return current

    def _count(self, address: str, reason: str) -> None:
        self._auth_failures.take(address, 1)
        self._counts.auth_failures += 1
        logger.warning("authentication failed", extra={"address": address, "reason": reason})


def has_ended() -> DoorError:
    """What one is told whose rights have ended."""
    return DoorError(AUTH_FAILED, "the token has expired, or its rights have changed")
