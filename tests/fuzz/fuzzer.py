"""Run a target with many inputs derived from its corpus."""

import traceback
from collections.abc import Iterator
from hashlib import sha256
from random import Random
from typing import Final, NamedTuple

from fuzz.mutations import mutate
from fuzz.targets import CORPUS, Target

POOL_MAX: Final = 2000
"""Maximum number of inputs from which others are derived: the corpus and the inputs accepted in this run."""


class Fault(NamedTuple):
    """An input that raised an undocumented exception."""

    target: str
    data: bytes
    trace: str


def inputs(corpus: list[bytes], random: Random, count: int) -> Iterator[bytes]:
    """Yield inputs. Some of them become the parents of later ones."""
    pool = list(corpus)
    for _ in range(count):
        data = mutate(random.choice(pool), random, pool)
        yield data
        if random.random() < 0.01:
            if len(pool) < POOL_MAX:
                pool.append(data)
            else:
                pool[random.randrange(len(corpus), POOL_MAX)] = data


def fuzz(target: Target, seed: int, count: int) -> Fault | None:
    """Run the target `count` times and return the first fault."""
    random = Random(f"{target.name} {seed}")
    for data in inputs(target.corpus(), random, count):
        try:
            target.run(data)
        except Exception:  # noqa: BLE001 - a fault is what the target did not expect
            return Fault(target.name, data, traceback.format_exc())
    return None


def keep(fault: Fault) -> str:
    """Add the input that caused a fault to the corpus, so that later runs begin with it. Return the file name."""
    file = CORPUS / fault.target / f"fault-{sha256(fault.data).hexdigest()[:16]}"
    file.write_bytes(fault.data)
    return str(file)
