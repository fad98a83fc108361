"""Handlers of the endpoints for operators: what the server is, health, readiness and metrics."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from aiohttp import web

from oncelog import error_codes
from oncelog.core.values import LaneHead
from oncelog.engine.log import Log
from oncelog.errors import OncelogError
from oncelog.server.chat.endpoints import WEBSOCKET_PATH
from oncelog.server.log_limiter import LogLimiter
from oncelog.server.metrics import Counts, Metrics

METRICS_TIMEOUT_S: Final = 1.0
"""Longest wait for the store before metrics show the positions of the previous request."""
READY_TIMEOUT_S: Final = 5.0
"""Longest wait for the store before the server answers that it is not ready."""


class OperatorHandlers:
    """Answers operators of one server."""

    def __init__(
        self,
        log: Log,
        counts: Counts,
        log_limiter: LogLimiter,
        *,
        get_position: Callable[[], int],
        count_streams: Callable[[], int],
        count_failed_files: Callable[[], Mapping[str, int]],
        has_tenants: Callable[[], bool],
    ) -> None:
        self._log = log
        self._log_limiter = log_limiter
        self._has_tenants = has_tenants
        self._get_position = get_position
        """Returns the newest position of lane 0 that this server has delivered."""
        self._heads: Mapping[int, LaneHead] = {}
        """Heads of the lanes when metrics were last requested."""
        self.is_ready = False
        self.is_closing = False
        self.metrics = Metrics(
            counts,
            queue_items=lambda: log.queue_length,
            positions=self._get_positions,
            evictions=lambda: (log.evictions, log.client_evictions),
            subscribers=count_streams,
            write_gate=log.write_gate,
            failed_files=count_failed_files,
        )
        log.watch_commits(self.metrics.observe_commit)

    async def handle_hello(self, _: web.Request) -> web.Response:
        """Answer what the server is, and where its APIs are."""
        return web.json_response(
            {
                "oncelog": error_codes.PROTOCOL_VERSION,
                "events": "/v1/events",
                "ledger": "/v1/ledger",
                "deltas": "/v1/sync",
                "chat": WEBSOCKET_PATH,
                "health": "/readyz",
            }
        )

    async def handle_healthz(self, _: web.Request) -> web.Response:
        """Answer that the process lives."""
        return web.json_response({"status": "ok"})

    async def handle_readyz(self, _: web.Request) -> web.Response:
        """Answer whether the log can be read, and the server is not about to stop."""
        if not self.is_ready:
            status = "stopping" if self.is_closing else "the store cannot be read"
            return web.json_response({"status": status}, status=503)
        try:
            heads = await asyncio.wait_for(self._log.heads(), READY_TIMEOUT_S)
        except OncelogError as error:
            self._log_limiter.warn("not ready", error=str(error))
            return web.json_response({"status": "the store cannot be read"}, status=503)
        except TimeoutError:
            self._log_limiter.warn("not ready: the store has not answered in time", seconds=READY_TIMEOUT_S)
            return web.json_response({"status": "the store does not answer"}, status=503)
        newest = heads[0].position if 0 in heads else 0
        found = {"status": "ok", "epoch": self._log.epoch, "last_committed_id": newest}
        # Ready also when it is read-only: known writes are answered, and everything can be read.
        read_only = self._log.read_only
        return web.json_response({**found, "read_only": read_only} if read_only else found)

    async def handle_metrics(self, _: web.Request) -> web.Response:
        """Answer with all metrics. If the store does not answer, its values are the previous ones."""
        if not self._has_tenants():
            self.metrics.usage = ()
        else:
            with suppress(OncelogError):
                self.metrics.usage = await self._log.usage()
        with suppress(OncelogError, TimeoutError):
            self._heads = await asyncio.wait_for(self._log.heads(), METRICS_TIMEOUT_S)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": self.metrics.content_type})

    def _get_positions(self) -> dict[int, int]:
        """Return the newest position of each lane."""
        return {**{lane: head.position for lane, head in self._heads.items()}, 0: self._get_position()}
