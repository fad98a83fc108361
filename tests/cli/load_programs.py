"""`oncelog load` with a clock that does not depend on the machine."""

from typing import Final

BY_TICKS: Final = """
from itertools import count
from types import SimpleNamespace
from oncelog.cli import load, main
ticks = count()
load.time = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)
load.GRACE_S = 600
main()
"""
"""A load whose clock moves on by 1 ms whenever it is read: the number of requests does not depend on the machine."""
UNTIL_STOPPED: Final = """
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from oncelog.cli import load, main
stop, ticks, telling = Path(sys.argv.pop(1)), count(), load._report_progress
load.time = SimpleNamespace(perf_counter=lambda: stop.exists() * 4 + next(ticks) / 1_000_000)
load.GRACE_S = 600
load._report_progress = lambda tally, seconds, _every_s, show: telling(tally, seconds, 0.01, show)
main()
"""
"""A load of `--seconds 4` that goes on until a file is made, and shows its progress often."""
