"""Connection limits in total, per address and per principal. Authenticated callers take precedence over other
connections.
"""

from collections.abc import Callable

import pytest
from aiohttp import StreamReader

from oncelog.server.auth.principal import EVERYTHING, Principal
from oncelog.server.connection_limiter import (
    HELD_BYTES,
    RESERVED_CONNECTIONS,
    Caller,
    Connection,
    ConnectionLimiter,
    ConnectionLimits,
    to_connection_limits,
)
from oncelog.server.errors import ApiError
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts
from oncelog.server.rate_limiter import LogLimiter
from oncelog.testing.clock import ManualClock

TIMEOUT_MS = 10_000


class Transport:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


class Limiter(ConnectionLimiter):
    """A limiter with a manual clock, and transports for its connections."""

    def __init__(self, total_max: int = 100, **limits: int) -> None:
        self.clock = ManualClock()
        limits_ = ConnectionLimits(total_max=total_max, timeout_ms=TIMEOUT_MS, **limits)
        super().__init__(limits_, self.clock.elapsed_ms, Counts(), LogLimiter(self.clock.elapsed_ms))

    def connect(self, address: str = "192.0.2.1", *, is_proxy: bool = False) -> Connection | None:
        made = self.accept(address, lambda: None, is_proxy=is_proxy)
        if made is not None:
            made.attach(Transport())
        return made

    def connected(self, address: str = "192.0.2.1", actor: str | None = None, *, is_proxy: bool = False) -> Connection:
        made = self.connect(address, is_proxy=is_proxy)
        assert made is not None
        if actor is not None:
            made.set_principal(principal(actor))
        return made

    @property
    def reasons(self) -> dict[str, int]:
        return {reason: count for reason, count in self.counts.connections_refused.items() if count}


def principal(actor: str) -> Principal:
    return Principal(actor=actor, client_id=None, grants=EVERYTHING)


def is_open(connection: Connection) -> bool:
    return not connection.is_closing()


@pytest.mark.rule("CO-27", "CO-30")
def test_only_silent_unauthenticated_connections_are_closed() -> None:
    limiter = Limiter()
    silent, busy, known = limiter.connected(), limiter.connected(), limiter.connected(actor="user:ada")
    busy.start_request()
    limiter.clock.advance(TIMEOUT_MS)
    limiter.close_expired()
    assert is_open(silent)
    limiter.clock.advance(1)
    limiter.close_expired()
    assert [is_open(one) for one in (silent, busy, known)] == [False, True, True]
    assert limiter.reasons == {"timeout": 1}
    busy.finish_request()
    limiter.clock.advance(TIMEOUT_MS + 1)
    limiter.close_expired()
    assert not is_open(busy)
    assert limiter.reasons == {"timeout": 1}, "an idle connection after a request does not count as refused"
    known.transport.abort()
    assert limiter.are_all_closed()


@pytest.mark.rule("CO-27", "CO-30")
def test_connection_in_a_tls_handshake_is_counted_and_closed() -> None:
    limiter = Limiter()
    aborted: list[bool] = []
    assert limiter.accept("192.0.2.1", lambda: aborted.append(True)) is not None
    assert (len(limiter), limiter.unauthenticated_count) == (1, 1)
    limiter.clock.advance(TIMEOUT_MS + 1)
    limiter.close_expired()
    assert (aborted, len(limiter), limiter.unauthenticated_count) == ([True], 0, 0)


@pytest.mark.rule("CO-27")
def test_authenticated_connections_are_never_evicted() -> None:
    limiter = Limiter(total_max=3)
    known = [limiter.connected(actor=f"user:{number}") for number in range(3)]
    assert limiter.connect() is None
    assert limiter.reasons == {"connections_max": 1}
    assert all(map(is_open, known))
    known[0].transport.abort()
    assert limiter.connect("192.0.2.2") is not None


@pytest.mark.rule("CO-27")
def test_new_connection_evicts_an_unauthenticated_one() -> None:
    limiter = Limiter(unauthenticated_max=3)
    attackers = [limiter.connected("198.51.100.1") for _ in range(3)]
    victim = limiter.connected("192.0.2.1")
    assert [is_open(one) for one in (*attackers, victim)] == [False, True, True, True]
    assert limiter.unauthenticated_count == 3


@pytest.mark.rule("CO-25", "CO-27")
def test_oldest_unauthenticated_connection_of_an_address_is_evicted_for_a_new_one() -> None:
    limiter = Limiter(unauthenticated_max=2)
    first, second, third = (limiter.connected() for _ in range(3))
    assert [is_open(one) for one in (first, second, third)] == [False, True, True]
    assert limiter.reasons == {"evicted": 1}


@pytest.mark.rule("CO-25", "CO-27")
def test_flood_from_one_address_evicts_only_its_own_connections() -> None:
    limiter = Limiter(unauthenticated_max=10)
    victims = [limiter.connected(f"192.0.2.{number}") for number in range(4)]
    for _ in range(100):
        limiter.connected("198.51.100.1")
    assert all(map(is_open, victims))
    assert limiter.unauthenticated_count == 10


@pytest.mark.rule("CO-25", "CO-27")
def test_flood_from_many_addresses_does_not_single_out_a_shared_address() -> None:
    """The limiter accepts at least half as many new connections as the limit before it evicts a given connection."""
    limiter = Limiter(unauthenticated_max=10)
    for number in range(10):
        limiter.connected(f"198.51.100.{number}")
    victims = [limiter.connected("192.0.2.1") for _ in range(3)]
    for number in range(7):
        limiter.connected(f"203.0.113.{number}")
    assert all(map(is_open, victims))
    limiter.connected("203.0.113.7")
    assert [is_open(one) for one in victims] == [False, True, True]


@pytest.mark.rule("CO-25", "CO-27")
def test_unauthenticated_connection_is_evicted_at_the_limit_of_its_address() -> None:
    limiter = Limiter(address_max=3)
    known = limiter.connected(actor="user:ada")
    strangers = [limiter.connected() for _ in range(2)]
    other = limiter.connected("192.0.2.2")
    new = limiter.connected()
    assert [is_open(one) for one in (known, *strangers, other, new)] == [True, False, True, True, True]
    limiter.open_stream("192.0.2.1").set_principal(principal("user:bob"))
    new.set_principal(principal("user:eve"))
    assert [is_open(one) for one in (known, *strangers, other, new)] == [True, False, False, True, True]
    assert limiter.connect() is None
    assert limiter.reasons == {"evicted": 2, "address": 1}


@pytest.mark.rule("CO-27")
def test_connections_that_hold_the_most_bytes_are_closed_above_the_total_limit() -> None:
    limiter = Limiter(unauthenticated_max=10)
    small, first, second, third = (limiter.connected() for _ in range(4))
    small.hold(HELD_BYTES)
    first.hold(4 * HELD_BYTES)
    second.hold(5 * HELD_BYTES)
    assert is_open(first)
    first.hold(4 * HELD_BYTES + 1)
    assert [is_open(one) for one in (small, first, second)] == [True, False, True]
    second.hold(0)  # the request is complete
    third.hold(9 * HELD_BYTES)
    assert all(map(is_open, (small, second, third)))
    third.set_principal(principal("user:ada"))
    third.hold(100 * HELD_BYTES)
    second.hold(9 * HELD_BYTES)
    assert all(map(is_open, (small, second, third)))
    for one in (small, second):
        one.close()
    assert (limiter._held_bytes, limiter._large) == (0, {})


@pytest.mark.rule("CO-25", "CO-27")
def test_connection_closed_during_its_tls_handshake_remains_closed() -> None:
    limiter = Limiter(unauthenticated_max=1)
    early = limiter.accept("192.0.2.1", lambda: None)
    assert early is not None
    limiter.connected()
    transport = Transport()
    early.attach(transport)
    early.close()
    assert transport.is_aborted
    assert transport not in limiter.by_transport


@pytest.mark.rule("CO-25", "CO-27")
@pytest.mark.parametrize(
    ("unauthenticated_max", "listeners", "with_tls", "accepts"),
    [(1000, 1, False, 62), (1000, 2, False, 31), (1000, 1, True, 16), (20, 1, False, 1), (0, 1, False, 128)],
)
def test_one_loop_iteration_accepts_a_fraction_of_the_unauthenticated_connections(
    unauthenticated_max: int, listeners: int, with_tls: bool, accepts: int
) -> None:
    limits = ConnectionLimits(total_max=10_000, unauthenticated_max=unauthenticated_max, timeout_ms=TIMEOUT_MS)
    assert limits.accepts_per_turn(listeners=listeners, with_tls=with_tls) == accepts


@pytest.mark.rule("CO-27")
def test_connections_of_an_address_are_limited() -> None:
    limiter = Limiter(address_max=2)
    first = limiter.connected(actor="user:ada")
    limiter.connected(actor="user:bob")
    assert limiter.connect() is None
    assert limiter.connect("192.0.2.2") is not None
    with pytest.raises(ApiError, match="connections_per_address_max is 2"):
        limiter.open_stream("192.0.2.1")
    first.transport.abort()
    stream = limiter.open_stream("192.0.2.1")
    assert limiter.connect() is None
    stream.close()
    stream.close()
    assert limiter.connect() is not None
    assert limiter.reasons == {"address": 3}


@pytest.mark.rule("CO-27")
def test_connections_of_a_principal_are_limited() -> None:
    limiter = Limiter(principal_max=2)
    first = limiter.connected("192.0.2.1", "user:ada")
    limiter.connected("192.0.2.2", "user:ada")
    third = limiter.connected("192.0.2.3")
    with pytest.raises(ApiError, match="connections_per_principal_max is 2") as refused:
        third.set_principal(principal("user:ada"))
    assert (refused.value.code, refused.value.details["limit"]) == ("server_busy", 2)
    assert limiter.unauthenticated_count == 1
    first.set_principal(principal("user:ada"))  # second request on the same connection
    with pytest.raises(ApiError):
        limiter.open_stream("192.0.2.3").set_principal(principal("user:ada"))
    first.transport.abort()
    third.set_principal(principal("user:ada"))
    assert limiter.unauthenticated_count == 0


@pytest.mark.rule("CO-27")
def test_streams_through_a_trusted_proxy_count_for_their_clients() -> None:
    limiter = Limiter(address_max=1, principal_max=1, unauthenticated_max=2)
    proxies = [limiter.connected("10.0.0.1", is_proxy=True) for _ in range(2)]
    Caller("192.0.2.1", proxies[0]).set_principal(principal("user:ada"))
    Caller("192.0.2.1", proxies[1]).set_principal(principal("user:ada"))
    assert limiter.unauthenticated_count == 0
    stream = limiter.open_stream("192.0.2.1", proxies[0])
    assert limiter.unauthenticated_count == 1, "the caller of the stream is not known yet"
    stream.set_principal(principal("user:ada"))
    assert limiter.unauthenticated_count == 0
    with pytest.raises(ApiError, match="connections_per_address_max"):
        limiter.open_stream("192.0.2.1", proxies[1])
    other = limiter.open_stream("192.0.2.2", proxies[1])
    with pytest.raises(ApiError, match="connections_per_principal_max"):
        other.set_principal(principal("user:ada"))
    stream.close()
    other.set_principal(principal("user:ada"))


class CountingByteLimit:
    """A byte limit before authentication."""

    def __init__(self) -> None:
        self.bytes_max: int | None = None

    def remove(self) -> None:
        self.bytes_max = None

    def reset(self, bytes_max: int | None = None, refuse: Callable[[], None] | None = None) -> None:  # noqa: ARG002
        self.bytes_max = bytes_max

    def ignore_body(self, body: StreamReader) -> None:
        raise NotImplementedError


@pytest.mark.rule("CO-25")
def test_first_message_limit_is_removed_on_a_connection_authenticated_for_another_caller() -> None:
    limiter = Limiter()
    proxy = limiter.connected("10.0.0.1", is_proxy=True)
    proxy.byte_limit = limit = CountingByteLimit()
    stream = limiter.open_stream("192.0.2.1", proxy)
    Caller("192.0.2.2", proxy).set_principal(principal("user:bob"))
    stream.limit_first_message(100, lambda: None)
    assert limit.bytes_max == 100
    stream.set_principal(principal("user:ada"))
    assert limit.bytes_max is None


@pytest.mark.rule("CO-27")
def test_closed_connections_leave_no_entries() -> None:
    limiter = Limiter(address_max=5, principal_max=5, unauthenticated_max=5)
    for number in range(20):
        connection = limiter.connected(f"192.0.2.{number}", f"user:{number}" if number % 2 else None)
        connection.close()
        connection.close()
    tables = (limiter._connections, limiter._by_address, limiter._by_principal, limiter._unauthenticated)
    assert [len(one) for one in (*tables, limiter._unauthenticated_of, limiter.by_transport)] == [0] * 6
    assert (limiter.unauthenticated_count, limiter.closed_count) == (0, 20)


@pytest.mark.rule("CO-27")
def test_no_address_or_principal_gets_more_than_half_of_the_connections() -> None:
    limits = to_connection_limits(ApiLimits(connections_max=20), is_development=False)
    assert (limits.total_max, limits.address_max, limits.principal_max) == (20 + RESERVED_CONNECTIONS, 10, 10)
    limits = to_connection_limits(ApiLimits(connections_max=1), is_development=False)
    assert (limits.address_max, limits.principal_max) == (1, 1)
    limits = to_connection_limits(ApiLimits(), is_development=False)
    assert (limits.address_max, limits.principal_max, limits.unauthenticated_max) == (5000, 2500, 1000)
    limits = to_connection_limits(ApiLimits(), is_development=True)
    assert (limits.address_max, limits.principal_max, limits.unauthenticated_max) == (0, 0, 0)
