import signal

import pytest

from crash.observing import say

pytest_plugins = ["conformance", "databases", "profiles", "pytester"]

# Who is started in the background by a shell ignores Ctrl-C, and so do all whom he starts. Tests send it to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "tests/crash/",
    "tests/gateways/",
    "tests/doors/test_events_socket.py",
    "tests/doors/chat/test_chat_failures.py",
)


@pytest.hookimpl(trylast=True)  # after the order was drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the tests the long ones come first: nobody is left alone with one at the end."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for many more cases."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def seed(request: pytest.FixtureRequest, is_soak: bool) -> int:
    """The same in every run; with --soak that of the run. When it matters exactly is up to the machine all the same."""
    found = int(request.config.getoption("--hypothesis-seed")) if is_soak else 1
    say(f"seed {found}")
    return found
