"""The running log: committer, answer cache, tailers, leases, and the `Log` class that applications open."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.engine")
"""Logger of the engine."""
