"""Limits of connections: in total, by address, by principal, and before authentication (CO-27).

Connections are counted from `accept` on, so TLS handshakes are counted too. An unauthenticated connection has
a deadline and may send a few bytes (`gate.Gate`). A full server closes an unauthenticated connection in favour of
a new one: connections without a credential never take the place of connections with one.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Protocol

from aiohttp import StreamReader
from msgspec import Struct

from oncelog.codes import SERVER_BUSY
from oncelog.doors.faults import DoorError
from oncelog.doors.limits import DoorLimits
from oncelog.doors.log_limiter import LogLimiter
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal

EVICTION_AGE_MS: Final = 250
"""An unauthenticated connection is closed in favour of another one with the same address after this time. Otherwise
clients that reconnect all at once would close each other's connections before they can authenticate. A longer time
would let a flood keep out other callers of its address."""
RETRY_AFTER_MS: Final = 1000
RESERVE: Final = 100
"""Connections above `connections_max`, so that callers can be answered that there are too many, and for operators."""

Transport = Any
"""uvloop's is an asyncio.Transport without saying so."""


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Numbers of connections at a time. 0 switches a limit off."""

    total_max: int
    address_max: int = 0
    principal_max: int = 0
    unauthenticated_max: int = 0
    timeout_ms: int
    """Longest time that an unauthenticated connection may be idle, or in its TLS handshake."""


class Caller:
    """The origin of a request, as authentication needs it. This one belongs to no counted connection."""

    __slots__ = ("address",)

    def __init__(self, address: str) -> None:
        self.address = address

    def authenticated(self, principal: Principal) -> None:
        """Note who the caller is. Raises DoorError if the principal has too many connections."""

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """Call `refuse` if more than `bytes_max` bytes arrive before the caller is authenticated."""


class Gate(Protocol):
    """The part of a connection that limits what it sends before authentication."""

    def open(self) -> None:
        """Remove the limit. May be called twice."""

    def restart(self, bytes_max: int | None = None, refuse: Callable[[], None] | None = None) -> None:
        """Limit what arrives from now on."""

    def discard(self, body: StreamReader) -> None:
        """Do not count the rest of a body."""


class Connection(Caller):
    """One accepted connection."""

    __slots__ = (
        "_abort",
        "_limiter",
        "actor",
        "gate",
        "group",
        "has_requested",
        "idle_since_ms",
        "is_closing",
        "is_proxy",
        "is_stream",
        "opened_ms",
        "stream",
        "transport",
    )

    def __init__(
        self, limiter: "ConnectionLimiter", address: str, *, is_proxy: bool, abort: Callable[[], None]
    ) -> None:
        super().__init__(address)
        self._limiter = limiter
        self._abort = abort
        self.is_proxy = is_proxy
        """The connection of a trusted proxy, which carries requests of several callers."""
        self.gate: Gate | None = None
        self.actor: str | None = None
        self.group: str | None = None
        """The address that an unauthenticated connection counts for. None for an authenticated one."""
        self.has_requested = False
        self.is_stream = False
        """The connection carries a WebSocket or a stream, which ends when one side closes it."""
        self.stream: CountedStream | None = None
        """The stream of a proxy's caller, until its request is answered."""
        self.transport: Transport = None
        """None before the TLS handshake is over."""
        self.opened_ms = limiter.now_ms()
        self.idle_since_ms: int | None = self.opened_ms
        """None while a request is being answered."""
        self.is_closing: Callable[[], bool] = bool

    def attach(self, transport: Transport) -> None:
        """Use the transport, which exists after the TLS handshake."""
        self.transport, self._abort, self.is_closing = transport, transport.abort, transport.is_closing
        self._limiter.attach(self)

    def requested(self) -> None:
        """A request arrived."""
        self.has_requested = True
        self.idle_since_ms = None
        if self.group is not None and self.gate is not None:
            self.gate.restart()

    def answered(self, body: StreamReader | None = None) -> None:
        """The request was answered. The rest of its body, if there is any, is not kept."""
        self.idle_since_ms = self._limiter.now_ms()
        self.is_stream = False
        self._close_stream()
        if self.group is not None and self.gate is not None:
            self.gate.restart()
            if body is not None and not body.is_eof():
                self.gate.discard(body)

    def authenticated(self, principal: Principal) -> None:
        """As `Caller` says. The first principal of a connection is the one that it counts for."""
        if self.group is not None:
            self._limiter.count_principal(self, principal)
            self.open()

    def open(self) -> None:
        """Remove the limits of unauthenticated connections."""
        self._limiter.discard_unauthenticated(self)
        if self.gate is not None:
            self.gate.open()

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """As `Caller` says. A connection that is authenticated already has no such limit."""
        if self.group is not None and self.gate is not None:
            self.gate.restart(bytes_max, refuse)

    def abort(self) -> None:
        """Close the connection now."""
        self._abort()
        self.close()

    def close(self) -> None:
        """Stop counting the connection. May be called twice."""
        self._close_stream()
        self._limiter.release(self)
        # A transport with TLS holds about 80 KiB: it must not wait for the garbage collector.
        self.gate = self.transport = None
        self._abort, self.is_closing = _do_nothing, _is_closed

    def _close_stream(self) -> None:
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.close()


class ForwardedRequest(Caller):
    """A request of a trusted proxy, whose connection serves other callers too."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection, address: str) -> None:
        super().__init__(address)
        self._connection = connection

    def authenticated(self, principal: Principal) -> None:  # noqa: ARG002 - others use the connection too
        """As `Caller` says."""
        if self._connection.group is not None:
            self._connection.open()


class CountedStream(Caller):
    """A WebSocket or stream of a trusted proxy, or a gRPC stream: counted from its request to its end."""

    __slots__ = ("_connection", "_limiter", "actor")

    def __init__(self, limiter: "ConnectionLimiter", address: str, connection: Connection | None = None) -> None:
        super().__init__(address)
        self._limiter = limiter
        self._connection = connection
        self.actor: str | None = None

    def authenticated(self, principal: Principal) -> None:
        """As `Caller` says."""
        if self.actor is None:
            self._limiter.count_principal(self, principal)
            if self._connection is not None:
                self._connection.open()

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """As `Caller` says, also on a connection that was authenticated for another caller."""
        if self._connection is not None and self._connection.gate is not None:
            self._connection.gate.restart(bytes_max, refuse)

    def close(self) -> None:
        """Stop counting the stream. May be called twice."""
        self._limiter.release(self)


class ConnectionLimiter:
    """All connections of a server. Its owner calls `sweep` about once a second."""

    def __init__(
        self,
        limits: ConnectionLimits,
        now_ms: Callable[[], int],
        counts: Counts | None = None,
        log_limiter: LogLimiter | None = None,
    ) -> None:
        self.limits = limits
        self.now_ms = now_ms
        self._counts = counts or Counts()
        self._log_limiter = log_limiter or LogLimiter(now_ms)
        self._connections: dict[Connection, None] = {}
        self._of_address: defaultdict[str, set[Caller]] = defaultdict(set)
        self._of_principal: defaultdict[str, set[Connection | CountedStream]] = defaultdict(set)
        self._unauthenticated: dict[str, dict[Connection, None]] = {}
        """By address (`Connection.group`), the oldest first."""
        self.closed = 0
        """Connections that were counted and are closed."""
        self._of_transport: dict[Transport, Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def unauthenticated(self) -> int:
        """The number of connections before authentication."""
        return self._counts.unauthenticated_connections

    # --- new connections

    def accept(self, address: str, abort: Callable[[], None], *, is_proxy: bool = False) -> Connection | None:
        """Count a connection. Returns None if a limit is reached."""
        limits = self.limits
        if len(self._connections) >= limits.total_max:
            self._forget_closed(self._connections)
        reason = None
        if len(self._connections) >= limits.total_max and not self._evict(address):
            reason = "connections_max"
        elif not is_proxy and self._is_address_full(address):
            reason = "address"
        elif not self._has_unauthenticated_room(address):
            reason = "unauthenticated"
        if reason is not None:
            self.count_refusal(reason, address)
            return None
        made = Connection(self, address, is_proxy=is_proxy, abort=abort)
        self._connections[made] = None
        self._of_address[address].add(made)
        self._add_unauthenticated(made, address)
        return made

    def attach(self, connection: Connection) -> None:
        """Find the connection by its transport from now on."""
        self._of_transport[connection.transport] = connection

    def of(self, transport: Transport) -> Connection | None:
        """Return the connection of a transport; None if it is closed."""
        return self._of_transport.get(transport)

    def open_stream(self, address: str, connection: Connection | None = None) -> CountedStream:
        """Count a stream that is not a connection by itself. Raises DoorError if a limit is reached.

        The connection of a proxy counts as unauthenticated until the caller of the stream is authenticated.
        """
        if self._is_address_full(address):
            self.count_refusal("address", address)
            raise busy("connections_per_address_max", self.limits.address_max)
        if connection is not None:
            if connection.group is None and not self._has_unauthenticated_room(address):
                self.count_refusal("unauthenticated", address)
                raise busy("unauthenticated_connections_max", self.limits.unauthenticated_max)
            self.discard_unauthenticated(connection)
            self._add_unauthenticated(connection, address)
        made = CountedStream(self, address, connection)
        if connection is not None:
            connection.stream = made
        self._of_address[address].add(made)
        return made

    def count_principal(self, caller: Connection | CountedStream, principal: Principal) -> None:
        """Count a connection for its principal. Raises DoorError at the limit."""
        limit, actor = self.limits.principal_max, principal.actor
        others = self._of_principal[actor]
        if limit and len(others) >= limit:
            self._forget_closed([one for one in others if isinstance(one, Connection)])
            others = self._of_principal[actor]
        if limit and len(others) >= limit:
            self.count_refusal("principal", caller.address, actor=actor)
            raise busy("connections_per_principal_max", limit)
        others.add(caller)
        caller.actor = actor

    def close_unauthenticated_stream(self, other_than: Connection | None) -> bool:
        """Close the oldest WebSocket whose caller is not authenticated. Returns whether one was closed."""
        streams = (one for own in self._unauthenticated.values() for one in own if one.is_stream)
        oldest = min((one for one in streams if one is not other_than), key=lambda one: one.opened_ms, default=None)
        if oldest is not None:
            self.refuse(oldest, "evicted")
        return oldest is not None

    # --- the end of connections

    def discard_unauthenticated(self, connection: Connection) -> None:
        """The connection is authenticated, or closed."""
        group, connection.group = connection.group, None
        if group is not None:
            self._counts.unauthenticated_connections -= 1
            own = self._unauthenticated[group]
            del own[connection]
            if not own:
                del self._unauthenticated[group]

    def release(self, caller: Connection | CountedStream) -> None:
        """Stop counting a connection or stream."""
        if isinstance(caller, Connection):
            if caller not in self._connections:
                return
            del self._connections[caller]
            self.closed += 1
            self._of_transport.pop(caller.transport, None)
            self.discard_unauthenticated(caller)
        _discard(self._of_address, caller.address, caller)
        if caller.actor is not None:
            _discard(self._of_principal, caller.actor, caller)

    def sweep(self) -> None:
        """Forget connections that are closed, and close unauthenticated ones whose time is over."""
        self._forget_closed(self._connections)
        latest_ms = self.now_ms() - self.limits.timeout_ms
        for own in list(self._unauthenticated.values()):
            for connection in list(own):
                idle_since_ms = connection.idle_since_ms
                if idle_since_ms is None or idle_since_ms >= latest_ms:
                    continue
                if connection.has_requested:
                    connection.abort()  # an idle keep-alive connection, as of a health check
                else:
                    self.refuse(connection, "timeout")

    def refuse(self, connection: Connection, reason: str) -> None:
        """Close a connection, and count why."""
        self.count_refusal(reason, connection.address)
        connection.abort()

    def are_all_closed(self) -> bool:
        """Return whether no connection is open any more."""
        self.sweep()
        return not self._connections

    # --- room

    def _is_address_full(self, address: str) -> bool:
        limit = self.limits.address_max
        if not limit or len(self._of_address.get(address, ())) < limit:
            return False
        self._forget_closed([one for one in self._of_address[address] if isinstance(one, Connection)])
        return len(self._of_address.get(address, ())) >= limit

    def _add_unauthenticated(self, connection: Connection, address: str) -> None:
        connection.group = address
        self._unauthenticated.setdefault(address, {})[connection] = None
        self._counts.unauthenticated_connections += 1

    def _has_unauthenticated_room(self, address: str) -> bool:
        limit = self.limits.unauthenticated_max
        return not limit or self.unauthenticated < limit or self._evict(address)

    def _evict(self, address: str) -> bool:
        """Close the oldest unauthenticated connection of the address that has most of them."""
        if not self._unauthenticated:
            return False
        busiest = max(self._unauthenticated, key=lambda one: len(self._unauthenticated[one]))
        own = self._unauthenticated[busiest]
        oldest = next(iter(own))
        is_same = len(self._unauthenticated.get(address, ())) >= len(own)
        if is_same and self.now_ms() - oldest.opened_ms < EVICTION_AGE_MS:
            return False
        self.refuse(oldest, "evicted")
        return True

    def _forget_closed(self, connections: Any) -> None:
        for connection in list(connections):
            if connection.is_closing():
                connection.close()

    def count_refusal(self, reason: str, address: str, **fields: str) -> None:
        """Count and log a connection that is refused or closed."""
        self._counts.connections_refused[reason] += 1
        self._log_limiter.warning("a connection was refused or closed", reason=reason, address=address, **fields)


def connection_limits(limits: DoorLimits, *, is_open: bool) -> ConnectionLimits:
    """Return the limits that follow from the settings.

    A principal or an address never gets more than half of all connections. A server in development mode admits
    all callers on its machine as one principal, so only the total is limited.
    """
    half = max(1, limits.connections_max // 2)
    total_max = limits.connections_max + RESERVE
    if is_open:
        return ConnectionLimits(total_max=total_max, timeout_ms=limits.connect_timeout_ms)
    return ConnectionLimits(
        total_max=total_max,
        address_max=min(limits.connections_per_address_max, half),
        principal_max=min(limits.connections_per_principal_max, half),
        unauthenticated_max=limits.unauthenticated_connections_max,
        timeout_ms=limits.connect_timeout_ms,
    )


def busy(name: str, limit: int) -> DoorError:
    """Return the error for a connection above a limit."""
    message = f"{name} is {limit}, and that many connections are open"
    return DoorError(SERVER_BUSY, message, limit=limit, retry_after_ms=RETRY_AFTER_MS)


def _do_nothing() -> None:
    """Take the place of `abort` of a closed connection."""


def _is_closed() -> bool:
    return True


def _discard(counted: defaultdict[str, Any], key: str, caller: Caller) -> None:
    own = counted.get(key)
    if own is not None:
        own.discard(caller)
        if not own:
            del counted[key]
