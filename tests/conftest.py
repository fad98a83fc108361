import gc
import os
import signal

import pytest

from crash.store_history import say

# `databases` must precede the plugins that import it, because pytest rewrites a plugin's assertions when it imports the
# plugin.
pytest_plugins = ["conformance", "databases", "alone", "profiles", "pytester"]

# A shell starts background processes with SIGINT ignored, and children inherit that. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise gRPC starts a thread in every forked child. The thread aborts a child that closes its files before `exec`,
# such as the PostgreSQL server, which is forked because it runs as a different user.
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
    if hasattr(config, "workerinput"):  # a pytest-xdist worker
        items[:] = _long_files_first(items, config.workerinput["workercount"])


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which would otherwise take a tenth of the run."""
    gc.collect()
    gc.freeze()


def _long_files_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Start each worker with some of the long files, so that no worker runs a long file alone at the end.

    With `--dist=worksteal` every worker begins with an equal share of the list. Files are not split, because their
    fixtures would be set up several times.
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
    """Run the test in the session's event loop. Fixtures whose servers run in that loop request this fixture."""


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether this is a soak run, which has time for many more cases."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def seed(request: pytest.FixtureRequest, is_soak: bool) -> int:
    """Seed for random tests: constant, except with --soak. (The moment of a kill also depends on the machine.)"""
    found = int(request.config.getoption("--hypothesis-seed")) if is_soak else 1
    say(f"seed {found}")
    return found
