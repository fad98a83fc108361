"""The server: its APIs decode requests into submissions and encode verdicts as answers."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")
"""Logger that all servers use. The package was renamed, but the logger was not, because users have configured it."""
