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
"""Load with a clock that advances by 1 ms per reading, so that the request count does not depend on the machine."""
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
"""Load that runs with `--seconds 4` until a file exists, and prints its progress often."""
