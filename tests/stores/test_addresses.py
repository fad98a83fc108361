"""Addresses of databases: what of them is shown, and several hosts in one."""

import asyncio
import socket
from urllib.parse import urlsplit

import pytest

from databases import server_address
from oncelog import Limits, SettingsError
from oncelog import open as open_log
from oncelog.stores.address import is_address, shown
from oncelog.stores.postgres.connecting import addresses_of


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


@pytest.mark.parametrize("change", ["?sslmode=bogus", "?no_such_parameter=2", "://u:sec/ret@h/app"])
def test_an_address_that_cannot_be_read_is_told_without_its_secret(change: str) -> None:
    address = f"postgresql{change}" if change.startswith(":") else f"{server_address()}{change}"

    async def main() -> None:
        with pytest.raises(SettingsError) as caught:
            await open_log(address).__aenter__()
        assert "sec" not in str(caught.value)

    asyncio.run(main())
