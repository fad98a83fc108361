"""The server: its APIs decode requests into submissions and encode verdicts as answers."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")
"""Logger of all servers. It keeps a name from before the package was renamed, because users configure it."""
