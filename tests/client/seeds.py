"""Run the simulations of all client libraries with many new seeds: `PYTHONPATH=tests python -m client.seeds 20000`.

Prints each failing seed with its simulation, and exits with status 1 if any seed fails. The tests run a few hundred
seeds; run this command after changing a client's protocol.
"""

import argparse
import contextlib
import io
import logging
import os
import secrets
import sys
from collections.abc import Callable
from multiprocessing import Pool
from typing import Final

from client.chat import test_chat_client_simulated as chat
from client.deltas import test_deltas_client_simulated as deltas
from client.events import test_client_simulated as events
from client.ledger import test_ledger_client_simulated as ledger
from oncelog.client.events import protocol as events_protocol

CHUNK_SEEDS: Final = 20

SIMULATIONS: Final[dict[str, Callable[[int], object]]] = {
    "ledger": lambda seed: ledger.World(seed).run(),
    "ledger, late duplicates": lambda seed: ledger.World(seed, late=True).run(),
    "ledger, evictions": lambda seed: ledger.World(seed, evictions=True).run(),
    "ledger, foreign writer": lambda seed: ledger.World(seed, foreign=True).run(in_order=False),
    "events": lambda seed: events.simulate(
        seed, duplicates=(0.0, 0.1)[seed % 2], busy=(0.0, 0.4)[seed // 2 % 2], cuts=seed % 9
    ),
    "chat": lambda seed: chat.World(seed, backups=bool(seed % 2), leaving=bool(seed // 2 % 2)).run(chat.STEPS),
    "deltas": lambda seed: deltas.World(seed, backups=bool(seed % 2), refusals=bool(seed // 2 % 2)).run(deltas.STEPS),
    "deltas, dropped tombstones": lambda seed: deltas.World(
        seed, drops=True, backups=bool(seed % 2), refusals=bool(seed // 2 % 2)
    ).run(deltas.STEPS),
}


def failure_of(job: tuple[str, int]) -> str | None:
    """Run one simulation, and return a line that describes the failure, or None."""
    name, seed = job
    for limit, value in events.SMALL_LIMITS.items():
        setattr(events_protocol, limit, value)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            SIMULATIONS[name](seed)
    except BaseException as error:  # noqa: BLE001 - pytest.fail raises one
        return f"{name}: seed {seed}: {type(error).__name__}: {str(error)[:200]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m client.seeds", description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, help="seeds of each simulation")
    parser.add_argument("--first", type=int, default=None, help="first seed; default: random")
    parser.add_argument("--only", nargs="+", choices=list(SIMULATIONS), default=list(SIMULATIONS), metavar="NAME")
    options = parser.parse_args()
    logging.disable()  # the clients log a warning for every fault
    first = secrets.randbelow(2**31) if options.first is None else options.first
    for name in options.only:
        jobs = ((name, first + number) for number in range(options.count))
        with Pool(os.cpu_count()) as pool:
            failures = [found for found in pool.imap_unordered(failure_of, jobs, CHUNK_SEEDS) if found is not None]
        print(*failures, f"{name}: {len(failures)} of {options.count} seeds from {first} fail", sep="\n", flush=True)  # noqa: T201
        if failures:
            sys.exit(1)


if __name__ == "__main__":
    main()
