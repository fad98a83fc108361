"""Shared parts of all clients: the durable file, connections, retries and waiting for results."""

import logging
from typing import Final

logger: Final = logging.getLogger("oncelog.client")
"""Logger of the events client, and of the parts that all clients share."""
