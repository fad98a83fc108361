import signal

import pytest

pytest_plugins = ["conformance", "databases", "profiles", "pytester"]

# Who is started in the background by a shell ignores Ctrl-C, and so do all whom he starts. Tests send it to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("tests/crash/", "tests/gateways/", "tests/doors/test_events_socket.py")


@pytest.hookimpl(trylast=True)  # after the order was drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the tests the long ones come first: nobody is left alone with one at the end."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
