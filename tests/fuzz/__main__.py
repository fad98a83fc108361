"""Fuzz the decoders: `make fuzz`, or `PYTHONPATH=tests python -m fuzz` with options.

    python -m fuzz --inputs 1000000             a million inputs across all targets
    python -m fuzz chat-frame token --seed 7    some targets, with the inputs of an earlier run

An input that raises an undocumented exception is written to tests/fuzz/corpus, and the command exits with status 1.
"""

import argparse
import os
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from fuzz.fuzzer import Fault, fuzz, keep
from fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--inputs", type=int, default=200_000, help="total inputs across all targets (200000)")
    parser.add_argument("--seed", type=int, default=None, help="the seed of a run to repeat (default: random)")
    options = parser.parse_args()
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]!r}; choose from {', '.join(TARGETS)}")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    chosen = [TARGETS[name] for name in options.targets or TARGETS]
    total = sum(target.share for target in chosen)
    print(f"seed {seed}, {options.inputs} inputs", flush=True)
    faults = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        counts = {target.name: max(1, round(options.inputs * target.share / total)) for target in chosen}
        running = {pool.submit(_run, name, seed, count): name for name, count in counts.items()}
        for done in as_completed(running):
            fault, name = done.result(), running[done]
            if fault is None:
                print(f"{name}: {counts[name]} inputs, no fault", flush=True)
            else:
                faults += 1
                print(f"{name}: FAULT, see {keep(fault)}\n{fault.trace}", flush=True)
    sys.exit(1 if faults else 0)


def _run(name: str, seed: int, count: int) -> Fault | None:
    return fuzz(TARGETS[name], seed, count)


if __name__ == "__main__":
    main()
