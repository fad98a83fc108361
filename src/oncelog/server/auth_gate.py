"""Authentication for every API: verifies credentials, and limits failed attempts and requests."""

from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from oncelog.error_codes import AUTH_FAILED, FORBIDDEN, RATE_LIMITED, SERVER_BUSY
from oncelog.errors import AUTHENTICATION_FAILED, AuthError, CanonicalError
from oncelog.server import logger
from oncelog.server.auth.authenticator import Authenticator
from oncelog.server.auth.principal import Principal
from oncelog.server.auth.stream_tickets import StreamTickets, Ticket
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError, credential_ended_error, field_error, shutdown_error
from oncelog.server.limits import REQUESTS_BURST_SECONDS, ApiLimits
from oncelog.server.metrics import Counts
from oncelog.server.rate_limiter import LogLimiter, RateLimiter
from oncelog.server.tracing import RequestTracer
from oncelog.storage.clock import Clock

RATE_KEYS_MAX: Final = 100_000
"""How many addresses or actors a rate limiter remembers."""


class OpenConnection(Protocol):
    """A connection or stream whose rights can change while it is open."""

    @property
    def principal(self) -> Principal | None:
        """The authenticated caller, or None before authentication."""

    def renew(self, principal: Principal | None) -> None:
        """Apply the caller's current rights. None means that its credential is no longer valid."""

    def fail(self, error: Exception) -> None:
        """Close the connection because its rights could not be determined."""


C = TypeVar("C", bound=OpenConnection)


class AuthGate:
    """Authentication of one server: verifies credentials and limits attempts and requests."""

    def __init__(
        self, authenticator: Authenticator, clock: Clock, limits: ApiLimits, tickets: StreamTickets | None = None
    ) -> None:
        self._authenticator = authenticator
        self.tickets = tickets or StreamTickets(clock.wall_ms, limits.ticket_lifetime_ms)
        self.counts = Counts()
        self.clock = clock
        self.limits = limits
        per_minute, per_second = limits.auth_failures_per_minute_max, limits.requests_per_second_max
        self._failure_rates = RateLimiter(per_minute / 60, max(1, per_minute), RATE_KEYS_MAX, clock.elapsed_ms)
        """Failed authentications, by address."""
        burst = max(1, REQUESTS_BURST_SECONDS * per_second)
        self._request_rates = RateLimiter(per_second, burst, RATE_KEYS_MAX, clock.elapsed_ms)
        """Requests, by actor."""
        self.log_limiter = LogLimiter(clock.elapsed_ms)
        self.is_closing = False
        """Whether the server is shutting down and refuses new requests."""
        self.tracer: RequestTracer | None = None
        """Creates the spans of requests. None without tracing."""
        self.measures_latency = False
        """Whether requests note when they arrive, for the latency report."""

    def check_open(self, code: str = SERVER_BUSY) -> None:
        """Raise ApiError with this code if the server is shutting down."""
        if self.is_closing:
            raise shutdown_error(code)

    def authenticate(self, credential: str | None, caller: Caller) -> Principal:
        """Return the principal of a credential. Raises ApiError, with the same text for every wrong credential (CO-21).

        The credential is verified before the rate limit is checked, so that wrong credentials from an address never
        delay a valid one (CO-25). A request without a credential is not a guess and is not counted. After
        authentication, the caller's connection is counted for its principal (CO-27). An actor that sends too many
        requests gets RATE_LIMITED.
        """
        try:
            principal = self._authenticator.authenticate(credential)
        except AuthError as error:
            if credential:
                raise self._reject(caller.address, error.reason) from None
            self.counts.unauthenticated_requests += 1
            raise ApiError(AUTH_FAILED, str(error)) from None
        self._admit(principal, caller)
        return principal

    def authenticate_ticket(self, text: str, caller: Caller) -> tuple[Principal, Ticket]:
        """Return the current principal of a ticket, and its content. Raises ApiError like `authenticate`.

        The caller restricts the principal to the ticket's stream (`restrict_to_ticket`).
        """
        try:
            ticket = self.tickets.verify(text)
        except AuthError as error:
            raise self._reject(caller.address, error.reason) from None
        principal = self.refresh_principal(ticket.to_principal())
        if principal is None:
            raise self._reject(caller.address, "stream ticket: its credential has expired or was revoked")
        self._admit(principal, caller)
        return principal, ticket

    def _admit(self, principal: Principal, caller: Caller) -> None:
        """Count a connection and a request for the principal. Raises ApiError if it sends too many requests."""
        caller.set_principal(principal)
        self.count_request(principal)

    def count_request(self, principal: Principal) -> None:
        """Count a request, or a message of an open stream. Raises ApiError if the actor sends too many."""
        actor, requests = principal.actor, self._request_rates
        if not requests.allows(actor):
            retry_after_ms = requests.retry_after_ms(actor)
            message = f"requests_per_second_max is exceeded; try again in {retry_after_ms} ms"
            raise ApiError(RATE_LIMITED, message, retry_after_ms=retry_after_ms)
        requests.take(actor)

    def reject_client(self, caller: Caller, client_id: str) -> ApiError:
        """Return the error for a token that belongs to a different client, which counts as a wrong token (EV-1)."""
        return self._reject(caller.address, f"the credential does not belong to the client {client_id!r}")

    def refresh_principal(self, principal: Principal) -> Principal | None:
        """Return the principal with its current rights, or None if its connections must be closed."""
        return self._authenticator.refresh_principal(principal, self.clock.wall_ms())

    def get_client_id(self, principal: Principal) -> str | None:
        """Return the only client id that the principal may write under, or None in development mode, which allows any.

        A credential without a client id writes under its full actor. The actor includes the kind, because a user and an
        API key may share a name.
        """
        has_own = principal.client_id is not None or self._authenticator.is_open
        return principal.client_id if has_own else principal.actor

    def get_event_client(self, principal: Principal, requested: str | None) -> str | None:
        """Return the client id under which events are stored (EV-1), or None if the principal may not use `requested`.

        Development mode allows every client id. Raises ApiError if the client id is too long.
        """
        if self._authenticator.is_open and principal.client_id is None:
            return requested or principal.actor.partition(":")[2]
        try:
            return principal.get_event_client(requested)
        except CanonicalError as error:
            raise field_error(error.path, error.reason, FORBIDDEN) from None

    def recheck_principal(self, principal: Principal) -> Principal:
        """Return the principal with its current rights. Raises ApiError if its credential is no longer valid."""
        current = self.refresh_principal(principal)
        if current is None:
            raise credential_ended_error()
        return current

    def _reject(self, address: str, reason: str) -> ApiError:
        """Count a wrong credential and return its error: RATE_LIMITED if the address exceeds its limit."""
        self.counts.auth_failures += 1
        failures = self._failure_rates
        if not failures.allows(address):
            self.counts.auth_failures_limited += 1
            self.log_limiter.warn("too many failed attempts to authenticate", address=address)
            return ApiError(
                RATE_LIMITED,
                "too many failed attempts to authenticate",
                retry_after_ms=failures.retry_after_ms(address),
            )
        failures.take(address, 1)
        self.log_limiter.warn("authentication failed", address=address, reason=reason)
        return ApiError(AUTH_FAILED, AUTHENTICATION_FAILED)


class OpenConnections(Generic[C]):
    """The open connections or streams of one API. The owner calls `renew` about once a second."""

    def __init__(self, auth_gate: AuthGate) -> None:
        self.auth_gate = auth_gate
        self.connections: set[C] = set()

    def __len__(self) -> int:
        return len(self.connections)

    def renew(self) -> None:
        """Apply the current rights of each connection (CO-23). A connection whose renewal fails is closed."""
        for connection in list(self.connections):
            principal = connection.principal
            try:
                current = None if principal is None else self.auth_gate.refresh_principal(principal)
                if current is not principal:
                    connection.renew(current)
            except Exception as error:
                logger.exception("a connection's rights could not be refreshed, so it is closed")
                with suppress(Exception):
                    connection.fail(error)
