"""Connections to PostgreSQL: settings, timeouts, and the barrier before a read.

In this package, "the server" is the PostgreSQL server, and a "process" is one that has the log open.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from msgspec import Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.errors import SettingsError
from oncelog.storage.address import BAD_ADDRESS, redact_address
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, find_errnos
from oncelog.storage.postgres.statements import SQL

logger: Final = logging.getLogger("oncelog.postgres")
"""Logger of the PostgreSQL store."""

WEAK_COMMIT_MODES: Final = ("off", "local", "remote_write")
STATEMENTS_MAX: Final = 256
_TRANSACTION_TIMEOUT_VERSION: Final = 17
_REFUSED_ERRNOS: Final = {errno.ECONNREFUSED, errno.EADDRNOTAVAIL}

Connection = Any
"""asyncpg has no type annotations."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """Time limits for one process's work with the server, in milliseconds."""

    connect_ms: int = 5_000
    """Maximum wait for a session with one of the hosts."""
    lane_ms: int = 5_000
    """Idle time after which the server closes a session that holds a lane."""
    commit_ms: int = 30_000
    """Maximum wait for the answer to COMMIT. After that, the writer opens another session and queries the outcome."""
    patience_ms: int = 15_000
    """Time for retries after a session is lost. After that, the callers get an error."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, self.__struct_fields__, highest=3_600_000)

    @property
    def lock_ms(self) -> int:
        """Return the maximum wait for a lane that another process holds.

        It exceeds the time that an idle process can hold a lane.
        """
        return 2 * self.lane_ms

    @property
    def transaction_ms(self) -> int:
        """Return the time limit for a transaction up to COMMIT."""
        return self.lock_ms + 2 * self.lane_ms


async def connect(address: str, timeouts: Timeouts) -> Connection:
    """Open a session with the first server in the address that accepts writes.

    Each server has `connect_ms` to answer, so that a silent server does not block the next one. Raises SettingsError
    for a malformed address.
    """
    errors: list[BaseException] = []
    for host_address in split_address(address):
        try:
            return await _connect_host(host_address, timeouts)
        except POSTGRES_ERRORS as error:
            errors.append(error)
    raise select_error(errors)


async def connect_behind_barrier(address: str, timeouts: Timeouts) -> Connection:
    """Open a session that cannot read a commit that may still be lost.

    A session on a standby skips the barrier, because a standby makes no commits.
    """
    connection = await connect(address, timeouts)
    with terminate_on_error(connection), terminate_after(connection, timeouts.commit_ms):
        if not await connection.fetchval("SELECT pg_is_in_recovery()"):
            await _check_standby(connection, timeouts)
            await pass_barrier(connection)
    return connection


def select_error(errors: Sequence[BaseException]) -> BaseException:
    """Return the most informative of several servers' errors: errors from a primary first, then from a standby."""
    answered = [error for error in errors if not is_refused(error)]
    other = [error for error in answered if not isinstance(error, asyncpg.TargetServerAttributeNotMatched)]
    return next(iter(other or answered), errors[-1])


def is_refused(error: BaseException) -> bool:
    """Return whether no server is listening, the host does not exist, or it has no TLS (a plain ConnectionError)."""
    if type(error) is OSError and error.errno is None:  # asyncio joins the errors of all addresses of a host
        found = find_errnos(error)
        return bool(found) and found <= _REFUSED_ERRNOS
    return isinstance(error, ConnectionRefusedError | socket.gaierror) or type(error) is ConnectionError


def split_address(address: str) -> list[str]:
    """Return one address for each host in an address, in order."""
    parts = urlsplit(address)
    if "@" in parts.path:  # a password with a slash: messages would show the part after it as a database name
        raise SettingsError(BAD_ADDRESS)
    user, at, hosts = parts.netloc.rpartition("@")
    if "," in hosts:
        return [urlunsplit(parts._replace(netloc=user + at + host)) for host in hosts.split(",")]
    parameters = dict(parse_qsl(parts.query))
    named, ports = parameters.get("host", "").split(","), parameters.get("port", "").split(",")
    if len(named) == 1:
        return [address]
    ports = ports if len(ports) == len(named) else ports[:1] * len(named)
    each = [parameters | {"host": host, "port": port} for host, port in zip(named, ports, strict=True)]
    return [
        urlunsplit(parts._replace(query=urlencode({k: v for k, v in host_parameters.items() if v})))
        for host_parameters in each
    ]


async def _connect_host(address: str, timeouts: Timeouts) -> Connection:
    parameters = parse_qs(urlsplit(address).query)
    try:
        connection = await asyncpg.connect(
            address,
            timeout=timeouts.connect_ms / 1000,
            server_settings=_build_session_settings(timeouts),
            # A session must keep all statements that it has prepared (`writer.STATEMENTS`).
            statement_cache_size=STATEMENTS_MAX,
            max_cached_statement_lifetime=0,
            max_cacheable_statement_size=0,
            target_session_attrs=None if "target_session_attrs" in parameters else "read-write",
        )
    except TimeoutError as error:
        raise TimeoutError(f"the server did not respond within {timeouts.connect_ms} ms") from error
    except asyncpg.UndefinedObjectError as error:
        raise SettingsError(f"the server does not recognize a parameter in the address: {error}") from error
    except asyncpg.ClientConfigurationError as error:
        raise SettingsError(f"{redact_address(address)}: {error}") from error
    except (ValueError, TypeError):
        raise SettingsError(BAD_ADDRESS) from None  # the error's text may contain part of the password
    with terminate_on_error(connection), terminate_after(connection, timeouts.connect_ms):
        if await connection.fetchval("SHOW synchronous_commit") in WEAK_COMMIT_MODES:
            await connection.execute("SET synchronous_commit = on")
        if connection.get_server_version().major >= _TRANSACTION_TIMEOUT_VERSION:
            await connection.execute("SET transaction_timeout = 0")
    return connection


@contextmanager
def terminate_on_error(connection: Any) -> Iterator[None]:
    """Close the socket without waiting for the server if the block raises an error."""
    try:
        yield
    except BaseException:
        connection.terminate()
        raise


@contextmanager
def terminate_after(connection: Connection, limit_ms: int) -> Iterator[None]:
    """Close the socket if the block takes longer than the limit.

    Cancelling the call would cancel the statement on the server too.
    """
    timer = asyncio.get_running_loop().call_later(limit_ms / 1000, connection.terminate)
    try:
        yield
    except AttributeError as error:
        # asyncpg has no protocol object once the connection is terminated between a statement's two round trips.
        if connection.is_closed():
            raise asyncpg.ConnectionDoesNotExistError("the connection was terminated during a statement") from error
        raise
    finally:
        timer.cancel()


async def pass_barrier(connection: Connection) -> None:
    """Commit a write before the first read.

    After a failover or a server crash, a session may see a commit that no standby has, because the commit's wait for
    the standby was cut short. A reader could receive this commit, and the loss of the server would then remove it. Once
    a later write is durable, all commits before it are durable too.
    """
    async with check_replicated(connection, "the barrier"):
        await connection.execute(SQL["barrier"])


async def _check_standby(connection: Connection, timeouts: Timeouts) -> None:
    """Raise TimeoutError if an Oncelog session has been waiting for a standby for too long, because a new session would
    wait too.

    The server keeps a waiting session even after its program has ended, so new sessions would use up its connections.
    """
    if await connection.fetchval(SQL["waits_for_long"], timeouts.connect_ms / 1000):
        raise TimeoutError("the server does not commit: it is waiting for an unavailable standby")


@asynccontextmanager
async def check_replicated(connection: Connection, label: str = "COMMIT") -> AsyncIterator[None]:
    """Raise ConnectionAbortedError if the server warns during the block that a commit may exist only on that server.

    An operator can cut short a COMMIT's wait for a standby. The server then answers as usual, but adds a warning.
    """
    warnings: list[str] = []

    def add_warning(_: Connection, message: Any) -> None:
        if message.severity_en == "WARNING":
            warnings.append(str(message))

    connection.add_log_listener(add_warning)
    try:
        yield
        await asyncio.sleep(0)  # asyncpg calls listeners one turn of the event loop after the statement
    finally:
        with suppress(asyncpg.InterfaceError):  # the connection was closed, or a pool has reclaimed it
            connection.remove_log_listener(add_warning)
    if warnings:
        raise ConnectionAbortedError(f"{label} may not have reached a standby: {warnings[0]}")


def _build_session_settings(timeouts: Timeouts) -> dict[str, str]:
    """Return the session settings, which override the defaults of the database and the role."""
    return {
        "application_name": "oncelog",
        "lock_timeout": str(timeouts.lock_ms),
        # A process that is cut off or frozen while it holds a lane must not block the others.
        "idle_in_transaction_session_timeout": str(timeouts.lane_ms),
        "tcp_user_timeout": str(timeouts.lane_ms),
        # These could cut short a COMMIT's wait for a standby. Other sessions would then see a commit that no standby
        # has.
        "statement_timeout": "0",
        "client_connection_check_interval": "0",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        # A session plans a statement once, perhaps while tables are empty, and keeps the plan when they have millions
        # of rows. These settings make every plan use the indexes.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }
