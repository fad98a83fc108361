"""The server: one log, its APIs and the operator endpoints, with HTTP and WebSocket on one port.

A server can be started and stopped only once. `stop` refuses new connections, finishes accepted requests, closes all
connections, and closes the log.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from msgspec.structs import replace

from oncelog.background_tasks import BackgroundTasks
from oncelog.core.policy import build_ledger_policy
from oncelog.core.values import RequestedSettings
from oncelog.engine.batch_report import BatchReport
from oncelog.engine.log import Log, open_log
from oncelog.errors import OncelogError
from oncelog.file_modes import parse_file_mode
from oncelog.server import errors, logger
from oncelog.server.apis import Apis
from oncelog.server.audit.endpoints import SERVER_ACTOR, to_record_act
from oncelog.server.auth.credential_files import CredentialEvent, CredentialListener
from oncelog.server.auth.stream_tickets import StreamTickets
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import ConnectionLimiter, to_connection_limits
from oncelog.server.deltas.schemas import TableSchemas, combine_validators
from oncelog.server.endpoint import Endpoint
from oncelog.server.event_validator import load_validator
from oncelog.server.http_server import HttpServer, MetricsListener, format_address
from oncelog.server.latency_report import LatencyRecorder
from oncelog.server.ledger.grpc_service import LedgerGrpcService
from oncelog.server.limits import INSIEME_FRAME_BYTES
from oncelog.server.listener import raise_open_files_limit
from oncelog.server.metrics import Metrics
from oncelog.server.openapi import build_document
from oncelog.server.operator_endpoints import OperatorEndpoints
from oncelog.server.reloader import Reloader
from oncelog.server.request_gate import RequestGate
from oncelog.server.settings import ServerSettings, new_authenticator
from oncelog.server.tls import ServerCertificate
from oncelog.server.trace_export import TraceExport
from oncelog.server.tracing import RequestTracer
from oncelog.storage.address import redact_address
from oncelog.storage.clock import Clock, SystemClock

LISTEN_RETRY_S: Final = 1.0
"""Pause between attempts to read an unreadable log."""
REPLIES_TIMEOUT_S: Final = 3.0
"""Longest wait for replies to be written when the server stops, within `shutdown_ms`. Only clients that do not read
their replies reach this limit."""
LINGER_S: Final = 0.25
"""How long a stopping server keeps idle connections open, to answer a request that is still on its way."""
ACCEPT_GRACE_S: Final = 0.05
"""How long a stopping server still accepts connections, so that it can refuse them with an error response."""
STOP_POLL_S: Final = 0.005
"""Interval at which a stopping server checks whether it still has to wait."""
RENEW_S: Final = 1.0
"""Interval of the periodic checks: connection rights, idle connections, and log summaries."""


class Server:
    """`async with Server(settings) as server:` serves until the block exits."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock | None = None,
        load_settings: Callable[[], ServerSettings] | None = None,
    ) -> None:
        limits = settings.api_limits
        self._clock = clock or SystemClock()
        self._schemas = None if settings.deltas_schemas is None else TableSchemas(settings.deltas_schemas)
        self._trace_export = TraceExport(settings.tracing.endpoint) if settings.tracing.enabled else None
        self.log = _open_log(settings, clock, self._schemas, self._trace_export)
        self._authenticator = new_authenticator(settings, self._clock.wall_ms)
        self._certificate = ServerCertificate(settings)
        tickets = StreamTickets(
            self._clock.wall_ms, limits.ticket_lifetime_ms, settings.tickets.key_file, settings.secret_check
        )
        self._auth_gate = AuthGate(self._authenticator, self._clock, limits, tickets)
        if self.log.tracer is not None:
            self._auth_gate.tracer = RequestTracer(self.log.tracer)
        self._latency: LatencyRecorder | None = None
        if settings.latency_report is not None:
            self._latency = LatencyRecorder(settings.latency_report, self.log.measure_latency())
            self._auth_gate.measures_latency = True
        self.counts = self._auth_gate.counts
        self._limiter = ConnectionLimiter(
            to_connection_limits(limits, is_development=settings.development),
            self._clock.elapsed_ms,
            self.counts,
            self._auth_gate.log_limiter,
        )
        self.apis = Apis(
            self.log,
            settings,
            self._auth_gate,
            on_events_failure=self._on_read_failure,
            on_chat_failure=self._on_chat_failure,
        )
        self._gate = RequestGate(
            settings,
            self._auth_gate,
            self._limiter,
            has_tls=lambda: self._certificate.context is not None,
            count_streams=lambda: self._reader_count,
        )
        self.grpc_service = LedgerGrpcService(
            self.apis.ledger_service,
            settings,
            certificate=lambda: self._certificate.pem,
            find_address=self._gate.to_network,
            open_stream=self._gate.admit_grpc_stream,
        )
        self.metrics = Metrics(
            self.counts,
            self.log,
            connections=self.apis.count_connections,
            unauthenticated=lambda: self._limiter.unauthenticated_count,
            subscribers=lambda: self._reader_count,
            failed_files=self._authenticator.files.count_failed,
        )
        self.log.watch_batches(self._observe_commit if self._latency is not None else self.metrics.observe_commit)
        self._operators = OperatorEndpoints(
            self._auth_gate,
            self.metrics,
            get_position=lambda: self.apis.hub.position,
            get_settings=lambda: self.settings,
            build_document=lambda: build_document(self.list_endpoints(), limits),
        )
        self.metrics_listener = MetricsListener(self._operators.metrics_port_handlers, self._limiter)
        fast_routes = self.apis.ledger.list_fast_routes()
        self._http = HttpServer(settings, self._gate, self._certificate, fast_routes)
        self._tasks = BackgroundTasks()
        loaders = [self._authenticator.reload, self._certificate.load, tickets.load]
        if self._schemas is not None:
            loaders.append(self._schemas.reload)
        self._reloader = Reloader(
            settings,
            load_settings,
            self.apis,
            self._authenticator,
            loaders,
            self._tasks,
            run_checks=self.run_checks,
        )
        self.urls: list[str] = []
        """URLs that the server listens on."""

    @property
    def settings(self) -> ServerSettings:
        """The current settings. `reload` changes some of them."""
        return self._reloader.settings

    @property
    def _reader_count(self) -> int:
        """How many WebSockets and streams are open."""
        return len(self.apis) + len(self.grpc_service)

    @property
    def is_closing(self) -> bool:
        """Whether the server is stopping."""
        return self._auth_gate.is_closing

    @property
    def connections_closed(self) -> int:
        """How many connections have been closed since the start."""
        return self._limiter.closed_count

    @property
    def grpc_address(self) -> str:
        """The `host:port` of the ledger over gRPC, or "" if it is not served."""
        port = self.grpc_service.port
        return format_address((self.settings.host, port)) if port else ""

    # --- start and stop

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the log and start listening. Raises OncelogError if either fails."""
        self.subscribe_credentials(self._record_credential)
        self._reloader.load_files()
        # Checked before the log is opened, so that a failed start does not create a log.
        if self._latency is not None:
            self._latency.check()
        for address in self.settings.list_addresses():
            await address.check()
        async with AsyncExitStack() as opened:
            if self._trace_export is not None:
                opened.push_async_callback(self._trace_export.close)
            await opened.enter_async_context(self.log)
            self.apis.hub.position = await self.log.listen(self.apis.hub)
            self._raise_open_files_limit()
            opened.push_async_callback(self._http.close)
            await self._http.start(self.list_endpoints())
            self.urls = self._http.urls
            opened.push_async_callback(self.metrics_listener.close)
            if self.settings.metrics_address is not None:
                await self.metrics_listener.start(self.settings.metrics_address)
            if self.settings.grpc:
                await self.grpc_service.start()
            opened.pop_all()
        if self._latency is not None:
            self._latency.start()
            self._tasks.start(self._latency.run())
        self._tasks.start(self._check_periodically())
        self._reloader.start()
        self._operators.is_ready = True
        self._log_start()

    def _log_start(self) -> None:
        log_fields = {"urls": " ".join(self.urls), "store": redact_address(self.settings.store)}
        logger.info(
            "listening",
            extra={**log_fields, "grpc": self.grpc_address} if self.settings.grpc else log_fields,
        )
        if self._authenticator.is_open:
            logger.warning("development mode: every caller on this machine has all rights, without a credential")
        if self.settings.api_limits.frame_bytes_max < INSIEME_FRAME_BYTES:
            logger.warning(
                "limits.frame_bytes_max is %d: clients of the npm package insieme send up to %d bytes and wait "
                "forever if a frame is too large; raise the limit, or lower submitBatch.maxBytes in these clients",
                self.settings.api_limits.frame_bytes_max,
                INSIEME_FRAME_BYTES,
            )

    def _raise_open_files_limit(self) -> None:
        grpc, limits = self.grpc_service, self._limiter.limits
        grpc_connections_max = grpc.connections_max if self.settings.grpc else 0
        total_max, grpc.connections_max = raise_open_files_limit(limits.total_max, grpc_connections_max)
        self._limiter.limits = replace(limits, total_max=total_max)

    async def stop(self) -> None:
        """Refuse new connections, finish accepted requests, close all connections, and close the log."""
        if self._http.runner is None or self.is_closing:
            return
        self._operators.is_ready = False
        self._auth_gate.is_closing = True
        self._http.fast_path.start_shutdown()
        shutdown_s = self.settings.shutdown_ms / 1000
        linger_end_s = asyncio.get_running_loop().time() + min(LINGER_S, shutdown_s)
        logger.info("stopping", extra={"connections": self._reader_count, "queued": self.log.queue_length})
        # The kernel may hold connections that the event loop has not accepted yet. Closing the listener resets them.
        await asyncio.sleep(min(ACCEPT_GRACE_S, shutdown_s))
        self._http.close_listener()
        grpc_stop = asyncio.ensure_future(self.grpc_service.stop(shutdown_s))
        self._tasks.cancel()
        try:
            async with asyncio.timeout(shutdown_s):
                await self._wait_for_replies()
        except TimeoutError:
            logger.warning(
                "shutdown_ms passed before all accepted requests were answered",
                extra={"queued": self.log.queue_length},
            )
        self.apis.close_all()
        await self._linger(linger_end_s)
        await self._http.close()
        await self.metrics_listener.close()
        await grpc_stop
        try:
            await self.log.close()
        finally:
            if self._latency is not None:
                self._latency.stop()
        if self._trace_export is not None:
            await self._trace_export.close()
        logger.info("stopped")

    async def _wait_for_replies(self) -> None:
        """Wait until no request is in flight and all answers are written, except those to clients that do not read."""
        while self._http.is_busy:  # noqa: ASYNC110 - once
            await asyncio.sleep(STOP_POLL_S)
        await self.log.wait_idle()
        await asyncio.sleep(0)  # lets the last commit's answers reach their connections
        replied = asyncio.ensure_future(self.apis.wait_for_replies())
        await asyncio.wait([replied], timeout=REPLIES_TIMEOUT_S)

    async def _linger(self, until_s: float) -> None:
        """Wait until all connections are closed, but no longer than `until_s`. Meanwhile, new requests are refused."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s and not self._limiter.are_all_closed():  # noqa: ASYNC110 - once
            await asyncio.sleep(STOP_POLL_S)

    def _observe_commit(self, batch: BatchReport) -> None:
        self.metrics.observe_commit(batch)
        if self._latency is not None:
            self._latency.observe_commit(batch)

    # --- an unreadable log

    def _on_read_failure(self, error: Exception) -> None:
        """Close all Events API connections because the log is unreadable, and retry reading it in the background."""
        logger.error("the log cannot be read; all connections are closed: %s", error)
        self._set_ready(is_ready=False)
        self.apis.event_sessions.fail_all(error)
        if not self.is_closing:
            self._tasks.start(self._listen_again())

    def _on_chat_failure(self, error: Exception) -> None:
        """Close all Chat API connections. The hub reads its lanes again when the next client connects."""
        logger.error("chats cannot be read; all Chat API connections are closed: %s", error)
        self.apis.chat_sessions.fail_all(error)

    def _set_ready(self, *, is_ready: bool) -> None:
        self._operators.is_ready = is_ready
        if not self.is_closing:
            self._tasks.start(self.grpc_service.set_ready(is_ready=is_ready))

    async def _listen_again(self) -> None:
        level = logging.WARNING
        while True:
            try:
                self.apis.hub.position = await self.log.listen(self.apis.hub)
            except OncelogError as error:
                logger.log(level, "the log still cannot be read: %s", error)
                level = logging.DEBUG  # one warning per outage
                await asyncio.sleep(LISTEN_RETRY_S)
            else:
                self._set_ready(is_ready=True)
                logger.warning("the log can be read again")
                return

    # --- endpoints, settings and periodic checks

    def list_endpoints(self) -> list[Endpoint]:
        """Return the HTTP operations that this server offers."""
        return [*self._operators.list_endpoints(), *self.apis.list_endpoints()]

    def reload(self) -> None:
        """Reload the settings, certificate, schemas and credential files, and recheck open connections.

        If a part cannot be loaded, the failure is logged and its previous content remains in use.
        """
        self._reloader.reload()

    def subscribe_credentials(self, listener: CredentialListener) -> None:
        """Call the listener whenever this server notices a key that was revoked, was removed or has expired."""
        self._authenticator.subscribe(listener)

    def _record_credential(self, event: CredentialEvent) -> None:
        """Record a key's revocation or removal.

        Every server that shares the key file submits the same act, and the log keeps one record of it.
        """
        act = to_record_act(event)
        if act is not None:
            self.log.record(act)

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self.run_checks()

    def run_checks(self) -> None:
        """Run the periodic checks now. A check that fails does not stop the others."""
        checks: list[Callable[[], object]] = [
            *(readers.renew for readers in self.apis.readers),
            errors.store_failures.poll,
            self._auth_gate.log_limiter.flush,
            self._limiter.close_expired,
            self.metrics_listener.close_expired,
            self._http.close_idle,
            self.grpc_service.renew,
            self.grpc_service.cancel_overdue,
        ]
        for check in checks:
            try:
                check()
            except Exception:
                logger.exception("a periodic check failed")


def _open_log(
    settings: ServerSettings, clock: Clock | None, schemas: TableSchemas | None, trace_export: TraceExport | None
) -> Log:
    """Create the log of a server, without connecting to its store."""
    ttl_ms = settings.ledger.ttl_ms
    log = open_log(
        settings.store,
        policies=() if ttl_ms is None else [build_ledger_policy(ttl_ms)],
        settings=RequestedSettings(eviction_interval=settings.ledger.eviction_interval),
        validate=combine_validators(
            None if settings.validate is None else load_validator(settings.validate),
            None if schemas is None else schemas.validate,
        ),
        limits=settings.engine_limits,
        clock=clock,
        room=settings.disk,
        tenants=settings.tenants,
        actor=SERVER_ACTOR,
        file_mode=parse_file_mode(settings.file_mode),
        tracing=False if trace_export is None else trace_export.provider,
    )
    if settings.read_only:
        log.set_read_only(actor=SERVER_ACTOR)
    return log
