"""Addresses of databases: what of them is shown, and several hosts in one."""

import asyncio
import socket
import traceback
from typing import Any
from urllib.parse import urlsplit

import pytest

from databases import server_address
from oncelog import Limits, SettingsError, StoreUnavailableError
from oncelog import open as open_log
from oncelog.stores.address import is_address, shown
from oncelog.stores.postgres.connecting import addresses_of
from oncelog.stores.postgres.looking import looking_at

NOBODY = "127.0.0.1:1"
WAIT_S = 30
LONG_MS = 100_000
"""Longer than a test waits."""


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
def test_what_may_be_a_secret_is_not_shown_and_the_schema_is(address: str, said: str) -> None:
    assert shown(address) == said
    assert is_address(address) == (address != "app.db")


def test_each_host_is_an_address() -> None:
    assert addresses_of("postgresql://u:p@a:1,b:2/app?x=y") == [
        "postgresql://u:p@a:1/app?x=y",
        "postgresql://u:p@b:2/app?x=y",
    ]
    assert addresses_of("postgresql://u@/app?host=/a,/b&port=1,2") == [
        "postgresql://u@/app?host=%2Fa&port=1",
        "postgresql://u@/app?host=%2Fb&port=2",
    ]
    assert addresses_of("postgresql://a/app") == ["postgresql://a/app"]


def test_a_host_that_says_nothing_does_not_keep_us_from_the_next(database: str) -> None:
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            host = urlsplit(server_address()).netloc.rpartition("@")[2]
            both = database.replace(host, f"127.0.0.1:{silent.getsockname()[1]},{host}")
            async with open_log(both, limits=Limits(postgres_connect_ms=300)) as log:
                assert await log.heads() == {}

    asyncio.run(main())


def host_of(address: str) -> str:
    return urlsplit(address).netloc.rpartition("@")[2]


def beside(address: str, *, first: str = "", last: str = "") -> str:
    """The address with one more host, before or behind its own."""
    hosts = [host for host in (first, host_of(address), last) if host]
    return address.replace(host_of(address), ",".join(hosts))


async def demand_told(address: str, says: str) -> None:
    """To who opens it, at once, and to who looks at it."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StoreUnavailableError, match=says):
            await open_log(address, limits=Limits(postgres_patience_ms=LONG_MS)).__aenter__()

    def look() -> None:
        with looking_at(address):
            pass

    with pytest.raises(StoreUnavailableError, match=says):
        await asyncio.to_thread(look)


@pytest.mark.parametrize("where", [{"first": NOBODY}, {"last": NOBODY}], ids=["first", "last"])
def test_of_several_hosts_the_one_that_answers_is_told(database: str, where: dict[str, str]) -> None:
    """That nobody is there says least, wherever it stands."""
    wrong = database.replace("/postgres?", "/nowhere?")
    asyncio.run(demand_told(beside(wrong, **where), 'database "nowhere" does not exist'))


@pytest.mark.parametrize("where", [{"first": "many"}, {"last": "many"}], ids=["first", "last"])
def test_a_host_with_several_addresses_at_which_nobody_is_says_as_little(
    database: str, monkeypatch: pytest.MonkeyPatch, where: dict[str, str]
) -> None:
    """As `localhost` is: of all of them together asyncio makes an error of its own."""
    found = socket.getaddrinfo

    def many(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "many":
            return found(host, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 1)) for one in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", many)
    wrong = database.replace("/postgres?", "/nowhere?")
    asyncio.run(demand_told(beside(wrong, **where), 'database "nowhere" does not exist'))
    asyncio.run(demand_told("postgresql://u@many/app", "Multiple exceptions: .*127.0.0.1.*127.0.0.2"))


def test_a_standby_is_told_though_the_primary_is_away(database: str) -> None:
    """Who opens a log waits for one that can be written to: another may become the primary."""
    standby = f"{database}&default_transaction_read_only=on"

    async def main() -> None:
        for where in ({"first": NOBODY}, {"last": NOBODY}):
            address = beside(standby, **where)
            with pytest.raises(StoreUnavailableError, match="None of the hosts match"):
                await open_log(address, limits=Limits(postgres_patience_ms=1)).__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize("change", ["?sslmode=bogus", "?no_such_parameter=2", "://u:pa55/ret@h/app"])
def test_an_address_that_cannot_be_read_is_told_without_its_secret(change: str) -> None:
    address = f"postgresql{change}" if change.startswith(":") else f"{server_address()}{change}"

    async def main() -> None:
        with pytest.raises(SettingsError) as caught:
            await open_log(address).__aenter__()
        assert "pa55" not in "".join(traceback.format_exception(caught.value))

    asyncio.run(main())


def test_what_follows_a_slash_in_a_password_is_not_told_as_a_database() -> None:
    """Of a user that is called as a host is, and a password that begins as a port does."""
    address = f"postgresql://{host_of(server_address())}/pa55@h/app"

    def look() -> None:
        with looking_at(address):
            pass

    async def main() -> None:
        for call in (open_log(address).__aenter__(), asyncio.to_thread(look)):
            with pytest.raises(SettingsError) as caught:
                await call
            assert "pa55" not in "".join(traceback.format_exception(caught.value))

    asyncio.run(main())
