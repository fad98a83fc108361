"""Sessions with the server: how each is set up, and what it must do before anything that it reads is believed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg
from msgspec import Struct

from oncelog.errors import SettingsError
from oncelog.stores.postgres.statements import SQL

WEAK: Final = ("off", "local", "remote_write")
_TRANSACTION_TIMEOUT_SINCE: Final = 17

Connection = Any
"""asyncpg has no types."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long a gateway waits, and how long others wait for it. In milliseconds."""

    connect_ms: int = 5_000
    """For a session with one of the hosts."""
    lane_ms: int = 5_000
    """A gateway that holds a lane and says nothing for so long loses it: the server ends its session."""
    commit_ms: int = 30_000
    """For the answer to COMMIT. Then the session is abandoned, and the outcome found out on another one."""
    patience_ms: int = 15_000
    """After a session is lost, for so long the same batch is tried again on others before those who wait are told."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 3_600_000:
                raise SettingsError(f"{name} must be a whole number from 1 to 3600000, not {value!r}")

    @property
    def lock_ms(self) -> int:
        """For a lane that another gateway holds. Longer than that one can hold it in silence."""
        return 2 * self.lane_ms

    @property
    def transaction_ms(self) -> int:
        """For all that comes before COMMIT: beyond it nobody is there any more."""
        return self.lock_ms + 2 * self.lane_ms


async def connect(address: str, timeouts: Timeouts) -> Connection:
    """A session with the server that can be written to, of those that the address names."""
    parameters = parse_qs(urlsplit(address).query)
    connection = await asyncpg.connect(
        address,
        timeout=timeouts.connect_ms / 1000,
        server_settings=_settings(timeouts),
        target_session_attrs=None if "target_session_attrs" in parameters else "read-write",
    )
    try:
        with abandoning(connection, timeouts.connect_ms):
            await _be_durable(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


@contextmanager
def abandoning(connection: Connection, limit_ms: int) -> Iterator[None]:
    """Lets the socket go if it takes longer. (Cancelled, asyncpg would ask the server to cancel as well.)"""
    timer = asyncio.get_running_loop().call_later(limit_ms / 1000, connection.terminate)
    try:
        yield
    finally:
        timer.cancel()


async def pass_barrier(connection: Connection) -> None:
    """Commits a write of its own, before anything is read.

    After a fail-over, or a crash of the server, a session may see a commit that no standby has yet: nobody waits for it
    any more. If it were told, and the server lost, it would be gone. Once a later write has been made durable it is
    durable as well.
    """
    await connection.execute(SQL["barrier"])


def _settings(timeouts: Timeouts) -> dict[str, str]:
    """What a session of ours is set to, whatever the database or the role has as its default."""
    return {
        "application_name": "oncelog",
        "lock_timeout": str(timeouts.lock_ms),
        # A gateway that was cut off or frozen while it holds a lane must not stop the others.
        "idle_in_transaction_session_timeout": str(timeouts.lane_ms),
        "tcp_user_timeout": str(timeouts.lane_ms),
        # What would end a COMMIT that waits for a standby: it would be seen by others, and be on no standby.
        "statement_timeout": "0",
        "client_connection_check_interval": "0",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        # Plans are made once, when tables may be empty, and used when there are millions: always by the indexes.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }


async def _be_durable(connection: Connection) -> None:
    if await connection.fetchval("SHOW synchronous_commit") in WEAK:
        await connection.execute("SET synchronous_commit = on")
    if connection.get_server_version().major >= _TRANSACTION_TIMEOUT_SINCE:
        await connection.execute("SET transaction_timeout = 0")
