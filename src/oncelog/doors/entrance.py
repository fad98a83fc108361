"""Who may come in at all, over every door: credentials, and how often one may guess."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

from oncelog.codes import AUTH_FAILED, FORBIDDEN, RATE_LIMITED
from oncelog.doors.connections import Caller
from oncelog.doors.faults import DoorError
from oncelog.doors.identity import Authenticates
from oncelog.doors.log_limiter import LogLimiter
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.doors.rates import Rates
from oncelog.errors import AuthError, CanonicalError
from oncelog.stores.clock import Clock

logger: Final = logging.getLogger("oncelog.doors")

T = TypeVar("T")


class Entrance:
    """One for a server."""

    def __init__(
        self,
        authenticator: Authenticates,
        counts: Counts,
        clock: Clock,
        auth_failures: Rates,
        log_limiter: LogLimiter | None = None,
        requests: Rates | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._counts = counts
        self.clock = clock
        self._auth_failures = auth_failures
        self._log_limiter = log_limiter or LogLimiter(clock.elapsed_ms)
        self._requests = Rates(0, 1, 1, clock.elapsed_ms) if requests is None else requests
        """Requests of each actor."""

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in (development mode)."""
        return self._authenticator.is_open

    def authenticate(self, credential: str | None, caller: Caller) -> Principal:
        """Return the principal of a credential. Raises DoorError, with one text for every wrong credential (CO-21).

        The credential is verified before the rate limit is checked, so that wrong credentials from an address never
        delay a valid one (CO-25). A request without a credential guesses nothing and does not count. The connection of
        the caller then counts for its principal (CO-27). An actor with too many requests gets
        RATE_LIMITED.
        """
        try:
            principal = self._authenticator.authenticate(credential)
        except AuthError as error:
            if credential:
                raise self._failed(caller.address, error.reason) from None
            self._counts.unauthenticated_requests += 1
            raise DoorError(AUTH_FAILED, str(error)) from None
        caller.authenticated(principal)
        actor, requests = principal.actor, self._requests
        if not requests.allows(actor):
            retry_after_ms = requests.retry_after_ms(actor)
            message = f"requests_per_second_max is used up; try again in {retry_after_ms} ms"
            raise DoorError(RATE_LIMITED, message, retry_after_ms=retry_after_ms)
        requests.take(actor)
        return principal

    def refuse_client(self, caller: Caller, client_id: str) -> DoorError:
        """Return the error for a token of another client, which counts as a wrong token (EV-1)."""
        return self._failed(caller.address, f"not the client {client_id!r}")

    def current(self, principal: Principal) -> Principal | None:
        """The principal with the rights of now; None if their connection must end."""
        return self._authenticator.current(principal, self.clock.wall_ms())

    def client_of(self, principal: Principal) -> str | None:
        """The one client that a credential writes as; None in development mode, where everybody may be anybody.

        Without a client of its own it is the actor, all of it: a user and an API key may have one name.
        """
        return principal.actor if principal.client_id is None and not self.is_open else principal.client_id

    def event_client(self, principal: Principal, asked: str | None) -> str | None:
        """Return the client id under which events are stored (EV-1); None if the principal may not use `asked`.

        In development mode every client id may be used as it is. Raises DoorError for one that is too long.
        """
        if self.is_open and principal.client_id is None:
            return asked or principal.actor.partition(":")[2]
        try:
            return principal.event_client(asked)
        except CanonicalError as error:
            raise DoorError(FORBIDDEN, f"{error.path}: {error.reason}", field=error.path) from None

    def still(self, principal: Principal) -> Principal:
        """The same where there must be some. Raises DoorError: they may have been taken away while a body came."""
        current = self.current(principal)
        if current is None:
            raise has_ended()
        return current

    def _failed(self, address: str, reason: str) -> DoorError:
        """Count a wrong credential, and return its error: RATE_LIMITED above the limit of the address."""
        self._counts.auth_failures += 1
        failures = self._auth_failures
        if not failures.allows(address):
            self._counts.auth_failures_limited += 1
            self._log_limiter.warning("too many failed attempts to authenticate", address=address)
            return DoorError(
                RATE_LIMITED,
                "too many failed attempts to authenticate",
                retry_after_ms=failures.retry_after_ms(address),
            )
        failures.take(address, 1)
        self._log_limiter.warning("authentication failed", address=address, reason=reason)
        return DoorError(AUTH_FAILED, "authentication failed")


def renew_each(connections: Iterable[T], renew: Callable[[T], None], end: Callable[[T, Exception], None]) -> None:
    """Renew the rights of every connection by itself.

    A connection whose renewal fails is ended, because its rights are unknown.
    """
    for connection in list(connections):
        try:
            renew(connection)
        except Exception as error:
            logger.exception("the rights of a connection could not be renewed, so it is closed")
            with suppress(Exception):
                end(connection, error)


def has_ended() -> DoorError:
    """What one is told whose rights have ended."""
    return DoorError(AUTH_FAILED, "the token has expired, or its rights have changed")
