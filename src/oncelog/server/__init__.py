"""The server: its APIs decode requests to submissions and encode verdicts as answers."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")
"""Logger of all servers. Its name is older than the name of the package, and users configure it."""
