"""CPU time per event of two source trees, in alternating pairs: `python -m bench.pairs OLD`.

The servers of both trees run during the whole measurement and take turns under load. The embedded log runs in a new
process for each sample. The benchmark compares CPU time, which depends less on other load than wall time.
"""

import asyncio
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import uvloop

import oncelog
from bench.disk import directory
from bench.grpc_load import grpc_load
from bench.http_caller import keep_calling
from bench.http_load import writers
from bench.ledger import GRPC_ADDRESS, MANY
from bench.pairs_embedded import LOADS
from bench.processes import process
from bench.report import Report, Table, plain
from bench.server import ADDRESS, BATCH, COMMAND, UNLIMITED, Serving
from bench.turns import print_progress
from bench.wire import Slice
from bench.ws_load import Load, connected

PAIRS_DEFAULT: Final = 15
SLICE_S_DEFAULT: Final = 3.0
EVENTS_DEFAULT: Final = 40_000
CONNECTIONS: Final = 64
IN_FLIGHT: Final = 16
BATCH_CALLERS: Final = 16
RATIO_MAX: Final = 1.05
"""The new tree may use 5 % more CPU time than the old one."""

Sample = Callable[[], Awaitable[float]]
"""Measures one tree once, and returns the CPU time per event in microseconds."""


@dataclass(frozen=True)
class Size:
    """Sizes of a measurement."""

    pairs: int
    slice_s: float
    events: int


EXAMPLES: Final = """\
examples:
  git worktree add /tmp/old HEAD~10
  python -m bench.pairs /tmp/old                      all loads, 15 pairs each, about fifteen minutes
  python -m bench.pairs /tmp/old ledger --pairs 30    only the loads of the ledger

The exit status is 1 if the median ratio of a load is above 1.05."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the loads that the arguments name. Return the exit status."""
    parser = ArgumentParser(
        prog="python -m bench.pairs",
        description="Compares the CPU time per event of two source trees: another checkout, and this one.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="root of the other checkout")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(GROUPS)}")
    parser.add_argument("--pairs", type=int, default=PAIRS_DEFAULT, help="pairs of each load (default: %(default)s)")
    parser.add_argument(
        "--slice-s", type=float, default=SLICE_S_DEFAULT, help="seconds of load on a server (default: %(default)s)"
    )
    parser.add_argument(
        "--events", type=int, default=EVENTS_DEFAULT, help="events of an embedded load (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(GROUPS):
        parser.error(f"unknown name {min(unknown)!r}; known names: {', '.join(GROUPS)}")
    for name, lowest in (("pairs", 1), ("events", 10), ("slice_s", 0.1)):
        if getattr(options, name) < lowest:
            parser.error(f"--{name.replace('_', '-')} must be at least {lowest}, not {getattr(options, name)}")
    trees = (options.old.resolve() / "src", Path(oncelog.__file__).parent.parent)
    if not (trees[0] / "oncelog").is_dir():
        parser.error(f"{options.old} has no src/oncelog")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        size = Size(options.pairs, options.slice_s, options.events)
        report = runner.run(_compare(trees, options.names or list(GROUPS), size))
    print(plain(report))
    return 0 if report.is_met else 1


async def _compare(trees: tuple[Path, Path], names: Sequence[str], size: Size) -> Report:
    rows: list[tuple[str, ...]] = []
    is_met = True
    for name in names:
        async with AsyncExitStack() as stack:
            of_old, of_new = [await GROUPS[name](stack, tree, size) for tree in trees]
            for load in of_old:
                pairs_us = await _in_pairs(load, of_old[load], of_new[load], size.pairs)
                ratios = [new_us / old_us for old_us, new_us in pairs_us]
                low, _, high = quantiles(ratios, n=4) if size.pairs > 1 else ratios * 3
                is_met &= median(ratios) <= RATIO_MAX
                medians = (f"{median(times_us):.2f} µs" for times_us in zip(*pairs_us, strict=True))
                rows.append((load, *medians, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"))
                print_progress("  ".join(rows[-1]))
    columns = ("CPU per event", "old", "new", "median ratio", "middle half")
    return Report([Table(columns, rows)], "", is_met)


async def _in_pairs(load: str, old: Sample, new: Sample, pairs: int) -> list[tuple[float, float]]:
    """Measure both trees in turn. The first pair is a warm-up, and the order alternates."""
    pairs_us: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        print_progress(f"{load}, {f'pair {number} of {pairs}' if number else 'warm-up'} …")
        if number % 2:
            old_us, new_us = await old(), await new()
        else:
            new_us, old_us = await new(), await old()
        pairs_us.append((old_us, new_us))
    return pairs_us[1:]


# --- servers -------------------------------------------------------------------------------------------


@contextmanager
def _serving(tree: Path, address: str) -> Iterator[Serving]:
    with directory() as place:
        command = ["env", f"PYTHONPATH={tree}", *COMMAND, str(place / "log.db"), *_unlimited(tree)]
        with process(command, place / "server.log", address) as (pid, said):
            yield Serving(said[1], int(said[2]), pid)


def _unlimited(tree: Path) -> tuple[str, ...]:
    """Return the options that disable rate limits. Older trees do not have these options."""
    package = tree / "oncelog"
    file = next(package / name / "limits.py" for name in ("server", "doors") if (package / name).is_dir())
    return UNLIMITED if "requests_per_second_max" in file.read_text() else ()


async def _server_loads(stack: AsyncExitStack, tree: Path, size: Size) -> dict[str, Sample]:
    server = stack.enter_context(_serving(tree, ADDRESS))
    many = await stack.enter_async_context(connected(server.host, server.port, CONNECTIONS))
    few = await stack.enter_async_context(connected(server.host, server.port, BATCH_CALLERS))
    return {
        "server, single events": lambda: _sample(Load(many, 1).keep_busy(server.pid, IN_FLIGHT, size.slice_s)),
        f"server, batches of {BATCH}": lambda: _sample(Load(few, BATCH).keep_busy(server.pid, 1, size.slice_s)),
    }


async def _ledger_loads(stack: AsyncExitStack, tree: Path, size: Size) -> dict[str, Sample]:
    server = stack.enter_context(_serving(tree, ADDRESS))
    callers = await stack.enter_async_context(writers(server.host, server.port, MANY, 0))
    grpc = grpc_load(stack.enter_context(_serving(tree, GRPC_ADDRESS)), MANY)
    return {
        f"ledger over HTTP, {MANY} writers": lambda: _sample(keep_calling(callers, server.pid, size.slice_s)),
        f"ledger over gRPC, {MANY} callers": lambda: _sample(grpc(size.slice_s)),
    }


async def _sample(load: Awaitable[Slice]) -> float:
    seen = await load
    if not seen.events or not seen.server_cpu:
        raise SystemExit("the server did nothing in a slice: choose a longer one, with --slice-s")
    return seen.server_cpu * seen.seconds / seen.events * 1e6


# --- the embedded log ----------------------------------------------------------------------------------


async def _embedded_loads(_stack: AsyncExitStack, tree: Path, size: Size) -> dict[str, Sample]:
    return {f"embedded, {load}": partial(_embedded, tree, load, size.events) for load in LOADS}


async def _embedded(tree: Path, load: str, count: int) -> float:
    """Measure a load in a process that imports the tree."""
    root = Path(__file__).parent.parent
    command = ["env", f"PYTHONPATH={tree}:{root}", sys.executable, "-m", "bench.pairs_embedded", load, str(count)]
    done = await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


GROUPS: Final = {"embedded": _embedded_loads, "server": _server_loads, "ledger": _ledger_loads}


if __name__ == "__main__":
    sys.exit(main())
