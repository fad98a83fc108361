"""The server: its APIs decode requests into submissions and encode verdicts as answers."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")
"""Logger that all servers use. Its name predates the renaming of the package: users have configured it."""
