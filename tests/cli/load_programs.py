"""`oncelog load` with a clock that does not depend on the machine."""

from typing import Final

BY_TICKS: Final = """
from itertools import count
from oncelog.cli import main
from oncelog.cli.load import runner
ticks = count()
runner.perf_counter = lambda: next(ticks) / 1000
runner.GRACE_S = 600
main()
"""
"""Load with a clock that advances by 1 ms per reading, so that the request count does not depend on the machine."""
UNTIL_STOPPED: Final = """
import sys
from itertools import count
from pathlib import Path
from oncelog.cli import main
from oncelog.cli.load import runner
stop, ticks = Path(sys.argv.pop(1)), count()
runner.perf_counter = lambda: stop.exists() * 4 + next(ticks) / 1_000_000
runner.GRACE_S = 600
runner.REPORT_INTERVAL_S = 0.01
main()
"""
"""Load that runs with `--seconds 4` until a file exists, and prints its progress often."""
