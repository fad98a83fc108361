"""What the tests of the ledger door share: a wire, and a server for those who do not need one of their own."""

from collections.abc import Iterator
from hashlib import sha256

import pytest

from doors.ledger.ledger_doors import House
from doors.ledger.wires import WIRES


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """What the test speaks to the server over."""
    return str(request.param)


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
    wire: str,
    store_kind: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> House:
    """A server in development mode that other tests use too, with an organization that only this test has."""
    if store_kind not in houses:
        houses[store_kind] = House(tmp_path_factory.mktemp("house"), wire)
    found = houses[store_kind]
    found.door.kind = wire
    found.name = sha256(request.node.nodeid.encode()).hexdigest()[:20]
    return found
