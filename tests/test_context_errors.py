"""A `with` statement of the wrong kind raises an error that names the right one, and opens nothing."""

from pathlib import Path
from typing import Any

import pytest

import oncelog
from oncelog.client import BlockingClient, Client


def test_with_for_an_async_log_says_what_to_write(tmp_path: Path) -> None:
    log: Any = oncelog.open(tmp_path / "app.db")
    with pytest.raises(TypeError) as raised, log:
        pass
    assert str(raised.value) == (
        "oncelog.open(…) needs `async with`: write `async with oncelog.open(…)` in an async function, or `with "
        "oncelog.open_blocking(…)` in code without an event loop"
    )
    assert not (tmp_path / "app.db").exists()


async def test_async_with_for_a_blocking_log_says_what_to_write(tmp_path: Path) -> None:
    log: Any = oncelog.open_blocking(tmp_path / "app.db")
    with pytest.raises(TypeError) as raised:
        async with log:
            pass
    assert str(raised.value) == (
        "oncelog.open_blocking(…) needs `with`: write `with oncelog.open_blocking(…)` in code without an event loop, "
        "or `async with oncelog.open(…)` in an async function"
    )
    assert not (tmp_path / "app.db").exists()


def test_with_for_an_async_client_says_what_to_write(tmp_path: Path) -> None:
    client: Any = Client("http://127.0.0.1:1", path=tmp_path / "client.db", partitions=["p"])
    with pytest.raises(TypeError, match=r"write `async with Client\(…\)` .* or `with BlockingClient\(…\)`"), client:
        pass


async def test_async_with_for_a_blocking_client_says_what_to_write(tmp_path: Path) -> None:
    client: Any = BlockingClient("http://127.0.0.1:1", path=tmp_path / "client.db", partitions=["p"])
    with pytest.raises(TypeError, match=r"write `with BlockingClient\(…\)` .* or `async with Client\(…\)`"):
        async with client:
            pass
