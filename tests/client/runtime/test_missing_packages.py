"""A client without the package of its extra says what to install."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from oncelog.client import Client
from oncelog.client.chat import ChatClient
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import LedgerClient
from oncelog.errors import SettingsError

URL = "http://127.0.0.1:9"
OPENERS: dict[str, tuple[Callable[[], AbstractAsyncContextManager[Any]], str, str]] = {
    "events": (lambda: Client(URL, path=":memory:", partitions=["orders"]), "aiohttp", "client"),
    "deltas": (lambda: DeltasClient(URL, "shop", path=":memory:", client_id="till-1"), "aiohttp", "client"),
    "chat": (lambda: ChatClient(URL, path=":memory:"), "aiohttp", "client"),
    "ledger": (
        lambda: LedgerClient("127.0.0.1:9", path=":memory:", organization="acme", client_id="till-1"),
        "grpcio",
        "ledger",
    ),
}


@pytest.mark.parametrize("kind", OPENERS)
async def test_client_without_its_package_names_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, package, extra = OPENERS[kind]
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "oncelog.client.ledger.transport", raising=False)
    with pytest.raises(SettingsError, match=rf"^oncelog\.client\S* needs {package}: pip install 'oncelog\[{extra}\]'$"):
        async with build():
            raise AssertionError
