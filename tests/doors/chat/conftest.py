"""What the tests of the chat door share: a server for those who do not need one of their own."""

from collections.abc import Iterator
from hashlib import sha256

import pytest

from doors.chat.chat_doors import House


@pytest.fixture(scope="module")
def houses() -> Iterator[dict[str, House]]:
    """The servers of a module, by their stores."""
    found: dict[str, House] = {}
    yield found
    for house in found.values():
        house.close()


@pytest.fixture
def house(
    houses: dict[str, House],
    store_kind: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[House]:
    """A server in development mode that other tests use too, with chats that only this test has."""
    if store_kind not in houses:
        houses[store_kind] = House(tmp_path_factory.mktemp("house"))
    found = houses[store_kind]
    found.name = sha256(request.node.nodeid.encode()).hexdigest()[:20]
    yield found
    found.end()
