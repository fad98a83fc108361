"""The command: `python -m bench`."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench import chat, client, core, deltas, embedded, gateways, growth, ledger, once, peers, server
from bench.measure import FULL, QUICK, Effort, Measurement, measure
from bench.report import Report, page, plain, report_of


@dataclass(frozen=True)
class Measured:
    """A benchmark that is a list of measurements."""

    name: str
    measurements: Callable[[Effort], Iterable[Measurement]]

    def __call__(self, effort: Effort) -> Report:
        results = []
        for measurement in self.measurements(effort):
            print(f"{self.name}: {measurement.name} …", file=sys.stderr, flush=True)
            results.append(measure(measurement, effort))
        return report_of(results, judged=not effort.is_quick)


Benchmark = Callable[[Effort], Report]

BENCHMARKS: Final[dict[str, Benchmark]] = {
    "core": Measured("core", core.measurements),
    "embedded": Measured("embedded", embedded.measurements),
    "growth": growth.run,
    "once": Measured("once", once.measurements),
    "peers": Measured("peers", peers.measurements),
    "server": server.run,
    "client": client.run,
    "gateways": gateways.run,
    "ledger": ledger.run,
    "deltas": deltas.run,
    "chat": chat.run,
}
"""All benchmarks, by the name that the command and the results use."""
ALONE: Final = ("peers", "server")
"""Benchmarks that need additional packages (`make peers`). They run only when they are named."""

RESULTS: Final = Path(__file__).parent / "results"

EXAMPLES: Final = """\
examples:
  python -m bench                     all benchmarks; writes bench/results/NAME.md
  python -m bench core --no-save      only the benchmark of the core; writes nothing
  python -m bench growth --records 500000 --no-save
                                      a log that grows to a tenth of its full size
  python -m bench --output /tmp/run   writes the pages elsewhere
  make peers                          installs the peers, and compares with them
  PYTHONPATH=src .venv-peers/bin/python -m bench server
                                      the server, compared with NATS and PostgreSQL
  python -m bench --quick             checks that everything runs; the figures mean nothing

The exit status is 1 if a ratio misses its target. A missed time is only shown: it depends on the machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the arguments name. Return the exit status."""
    parser = ArgumentParser(
        prog="python -m bench",
        description="Measures Oncelog against baselines and peers, in ratios within one run.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="two rounds without verdicts; saved only with --output")
    parser.add_argument(
        "--records", type=_records, metavar="N", help=f"final size of the log of growth ({FULL.records})"
    )
    saving = parser.add_mutually_exclusive_group()
    saving.add_argument("--output", type=Path, metavar="DIR", help="where to write NAME.md (default: bench/results)")
    saving.add_argument("--no-save", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    names = options.names or [name for name in BENCHMARKS if name not in ALONE]
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; known names: {', '.join(BENCHMARKS)}")
    effort, flags = (QUICK, " --quick") if options.quick else (FULL, "")
    if options.records is not None:
        effort, flags = replace(effort, records=options.records), f"{flags} --records {options.records}"
    directory = options.output or (None if options.quick else RESULTS)
    return max(_run(name, effort, flags, None if options.no_save else directory) for name in names)


def _records(text: str) -> int:
    if not text.isdecimal() or int(text) < growth.RECORDS_MIN:
        raise ArgumentTypeError(f"must be a whole number from {growth.RECORDS_MIN} on, not {text!r}")
    return int(text)


def _run(name: str, effort: Effort, flags: str, directory: Path | None) -> int:
    report = BENCHMARKS[name](effort)
    print(plain(report))
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.md").write_text(page(name, f"python -m bench {name}{flags}", report), "utf-8")
    return 0 if report.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
