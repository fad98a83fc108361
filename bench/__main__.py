"""The command: `python -m bench`."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from bench import core
from bench.measure import FULL, QUICK, Measurement, measure
from bench.report import page, table

BENCHMARKS: Final[dict[str, Callable[[], Iterable[Measurement]]]] = {"core": core.measurements}
"""Every benchmark, by the name that the command and its results have."""

RESULTS: Final = Path(__file__).parent / "results"

EXAMPLES: Final = """\
examples:
  python -m bench                     all benchmarks; writes bench/results/NAME.md
  python -m bench core --no-save      only the core's; writes nothing
  python -m bench --output /tmp/run   writes the pages elsewhere
  python -m bench --quick             does everything run? the figures mean nothing

The exit status is 1 if a ratio misses its target. A missed time is only shown: it depends on the machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the arguments name. Returns the exit status."""
    parser = ArgumentParser(
        prog="python -m bench",
        description="Measures Oncelog against baselines and peers, in ratios within one run.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing judged, and saved only with --output")
    saving = parser.add_mutually_exclusive_group()
    saving.add_argument("--output", type=Path, metavar="DIR", help="where to write NAME.md (default: bench/results)")
    saving.add_argument("--no-save", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    names = options.names or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; there is: {', '.join(BENCHMARKS)}")
    directory = options.output or (None if options.quick else RESULTS)
    return max(_run(name, options.quick, None if options.no_save else directory) for name in names)


def _run(name: str, quick: bool, directory: Path | None) -> int:
    effort = QUICK if quick else FULL
    results = []
    for measurement in BENCHMARKS[name]():
        print(f"{name}: {measurement.name} …", file=sys.stderr, flush=True)
        results.append(measure(measurement, effort))
    print(table(results, judged=not quick))
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        command = f"python -m bench {name}{' --quick' if quick else ''}"
        (directory / f"{name}.md").write_text(page(name, command, results, judged=not quick), "utf-8")
    return 0 if quick or all(result.is_ratio_met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
