"""Database addresses: how they are displayed, and addresses with several hosts."""

import asyncio
import socket
import traceback
from typing import Any
from urllib.parse import urlsplit

import pytest

from databases import POSTGRES, server_address
from engine.observable_store import LoopClock
from oncelog import Limits, SettingsError, StoreUnavailableError
from oncelog import open as open_log
from oncelog.storage.address import is_address, redact_address
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.postgres.connection import split_address

NOBODY = "127.0.0.1:1"
CONNECT_S = 600
LONG_MS = 3_600_000
"""Longer than the duration of any test."""


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("app.db", "app.db"),
        ("postgresql://h/app", "postgresql://h/app"),
        ("postgresql://u:secret@h:5/app", "postgresql://u@h:5/app"),
        ("postgres://u:secret@a:1,b:2/app?search_path=s", "postgres://u@a:1,b:2/app?search_path=s"),
        (
            "postgresql://u@/app?host=/run/sockets&port=5&password=secret",
            "postgresql://u@/app?host=/run/sockets&port=5",
        ),
        ("postgresql://u:sec#ret@h/app", "postgresql://…"),
        ("postgresql://u:sec/ret@h/app", "postgresql://…"),
        ("postgresql://u:sec?ret@h/app", "postgresql://…"),
        ("POSTGRESQL://u:secret@h/app", "POSTGRESQL://u@h/app"),
    ],
)
def test_displayed_address_hides_secrets_and_keeps_the_schema(address: str, said: str) -> None:
    assert redact_address(address) == said
    assert is_address(address) == (address != "app.db")


@pytest.mark.parametrize(("address", "problem"), [("", "is empty"), ("a\0b", r"must not contain U\+0000")])
async def test_empty_address_and_address_with_a_null_character_are_refused(address: str, problem: str) -> None:
    for use in (open_log, create_inspector):
        with pytest.raises(SettingsError, match=f"the log's address {problem}"):
            use(address)


@pytest.mark.parametrize(
    "address",
    [
        "mysql://u:secret@h/app",
        "sqlite:///app.db",
        "postgresql+asyncpg://u:secret@h/app",
        "postgresqll://u:secret@h/app",
    ],
)
async def test_other_scheme_is_refused_without_the_password(address: str) -> None:
    for use in (open_log, create_inspector):
        with pytest.raises(SettingsError, match="the log's address must be a file or postgresql://") as refused:
            use(address)
        assert address.partition("://")[0] in str(refused.value)
        assert "secret" not in str(refused.value)


def test_address_with_several_hosts_is_split() -> None:
    assert split_address("postgresql://u:p@a:1,b:2/app?x=y") == [
        "postgresql://u:p@a:1/app?x=y",
        "postgresql://u:p@b:2/app?x=y",
    ]
    assert split_address("postgresql://u@/app?host=/a,/b&port=1,2") == [
        "postgresql://u@/app?host=%2Fa&port=1",
        "postgresql://u@/app?host=%2Fb&port=2",
    ]
    assert split_address("postgresql://a/app") == ["postgresql://a/app"]


async def test_silent_host_is_skipped_after_the_connect_timeout(database: str, loop_clock: LoopClock) -> None:
    is_connected, may_end = asyncio.Event(), asyncio.Event()

    async def never_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_connected.set()
        await may_end.wait()
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    both = add_host(database, first=f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    log = open_log(both, limits=Limits(postgres_connect_ms=CONNECT_S * 1000, postgres_patience_ms=LONG_MS))
    opening = asyncio.create_task(log.__aenter__())
    await is_connected.wait()
    loop_clock.advance(CONNECT_S)
    await opening
    assert await log.heads() == {}
    await log.close()
    may_end.set()
    silent.close()
    await silent.wait_closed()


def host_of(address: str) -> str:
    return urlsplit(address).netloc.rpartition("@")[2]


def add_host(address: str, *, first: str = "", last: str = "") -> str:
    """Return the address with another host before or after its host."""
    hosts = [host for host in (first, host_of(address), last) if host]
    return address.replace(host_of(address), ",".join(hosts))


async def assert_fails_with(address: str, says: str) -> None:
    """Assert that opening and inspecting the log fail immediately with this message."""
    with pytest.raises(StoreUnavailableError, match=says):
        await open_log(address, limits=Limits(postgres_patience_ms=LONG_MS)).__aenter__()

    def inspect_log() -> None:
        with create_inspector(address).open_view():
            pass

    with pytest.raises(StoreUnavailableError, match=says):
        await asyncio.to_thread(inspect_log)


@pytest.mark.parametrize("where", [{"first": NOBODY}, {"last": NOBODY}], ids=["first", "last"])
async def test_error_of_a_responding_host_is_reported_over_a_refused_connection(
    database: str, where: dict[str, str]
) -> None:
    """A refused connection is the least specific error, in any order of hosts."""
    wrong = database.replace("/postgres?", "/nowhere?")
    await assert_fails_with(add_host(wrong, **where), 'database "nowhere" does not exist')


@pytest.mark.parametrize("where", [{"first": "many"}, {"last": "many"}], ids=["first", "last"])
async def test_error_of_a_responding_host_is_reported_over_a_host_with_several_addresses(
    database: str, monkeypatch: pytest.MonkeyPatch, where: dict[str, str]
) -> None:
    """For such a host, for example `localhost`, asyncio combines the errors of all addresses."""
    found = socket.getaddrinfo

    def resolve_to_two_addresses(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "many":
            return found(host, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 1)) for one in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_to_two_addresses)
    wrong = database.replace("/postgres?", "/nowhere?")
    await assert_fails_with(add_host(wrong, **where), 'database "nowhere" does not exist')
    await assert_fails_with(
        "postgresql://u@many/app", r": Connection refused \(is the server running at this address\?\)"
    )


async def test_standby_is_reported_when_the_primary_is_unreachable(database: str) -> None:
    """Opening a log waits for a writable host, because another host may become the primary."""
    standby = f"{database}&default_transaction_read_only=on"
    limits = Limits(postgres_connect_ms=LONG_MS, postgres_patience_ms=1)
    for where in ({"first": NOBODY}, {"last": NOBODY}):
        address = add_host(standby, **where)
        with pytest.raises(StoreUnavailableError, match="None of the hosts match"):
            await open_log(address, limits=limits).__aenter__()


@pytest.mark.stores(POSTGRES)
@pytest.mark.parametrize("change", ["?sslmode=bogus", "?no_such_parameter=2", "://u:pa55/ret@h/app"])
async def test_malformed_address_is_reported_without_its_secret(change: str) -> None:
    address = f"postgresql{change}" if change.startswith(":") else f"{server_address()}{change}"
    with pytest.raises(SettingsError) as caught:
        await open_log(address).__aenter__()
    assert "pa55" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.stores(POSTGRES)
async def test_password_with_a_slash_is_not_reported_as_a_database_name() -> None:
    """The user name looks like a host, and the password begins like a port."""
    address = f"postgresql://{host_of(server_address())}/pa55@h/app"

    def inspect_log() -> None:
        with create_inspector(address).open_view():
            pass

    for call in (open_log(address).__aenter__(), asyncio.to_thread(inspect_log)):
        with pytest.raises(SettingsError) as caught:
            await call
        assert "pa55" not in "".join(traceback.format_exception(caught.value))
