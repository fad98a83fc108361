import gc
import os
import signal

import pytest

from crash.store_history import say

# `databases` comes before the plugins that import it: pytest rewrites the assertions of a plugin when it imports it.
pytest_plugins = ["conformance", "databases", "alone", "profiles", "pytester"]

# A process that a shell starts in the background ignores SIGINT, and so do its children. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise gRPC starts a thread in every forked child, which aborts the child if it closes its files before `exec`:
# PostgreSQL, which runs as another user and therefore needs a fork, did not always start.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

LONG = (
    "tests/failover/",
    "tests/test_requirements.py",
    "tests/bench/",
    "tests/crash/",
    "tests/servers/",
    "tests/server/events/test_events_websocket.py",
    "tests/server/chat/test_chat_failures.py",
)


@pytest.hookimpl(trylast=True)  # after pytest-randomly has shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "session_loop" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = _long_files_first(items, config.workerinput["workercount"])


def pytest_collection_finish() -> None:
    """Take the collected tests out of every later garbage collection: a tenth of the time went into traversing them."""
    gc.collect()
    gc.freeze()


def _long_files_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Give each worker some of the long files to start with, so that no worker is left alone with one at the end.

    With `--dist=worksteal` every worker begins with an equal part of the list. A file is not divided: its fixtures
    would be set up several times.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    long = sorted((file for file in files if file.startswith(LONG)), key=_start_order)
    parts = [[item for file in long[worker::workers] for item in files[file]] for worker in range(workers)]
    rest = [item for file, found in files.items() if file not in long for item in found]
    size = -(-len(items) // workers)
    for part in parts:
        free = max(0, size - len(part))
        part.extend(rest[:free])
        del rest[:free]
    return [item for part in parts for item in part] + rest


def _start_order(file: str) -> int:
    return next(place for place, prefix in enumerate(LONG) if file.startswith(prefix))


@pytest.fixture(scope="session")
def session_loop() -> None:
    """Run the test in the event loop of the session. Fixtures with servers that live in that loop request this one."""


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for many more cases."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def seed(request: pytest.FixtureRequest, is_soak: bool) -> int:
    """The same in every run, except with --soak. The moment of a kill also depends on the machine."""
    found = int(request.config.getoption("--hypothesis-seed")) if is_soak else 1
    say(f"seed {found}")
    return found
