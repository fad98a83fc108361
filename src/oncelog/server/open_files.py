"""The operating system's limit of open files (RLIMIT_NOFILE): each connection needs one."""

import logging
import resource
from typing import Final

logger: Final = logging.getLogger("oncelog.doors")

RESERVED_FILES: Final = 200
"""Open files of the server that are not connections: the log, its connections, listening sockets, key files."""


GRPC_SHARE: Final = 10
"""With a low limit, gRPC gets at least one of ten open files."""


def raise_limit(connections_max: int, grpc_connections_max: int) -> tuple[int, int]:
    """Raise the soft limit as far as needed and allowed, and warn if the connections of HTTP do not fit.

    Returns how many connections of HTTP and of gRPC fit. Both together fit, so that connections of one port never take
    the files of the other one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections_max, grpc_connections_max
    needed = connections_max + grpc_connections_max + RESERVED_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    available = max(2, soft - RESERVED_FILES)
    of_grpc = min(grpc_connections_max, max(1, available // GRPC_SHARE, available - connections_max))
    of_http = min(connections_max, available - of_grpc)
    if of_http < connections_max:
        logger.warning(
            "the limit of open files (RLIMIT_NOFILE, ulimit -n) is lower than limits.connections_max needs: raise it, "
            "or lower limits.connections_max",
            extra={"limit": soft, "needed": needed},
        )
    return of_http, of_grpc
