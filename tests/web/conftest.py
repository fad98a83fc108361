from collections.abc import Iterator

import pytest

from web.chromium import Chromium, running_chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """A browser for all tests of this directory."""
    with running_chromium() as found:
        yield found
