"""The operating system's limit of open files (RLIMIT_NOFILE): each connection needs one."""

import logging
import resource
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")

OTHER_FILES: Final = 200
"""Open files of the server that are not connections: the log, its connections, listening sockets, key files."""


def raise_limit(connections_max: int, grpc_connections_max: int) -> int:
    """Raise the soft limit as far as needed and allowed, and warn if the connections of HTTP do not fit.

    Returns how many of them fit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections_max
    needed = connections_max + OTHER_FILES
    wanted = needed + grpc_connections_max
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        logger.warning(
            "the limit of open files (RLIMIT_NOFILE, ulimit -n) is lower than limits.connections_max needs: raise it, "
            "or lower limits.connections_max",
            extra={"limit": soft, "needed": needed},
        )
    return min(connections_max, max(1, soft - OTHER_FILES))
