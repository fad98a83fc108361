"""What the tests of several gateways on one database share."""

import pytest

from crash.observing import say


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for much more."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def seed(request: pytest.FixtureRequest, is_soak: bool) -> int:
    """The same in every run; with --soak that of the run. When it matters exactly is up to the machine all the same."""
    found = int(request.config.getoption("--hypothesis-seed")) if is_soak else 1
    say(f"seed {found}")
    return found
