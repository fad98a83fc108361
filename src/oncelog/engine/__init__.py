"""The running log: committer, answer cache, tailers, leases, and the `Log` that an application opens."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.engine")
"""Logger of the engine."""
