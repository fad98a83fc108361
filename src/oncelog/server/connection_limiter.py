"""Connection limits: in total, by address, by principal, and before authentication (CO-25, CO-27).

A connection is counted as soon as it is accepted, so TLS handshakes are included. An unauthenticated connection has a
deadline and may send only a few bytes (`PreauthLimiter`). Unauthenticated connections never cause the limiter to refuse
a new one: it closes the oldest of them instead. A caller that sends its credential promptly is authenticated before its
connection becomes the oldest.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from aiohttp import StreamReader
from msgspec import Struct

from oncelog.error_codes import SERVER_BUSY
from oncelog.server.auth.principal import Principal
from oncelog.server.errors import RETRY_AFTER_MS, ApiError
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts
from oncelog.server.rate_limiter import LogLimiter

TURNS_TO_AUTHENTICATE: Final = 16
"""The server accepts at most `evictable_max` connections in this many turns of the event loop. It needs up to eight
turns to verify a credential that has arrived (TLS handshake, request task, handler)."""
ACCEPTS_PER_TURN_MAX: Final = 128
"""Maximum number of connections accepted in one turn of the event loop. Open connections are served between turns."""
TLS_ACCEPTS_PER_TURN_MAX: Final = 16
"""The same with TLS: each handshake blocks the event loop for about 1 ms."""
HELD_BYTES: Final = 20 * 1024
"""Bytes that any unauthenticated connection may hold: a request head or first message with the longest token. The
limiter may close a connection that holds more when all unauthenticated connections together hold too much."""
HELD_BY_MIN: Final = 8
"""The byte limit allows for at least this many connections, so that the head of one long HTTP request fits."""
RESERVED_CONNECTIONS: Final = 100
"""Connections beyond `connections_max`, for operators and for error responses to callers above the limit."""

Transport = Any
"""An `asyncio.Transport`. uvloop's transports do not declare that type."""


CallerGroups = defaultdict[str, dict[Any, None]]
"""Connections and streams by address or principal, oldest first."""


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits on simultaneous connections. 0 switches a limit off."""

    total_max: int
    address_max: int = 0
    principal_max: int = 0
    unauthenticated_max: int = 0
    timeout_ms: int
    """Longest time that an unauthenticated connection may be idle or take for its TLS handshake."""

    @property
    def evictable_max(self) -> int:
        """Connection count at which an unauthenticated connection is closed to make room for a new one."""
        return self.unauthenticated_max or self.total_max

    @property
    def total_bytes_max(self) -> int:
        """Bytes that all unauthenticated connections together may hold. 0 means no limit."""
        return max(HELD_BY_MIN, self.unauthenticated_max) * HELD_BYTES if self.unauthenticated_max else 0

    def accepts_per_turn(self, *, listeners: int, with_tls: bool) -> int:
        """Return how many connections each listening socket may accept in one turn of the event loop."""
        accepts_max = TLS_ACCEPTS_PER_TURN_MAX if with_tls else ACCEPTS_PER_TURN_MAX
        return max(1, min(accepts_max, self.evictable_max // (TURNS_TO_AUTHENTICATE * listeners)))


class Caller:
    """Where a request comes from, for authentication and limits.

    An instance of this base class has no counted connection, or shares a trusted proxy's connection with other callers.
    """

    __slots__ = ("_proxy", "address")

    def __init__(self, address: str, proxy: "Connection | None" = None) -> None:
        self.address = address
        self._proxy = proxy

    def set_principal(self, principal: Principal) -> None:  # noqa: ARG002 - for subclasses
        """Set the authenticated principal. Raises ApiError if the principal has too many connections."""
        if self._proxy is not None:
            self._proxy.remove_limits()

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """Call `refuse` if more than `bytes_max` bytes arrive before the caller is authenticated."""


class ByteLimit(Protocol):
    """Limit on the bytes that a connection may send before authentication."""

    def remove(self) -> None:
        """Remove the limit. May be called twice."""

    def reset(self, bytes_max: int | None = None, refuse: Callable[[], None] | None = None) -> None:
        """Restart the count with this limit."""

    def ignore_body(self, body: StreamReader) -> None:
        """Exclude the rest of a body from the count."""


class Connection(Caller):
    """One accepted connection."""

    __slots__ = (
        "_abort",
        "_limiter",
        "actor",
        "byte_limit",
        "counted_address",
        "has_requested",
        "held_bytes",
        "idle_since_ms",
        "is_closing",
        "is_proxy",
        "is_stream",
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
        """Whether the peer is a trusted proxy, whose connection carries requests from several callers."""
        self.byte_limit: ByteLimit | None = None
        self.actor: str | None = None
        self.counted_address: str | None = None
        """The address that an unauthenticated connection is counted under, or None for an authenticated one."""
        self.has_requested = False
        self.is_stream = False
        """Whether the connection carries a WebSocket or a stream, which lasts until one side closes it."""
        self.stream: CountedStream | None = None
        """The counted stream of the caller behind a proxy, until its request is answered."""
        self.transport: Transport = None
        """None until the TLS handshake is complete, and after `close`."""
        self.idle_since_ms: int | None = limiter.now_ms()
        """None while a request is being answered."""
        self.held_bytes = 0
        """Received bytes that no request or message has consumed yet. Counted only before authentication."""
        self.is_closing: Callable[[], bool] = bool

    def attach(self, transport: Transport) -> None:
        """Set the transport, which exists after the TLS handshake. Aborts it if the connection is already closed."""
        if self.counted_address is None:
            transport.abort()
            return
        self.transport, self._abort, self.is_closing = transport, transport.abort, transport.is_closing
        self._limiter.by_transport[transport] = self

    def start_request(self) -> None:
        """Record that a request has arrived."""
        self.has_requested = True
        self.idle_since_ms = None
        if self.counted_address is not None and self.byte_limit is not None:
            self.byte_limit.reset()

    def finish_request(self, body: StreamReader | None = None) -> None:
        """Record that a request was answered. aiohttp discards the rest of its body."""
        self.idle_since_ms = self._limiter.now_ms()
        self.is_stream = False
        self._close_stream()
        if self.counted_address is not None and self.byte_limit is not None:
            self.byte_limit.reset()
            if body is not None and not body.is_eof():
                self.byte_limit.ignore_body(body)

    def set_principal(self, principal: Principal) -> None:
        """See `Caller`. A connection is counted only for its first principal."""
        if self.counted_address is not None:
            self._limiter.count_principal(self, principal)
            self.remove_limits()

    def remove_limits(self) -> None:
        """Remove the limits of unauthenticated connections."""
        self._limiter.discard_unauthenticated(self)
        if self.byte_limit is not None:
            self.byte_limit.remove()

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """See `Caller`. An authenticated connection has no such limit."""
        if self.counted_address is not None and self.byte_limit is not None:
            self.byte_limit.reset(bytes_max, refuse)

    def hold(self, held_bytes: int) -> None:
        """Set how many bytes belong to an incomplete request or message. May close this or a different connection."""
        if self.counted_address is not None:
            self._limiter.hold(self, held_bytes)

    def refuse(self, reason: str, close: Callable[[], None] | None = None) -> None:
        """Close the connection and count the reason."""
        self._limiter.count_refusal(reason, self.address)
        (close or self.abort)()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._abort()
        self.close()

    def close(self) -> None:
        """Stop counting the connection. May be called twice."""
        self._close_stream()
        self._limiter.release(self)
        # A TLS transport holds about 80 KiB. Drop the references now, so that the memory does not wait for the garbage
        # collector.
        self.byte_limit = self.transport = None
        self._abort, self.is_closing = lambda: None, lambda: True

    def _close_stream(self) -> None:
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.close()


class CountedStream(Caller):
    """A WebSocket or stream of a trusted proxy, or a gRPC stream, counted from its request until it closes."""

    __slots__ = ("_limiter", "actor")

    def __init__(self, limiter: "ConnectionLimiter", address: str, proxy: Connection | None = None) -> None:
        super().__init__(address, proxy)
        self._limiter = limiter
        self.actor: str | None = None

    def set_principal(self, principal: Principal) -> None:
        """See `Caller`."""
        if self.actor is None:
            self._limiter.count_principal(self, principal)
            super().set_principal(principal)

    def limit_first_message(self, bytes_max: int, refuse: Callable[[], None]) -> None:
        """See `Caller`. Applies even if the connection was authenticated for a different caller."""
        if self._proxy is not None and self._proxy.byte_limit is not None:
            self._proxy.byte_limit.reset(bytes_max, refuse)

    def close(self) -> None:
        """Stop counting the stream. May be called twice."""
        self._limiter.release(self)


class ConnectionLimiter:
    """Counts and limits all connections of a server. The owner calls `close_expired` about once a second."""

    def __init__(
        self,
        limits: ConnectionLimits,
        now_ms: Callable[[], int],
        counts: Counts,
        log_limiter: LogLimiter,
    ) -> None:
        self.limits = limits
        self.now_ms = now_ms
        self.counts = counts
        self.log_limiter = log_limiter
        self._connections: dict[Connection, None] = {}
        self._by_address: CallerGroups = defaultdict(dict)
        self._by_principal: CallerGroups = defaultdict(dict)
        self._unauthenticated: dict[Connection, None] = {}
        """Oldest first."""
        self._unauthenticated_of: CallerGroups = defaultdict(dict)
        """Unauthenticated connections by address (`Connection.counted_address`), oldest first."""
        self._largest_address = ""
        """The address that most recently had more than half of the unauthenticated connections."""
        self._held_bytes = 0
        self._large: dict[Connection, None] = {}
        """Unauthenticated connections that hold more than `HELD_BYTES`, in the order in which they exceeded it."""
        self.closed_count = 0
        """How many counted connections have been closed."""
        self.by_transport: dict[Transport, Connection] = {}
        """Open connections."""

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def unauthenticated_count(self) -> int:
        """How many connections are unauthenticated."""
        return len(self._unauthenticated)

    # --- new connections

    def accept(self, address: str, abort: Callable[[], None], *, is_proxy: bool = False) -> Connection | None:
        """Count a new connection. Returns None if authenticated connections alone have reached a limit."""
        reason = None
        if not self._has_capacity():
            reason = "connections_max"
        elif not is_proxy and not self._has_address_capacity(address):
            reason = "address"
        if reason is not None:
            self.count_refusal(reason, address)
            return None
        self._limit_unauthenticated()
        connection = Connection(self, address, is_proxy=is_proxy, abort=abort)
        self._connections[connection] = None
        self._by_address[address][connection] = None
        self._add_unauthenticated(connection, address)
        return connection

    def open_stream(self, address: str, connection: Connection | None = None) -> CountedStream:
        """Count a stream that shares its connection with other streams. Raises ApiError if a limit is reached.

        A proxy's connection counts as unauthenticated until the stream's caller is authenticated.
        """
        if not self._has_address_capacity(address, connection):
            self.count_refusal("address", address)
            raise busy_error("connections_per_address_max", self.limits.address_max)
        if connection is not None:
            if connection.counted_address is None:
                self._limit_unauthenticated()
            self.discard_unauthenticated(connection)
            self._add_unauthenticated(connection, address)
        stream = CountedStream(self, address, connection)
        if connection is not None:
            connection.stream = stream
        self._by_address[address][stream] = None
        return stream

    def count_principal(self, caller: Connection | CountedStream, principal: Principal) -> None:
        """Count a connection for its principal. Raises ApiError if the limit is reached."""
        limit, actor = self.limits.principal_max, principal.actor
        if not self._has_room(self._by_principal, actor, limit):
            self.count_refusal("principal", caller.address, actor=actor)
            raise busy_error("connections_per_principal_max", limit)
        self._by_principal[actor][caller] = None
        caller.actor = actor

    def close_unauthenticated_stream(self, other_than: Connection | None) -> bool:
        """Close the oldest unauthenticated WebSocket, apart from `other_than`. Returns whether one was closed."""
        streams = (
            candidate for candidate in self._unauthenticated if candidate.is_stream and candidate is not other_than
        )
        return self._close_first(streams)

    def hold(self, connection: Connection, held_bytes: int) -> None:
        """Set the held bytes of an unauthenticated connection.

        Closes the oldest large connections while the total exceeds its limit.
        """
        self._held_bytes += held_bytes - connection.held_bytes
        connection.held_bytes = held_bytes
        if held_bytes > HELD_BYTES:
            self._large[connection] = None
            total_bytes_max = self.limits.total_bytes_max
            while total_bytes_max and self._held_bytes > total_bytes_max and self._close_first(iter(self._large)):
                pass
        else:
            self._large.pop(connection, None)

    # --- the end of connections

    def discard_unauthenticated(self, connection: Connection) -> None:
        """Stop counting a connection as unauthenticated."""
        group = connection.counted_address
        if group is not None:
            self.hold(connection, 0)
            connection.counted_address = None
            del self._unauthenticated[connection]
            _remove_caller(self._unauthenticated_of, group, connection)

    def release(self, caller: Connection | CountedStream) -> None:
        """Stop counting a connection or stream."""
        if isinstance(caller, Connection):
            if caller not in self._connections:
                return
            del self._connections[caller]
            self.closed_count += 1
            self.by_transport.pop(caller.transport, None)
            self.discard_unauthenticated(caller)
        _remove_caller(self._by_address, caller.address, caller)
        if caller.actor is not None:
            _remove_caller(self._by_principal, caller.actor, caller)

    def close_expired(self) -> None:
        """Remove closed connections, and close unauthenticated connections that have timed out."""
        self._remove_closed(self._connections)
        latest_ms = self.now_ms() - self.limits.timeout_ms
        for connection in list(self._unauthenticated):
            idle_since_ms = connection.idle_since_ms
            if idle_since_ms is None or idle_since_ms >= latest_ms:
                continue
            if connection.has_requested:
                connection.abort()  # an idle keep-alive connection, for example of a health check
            else:
                connection.refuse("timeout")

    def are_all_closed(self) -> bool:
        """Return whether all connections are closed."""
        self.close_expired()
        return not self._connections

    # --- capacity

    def _has_capacity(self) -> bool:
        """Return whether the total allows one more connection. May close an unauthenticated one to make room."""
        if len(self._connections) < self.limits.total_max:
            return True
        self._remove_closed(self._connections)
        return len(self._connections) < self.limits.total_max or self._close_oldest()

    def _has_address_capacity(self, address: str, other_than: Connection | None = None) -> bool:
        """Return whether the address may have one more connection. May close an unauthenticated one to make room."""
        if self._has_room(self._by_address, address, self.limits.address_max):
            return True
        return self._close_first(
            caller for caller in self._unauthenticated_of.get(address, ()) if caller is not other_than
        )

    def _has_room(self, callers: Mapping[str, Collection[Caller]], key: str, limit: int) -> bool:
        """Return whether an address or a principal may have one more caller. Removes closed connections first."""
        if limit and len(callers.get(key, ())) >= limit:
            self._remove_closed(caller for caller in callers[key] if isinstance(caller, Connection))
        return not limit or len(callers.get(key, ())) < limit

    def _add_unauthenticated(self, connection: Connection, address: str) -> None:
        connection.counted_address = address
        self._unauthenticated[connection] = None
        own = self._unauthenticated_of[address]
        own[connection] = None
        if 2 * len(own) > self.limits.evictable_max:
            self._largest_address = address

    def _limit_unauthenticated(self) -> None:
        """Close unauthenticated connections until there is room for one more."""
        limit = self.limits.unauthenticated_max
        if limit and self.unauthenticated_count >= limit:
            self._close_oldest()

    def _close_oldest(self) -> bool:
        """Close the oldest unauthenticated connection from the address that has more than half of them, or the oldest
        of all.

        A flood from one address evicts only its own connections. A flood from many addresses does not single out an
        address that several callers share. The server accepts at least `evictable_max / 2` newer connections before it
        closes a given one.
        """
        largest = self._unauthenticated_of.get(self._largest_address, {})
        is_flooded = 2 * len(largest) > self.limits.evictable_max
        return self._close_first(iter(largest if is_flooded else self._unauthenticated))

    def _close_first(self, connections: Iterator[Connection]) -> bool:
        """Close the first of the connections to make room. Returns whether one was closed."""
        first = next(connections, None)
        if first is not None:
            first.refuse("evicted")
        return first is not None

    def _remove_closed(self, connections: Iterable[Connection]) -> None:
        """Stop counting authenticated connections that are being closed.

        An unauthenticated connection is counted until `PreauthLimiter.connection_lost`, because it occupies memory
        until its client reads everything and answers the TLS shutdown.
        """
        for connection in list(connections):
            if connection.counted_address is None and connection.is_closing():
                connection.close()

    def count_refusal(self, reason: str, address: str, **fields: str) -> None:
        """Count and log a connection that the server refuses or closes."""
        self.counts.connections_refused[reason] += 1
        self.log_limiter.warn("a connection was refused or closed", reason=reason, address=address, **fields)


def to_connection_limits(limits: ApiLimits, *, is_development: bool) -> ConnectionLimits:
    """Derive the connection limits from the settings.

    A principal or an address never gets more than half of all connections. In development mode all callers share one
    principal and one machine, so only the total is limited.
    """
    half = max(1, limits.connections_max // 2)
    return ConnectionLimits(
        total_max=limits.connections_max + RESERVED_CONNECTIONS,
        address_max=0 if is_development else min(limits.connections_per_address_max, half),
        principal_max=0 if is_development else min(limits.connections_per_principal_max, half),
        unauthenticated_max=0 if is_development else limits.unauthenticated_connections_max,
        timeout_ms=limits.connect_timeout_ms,
    )


def busy_error(name: str, limit: int) -> ApiError:
    """Return the error for a connection above a limit."""
    message = f"too many open connections: {name} is {limit}"
    return ApiError(SERVER_BUSY, message, limit=limit, retry_after_ms=RETRY_AFTER_MS)


def _remove_caller(groups: CallerGroups, key: str, caller: Caller) -> None:
    group = groups[key]
    group.pop(caller, None)
    if not group:
        del groups[key]
