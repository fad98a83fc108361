"""The server: one log, its APIs, and what operators need. HTTP and WebSocket on one port.

Started and stopped once. `stop` takes no more, finishes what was accepted, tells everybody, and lets the log go.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Final

from aiohttp import StreamReader, web
from msgspec.structs import replace

from oncelog import error_codes
from oncelog.core.policy import build_ledger_policy
from oncelog.core.tenants import Tenant
from oncelog.core.values import LaneHead, RequestedSettings
from oncelog.engine.log import open_log
from oncelog.errors import OncelogError, SettingsError
from oncelog.file_modes import parse_file_mode
from oncelog.server import errors
from oncelog.server.audit.endpoints import SERVER_ACTOR, AuditEndpoints, to_record_act
from oncelog.server.auth.credential_events import CredentialEvent, CredentialListener
from oncelog.server.auth_gate import AuthGate
from oncelog.server.cached_document import CachedDocument
from oncelog.server.chat.ack_queue import AckQueue
from oncelog.server.chat.codec import PROBLEM_DIALECT as CHAT_PROBLEMS
from oncelog.server.chat.endpoints import WEBSOCKET_PATH, ChatEndpoints
from oncelog.server.chat.hub import ChatHub
from oncelog.server.chat.service import ChatService
from oncelog.server.chat.session import ChatSession
from oncelog.server.connection_limiter import (
    Caller,
    Connection,
    ConnectionLimiter,
    CountedStream,
    ForwardedRequest,
    to_connection_limits,
)
from oncelog.server.deltas.codec import PROBLEM_DIALECT as DELTAS_PROBLEMS
from oncelog.server.deltas.endpoints import DeltasEndpoints
from oncelog.server.deltas.schemas import TableSchemas, combine_validators
from oncelog.server.deltas.service import DeltasService
from oncelog.server.endpoint import Endpoint, EndpointRouter
from oncelog.server.errors import ApiError, shutdown_error
from oncelog.server.event_validator import load_validator
from oncelog.server.events.dialect import NativeDialect
from oncelog.server.events.endpoints import EventsEndpoints
from oncelog.server.events.hub import EventsHub
from oncelog.server.events.insieme_dialect import InsiemeDialect
from oncelog.server.events.service import EventsService
from oncelog.server.events.session import EventsSession
from oncelog.server.http_fast_path import HttpFastPath
from oncelog.server.http_headers import add_response_headers
from oncelog.server.http_log import new_http_logger
from oncelog.server.http_protocol import HttpProtocol
from oncelog.server.http_requests import check_single_authorization
from oncelog.server.ledger.codec import PROBLEM_DIALECT as LEDGER_PROBLEMS
from oncelog.server.ledger.endpoints import LedgerEndpoints
from oncelog.server.ledger.grpc_service import LedgerGrpcService
from oncelog.server.ledger.service import LedgerService
from oncelog.server.limits import INSIEME_FRAME_BYTES, REQUESTS_BURST_SECONDS
from oncelog.server.listener import Listener, bind
from oncelog.server.log_limiter import LogLimiter
from oncelog.server.metrics import Counts, Metrics
from oncelog.server.metrics_listener import MetricsListener
from oncelog.server.open_files import raise_limit
from oncelog.server.openapi import build_document
from oncelog.server.operator_endpoints import METRICS_PATH, OperatorHandler, list_endpoints
from oncelog.server.origins import (
    find_client_address,
    get_scheme,
    is_allowed_origin,
    is_loopback_host,
    is_trusted,
    normalize_origin,
    to_client_network,
)
from oncelog.server.preauth_limiter import PreauthLimiter
from oncelog.server.problems import DEFAULT_DIALECT, ProblemDialect, to_error_response
from oncelog.server.rate_limiter import RateLimiter
from oncelog.server.settings import ServerSettings, new_authenticator
from oncelog.server.tls import ServerCertificate
from oncelog.server.web_chat.endpoints import WebChat
from oncelog.server.websocket import WebSocketSessions
from oncelog.storage.address import redact_address
from oncelog.storage.clock import Clock, SystemClock

logger: Final = logging.getLogger("oncelog.doors")

KEEP_ALIVE_S: Final = 75.0
"""How long a connection without a request is kept for the next one."""
METRICS_TIMEOUT_S: Final = 1.0
"""Longest wait for the store before metrics show the positions of the previous request."""
READY_TIMEOUT_S: Final = 5.0
"""How long a store may take before a server says that it is not ready: whoever asks waits for seconds, not for ever."""
CREDENTIALS_POLL_S: Final = 1.0
"""How often credential files are checked for changes."""
RENEW_S: Final = 1.0
"""How often the rights of those who are connected are looked at."""
RATE_KEYS_MAX: Final = 100_000
CACHED_CHECKS_MAX: Final = 256
"""Cached results for addresses and headers."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long one who does not read may take to be closed when the server stops."""
REPLIES_TIMEOUT_S: Final = 3.0
"""Longest wait for replies when the server stops, within `shutdown_ms`. Only a client that does not read needs it."""
LINGER_S: Final = 0.25
"""How long connections without a request are kept when the server stops: one may be on its way, and gets an answer."""
ACCEPT_GRACE_S: Final = 0.05
"""How long a server that stops still takes connections. Who comes is told, as all are."""
STOP_POLL_S: Final = 0.005
"""How often a server that stops looks whether it still has to wait."""
LINE_BYTES_MAX: Final = 64 * 1024
"""Longest request line. A relationship of three names of 1,024 characters, percent-encoded, needs 36 KiB of it, and the
token of its page 16 KiB."""
HEADER_BYTES_MAX: Final = 32 * 1024
"""Longest header."""
PREFLIGHT_HEADERS: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID",
    "Access-Control-Max-Age": "600",
}
"""What a browser is told that asks before it sends a request of another origin (CORS)."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """`async with Server(settings) as server:` serves until the block is left."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock | None = None,
        load_settings: Callable[[], ServerSettings] | None = None,
    ) -> None:
        self.settings, self._load_settings = settings, load_settings
        self._clock = clock or SystemClock()
        self._schemas = None if settings.deltas_schemas is None else TableSchemas(settings.deltas_schemas)
        ttl_ms = settings.ledger.ttl_ms
        self.log = open_log(
            settings.store,
            policies=() if ttl_ms is None else [build_ledger_policy(ttl_ms)],
            settings=RequestedSettings(eviction_interval=settings.ledger.eviction_interval),
            validate=combine_validators(
                None if settings.validate is None else load_validator(settings.validate),
                None if self._schemas is None else self._schemas.validate,
            ),
            limits=settings.engine_limits,
            clock=clock,
            room=settings.disk.limits,
            tenants=settings.tenants,
            actor=SERVER_ACTOR,
            file_mode=parse_file_mode(settings.file_mode),
        )
        if settings.read_only:
            self.log.set_read_only(actor=SERVER_ACTOR)
        self._authenticator = new_authenticator(settings, self._clock.wall_ms)
        self.counts = Counts()
        self._log_limiter = LogLimiter(self._clock.elapsed_ms)
        self._limiter = ConnectionLimiter(
            to_connection_limits(settings.api_limits, is_development=settings.development),
            self._clock.elapsed_ms,
            self.counts,
            self._log_limiter,
        )
        self._auth_gate = self._new_auth_gate()
        self._events_service = self._new_events_service()
        self.hub = self._events_service.hub
        self.event_sessions = WebSocketSessions(
            self._auth_gate,
            settings.api_limits,
            self.counts,
            partial(EventsSession, self._events_service),
            self._log_limiter,
        )
        self.events = EventsEndpoints(self._events_service, self.event_sessions.serve)
        self._trusted_networks = settings.proxy_networks
        self._find_refusal_cached = lru_cache(maxsize=CACHED_CHECKS_MAX)(self._find_refusal)
        self._to_network_cached = lru_cache(maxsize=CACHED_CHECKS_MAX)(self._to_network)
        ledger_service = LedgerService(self.log, self._auth_gate, limits=settings.api_limits, counts=self.counts)
        self.ledger = LedgerEndpoints(ledger_service)
        self.deltas = DeltasEndpoints(
            DeltasService(self.log, self._auth_gate, limits=settings.api_limits, counts=self.counts)
        )
        self._chat_service = ChatService(self.log, self._auth_gate, limits=settings.api_limits, counts=self.counts)
        self._chat_hub = ChatHub(self.log, settings.api_limits, self.counts, self._on_chat_failure)
        new_session = partial(ChatSession, self._chat_service, self._chat_hub, AckQueue(self.log))
        self.chat_sessions = WebSocketSessions(
            self._auth_gate, settings.api_limits, self.counts, new_session, self._log_limiter
        )
        self.chat = ChatEndpoints(self._chat_service, self.chat_sessions.serve)
        self.grpc_service = self._new_grpc_service(ledger_service) if settings.grpc else None
        self.metrics = Metrics(
            self.counts,
            queue_items=lambda: self.log.queue_length,
            positions=self._get_positions,
            evictions=lambda: (self.log.evictions, self.log.client_evictions),
            subscribers=lambda: self._reader_count,
            write_gate=self.log.write_gate,
            failed_files=self._authenticator.files.count_failed,
        )
        self.log.watch_commits(self.metrics.observe_commit)
        self.metrics_listener = MetricsListener(
            {"/metrics": self._serve_metrics, "/healthz": self._handle_healthz, "/readyz": self._handle_readyz},
            timeout_ms=settings.api_limits.connect_timeout_ms,
            now_ms=self._clock.elapsed_ms,
            counts=self.counts,
            log_limiter=self._log_limiter,
        )
        self._allowed_origins = settings.origin_set
        self._certificate = ServerCertificate(settings)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._fast_path = HttpFastPath(
            self.ledger.list_fast_routes(),
            check_host=self._check_host_and_origin,
            count_failure=self._count_failure,
            find_dialect=_find_dialect,
            body_bytes_max=settings.api_limits.frame_bytes_max,
            varies_by_origin=bool(self._allowed_origins),
        )
        self._router = EndpointRouter(
            self._auth_gate, self.counts, find_caller=self._get_caller, admit_stream=self._admit_stream
        )
        self._check_task: asyncio.Task[None] | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._listen_task: asyncio.Task[None] | None = None
        self._ready_task: asyncio.Task[None] | None = None
        self._tenants_task: asyncio.Task[None] | None = None
        self._wanted_tenants: tuple[Tenant, ...] | None = None
        self._is_ready = False
        self._heads: Mapping[int, LaneHead] = {}
        """As the store had them when metrics were last asked for."""
        self._open_requests: dict[int, StreamReader] = {}
        """Bodies of the requests that have no answer yet, but for those that stay."""
        self.urls: list[str] = []
        """Where it listens."""

    def _new_events_service(self) -> EventsService:
        shows_actor = self.settings.show_actors
        first = NativeDialect(shows_actor=shows_actor)
        service = EventsService(
            self.log,
            EventsHub(self._clock.wall_ms, self.counts, self._on_read_failure, first),
            self._auth_gate,
            limits=self.settings.api_limits,
            counts=self.counts,
            native=first,
            insieme=InsiemeDialect(None, shows_actor=shows_actor),
        )
        service.set_tenants(self.settings.tenants)
        return service

    def _new_grpc_service(self, service: LedgerService) -> LedgerGrpcService:
        return LedgerGrpcService(
            service,
            host=self.settings.host,
            port=self.settings.ledger_port,
            with_reflection=self.settings.openapi,
            certificate=lambda: self._certificate.pem,
            find_address=self._to_network_cached,
            open_stream=self._open_grpc_stream,
        )

    def _new_auth_gate(self) -> AuthGate:
        per_minute = self.settings.api_limits.auth_failures_per_minute_max
        auth_failures = RateLimiter(per_minute / 60, max(1, per_minute), RATE_KEYS_MAX, self._clock.elapsed_ms)
        per_second = self.settings.api_limits.requests_per_second_max
        requests = RateLimiter(
            per_second, max(1, REQUESTS_BURST_SECONDS * per_second), RATE_KEYS_MAX, self._clock.elapsed_ms
        )
        return AuthGate(self._authenticator, self.counts, self._clock, auth_failures, self._log_limiter, requests)

    @property
    def _reader_count(self) -> int:
        """Who is connected to stay."""
        streams = len(self.events.streams) + len(self.ledger.streams) + len(self.deltas)
        return len(self.event_sessions) + len(self.chat_sessions) + streams + len(self.grpc_service or ())

    @property
    def is_closing(self) -> bool:
        """Whether the server is being stopped."""
        return self._router.is_closing

    @property
    def connections_closed(self) -> int:
        """Connections that were closed since the start."""
        return self._limiter.closed_count

    @property
    def grpc_address(self) -> str:
        """Where the ledger is served over gRPC: `host:port`, or nothing."""
        return "" if self.grpc_service is None else _format_address((self.settings.host, self.grpc_service.port))

    # --- from start to stop

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the log and listens. Raises OncelogError for what is wrong with either."""
        self.subscribe_credentials(self._record_credential)
        self._authenticator.reload()
        if self._schemas is not None:
            self._schemas.reload()
        self._certificate.load()
        await self.log.__aenter__()
        try:
            self.hub.start(await self.log.listen(self.hub))
            self._raise_open_files_limit()
            await self._listen()
            if self.settings.metrics and self.settings.metrics_port is not None:
                await self.metrics_listener.start(self.settings.metrics_host, self.settings.metrics_port)
            if self.grpc_service is not None:
                await self.grpc_service.start()
        except BaseException:
            await self._close_listener()
            await self.log.close()
            raise
        self._check_task = asyncio.get_running_loop().create_task(self._run_checks_periodically())
        if self._authenticator.files:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll_credentials())
        self._is_ready = True
        log_fields = {"urls": " ".join(self.urls), "store": redact_address(self.settings.store)}
        logger.info(
            "listening",
            extra={**log_fields, "grpc": self.grpc_address} if self.grpc_service is not None else log_fields,
        )
        if self._authenticator.is_open:
            logger.warning("development mode: everybody on this machine may do everything, without a token")
        if self.settings.api_limits.frame_bytes_max < INSIEME_FRAME_BYTES:
            logger.warning(
                "limits.frame_bytes_max is %d: clients of the npm package insieme send up to %d bytes, and wait "
                "forever if a frame is too large; raise the limit, or lower submitBatch.maxBytes of these clients",
                self.settings.api_limits.frame_bytes_max,
                INSIEME_FRAME_BYTES,
            )

    def _raise_open_files_limit(self) -> None:
        grpc_connections_max = self.settings.api_limits.connections_max if self.grpc_service is not None else 0
        limits = self._limiter.limits
        total_max, grpc_connections_max = raise_limit(limits.total_max, grpc_connections_max)
        self._limiter.limits = replace(limits, total_max=total_max)
        if self.grpc_service is not None:
            self.grpc_service.connections_max = grpc_connections_max

    async def stop(self) -> None:
        """Takes no more connections, finishes what was accepted, tells everybody, exits."""
        if self._runner is None:
            return
        self._is_ready = False
        self._events_service.is_closing = self.deltas.is_closing = self._chat_service.is_closing = True
        self._router.is_closing = True
        self._fast_path.start_shutdown()
        linger_end_s = asyncio.get_running_loop().time() + min(LINGER_S, self.settings.shutdown_ms / 1000)
        runner, self._runner = self._runner, None
        logger.info("stopping", extra={"connections": self._reader_count, "queued": self.log.queue_length})
        await self._accept_last()
        calls = (
            None
            if self.grpc_service is None
            else asyncio.ensure_future(self.grpc_service.stop(self.settings.shutdown_ms / 1000))
        )
        for task in (self._check_task, self._poll_task, self._listen_task, self._tenants_task):
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(self.settings.shutdown_ms / 1000):
                await self._wait_for_replies()
        except TimeoutError:
            logger.warning("not all that was accepted has its answer yet", extra={"queued": self.log.queue_length})
        self.event_sessions.close_all()
        self.chat_sessions.close_all()
        self.events.streams.close_all()
        self.ledger.streams.close_all()
        self.deltas.close_all()
        await self._linger(linger_end_s)
        self._fast_path.close_all()
        await runner.cleanup()
        await self.metrics_listener.stop()
        if calls is not None:
            await calls
        await self.log.close()
        logger.info("stopped")

    async def _accept_last(self) -> None:
        """Takes no more connections, but for those that the system has taken for us: it would cut them off."""
        if self._listener is not None:
            # The loop comes to know of them by and by, some in each of its turns.
            await asyncio.sleep(min(ACCEPT_GRACE_S, self.settings.shutdown_ms / 1000))
            self._listener.close()

    async def _close_listener(self) -> None:
        """Of a server that could not be started as a whole."""
        await self.metrics_listener.stop()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _wait_for_replies(self) -> None:
        """Returns when nothing is in flight and what was answered is on its way, but for those who do not read."""
        # A request whose body has not come as a whole may never do so: only those that have are waited for.
        while self._fast_path.is_busy or any(body.is_eof() for body in self._open_requests.values()):  # noqa: ASYNC110 - once
            await asyncio.sleep(STOP_POLL_S)
        await self.log.wait_idle()
        await asyncio.sleep(0)  # the answers of the last commit
        replied = asyncio.gather(self.event_sessions.wait_for_replies(), self.chat_sessions.wait_for_replies())
        await asyncio.wait([replied], timeout=REPLIES_TIMEOUT_S)

    async def _linger(self, until_s: float) -> None:
        """Returns when nobody is connected, or then. Who asks meanwhile is told, and that the connection ends."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s and not self._limiter.are_all_closed():  # noqa: ASYNC110 - once
            await asyncio.sleep(STOP_POLL_S)

    def _on_read_failure(self, error: Exception) -> None:
        """The log could not be read for long. Everybody is let go; whoever comes back finds it as it is then."""
        logger.error("the log cannot be read; all connections are closed: %s", error)
        self._set_ready(is_ready=False)
        self.event_sessions.fail_all(error)
        if not self._events_service.is_closing:
            self._listen_task = asyncio.get_running_loop().create_task(self._listen_again())

    def _on_chat_failure(self, error: Exception) -> None:
        """The same of the lanes of chats, which are listened to again when the next one connects."""
        logger.error("chats cannot be followed; their connections are closed: %s", error)
        self.chat_sessions.fail_all(error)

    def _set_ready(self, *, is_ready: bool) -> None:
        self._is_ready = is_ready
        if self.grpc_service is not None and not self._events_service.is_closing:
            self._ready_task = asyncio.get_running_loop().create_task(self.grpc_service.set_ready(is_ready=is_ready))

    async def _listen_again(self) -> None:
        level = logging.WARNING
        while True:
            try:
                self.hub.start(await self.log.listen(self.hub))
            except OncelogError as error:
                logger.log(level, "the log still cannot be read: %s", error)
                level = logging.DEBUG  # logged once in an outage
                await asyncio.sleep(RENEW_S)
            else:
                self._set_ready(is_ready=True)
                logger.warning("the log can be read again")
                return

    async def _listen(self) -> None:
        app = web.Application(
            client_max_size=self.settings.api_limits.frame_bytes_max, middlewares=[self._handle_request]
        )
        self._router.add_routes(app, self.list_endpoints())
        if self.settings.development:
            WebChat().add_routes(app)
        app.on_response_prepare.append(self._add_cors_headers)
        app.on_response_prepare.append(add_response_headers)
        # aiohttp waits for it twice. Accepted requests have been waited for before.
        self._runner = web.AppRunner(app, shutdown_timeout=min(CLOSE_TIMEOUT_S, self.settings.shutdown_ms / 1000))
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - it has been set up
        serve = partial(
            HttpProtocol,
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=new_http_logger(self._log_limiter),
            keepalive_timeout=KEEP_ALIVE_S,
            # Otherwise a token of the length that we allow would not come through.
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=LINE_BYTES_MAX,
            # `read_body` decompresses, up to its limit; aiohttp would do it for unauthenticated callers too.
            auto_decompress=False,
        )
        try:
            sockets = await bind(self.settings.host, self.settings.port)
        except OSError as error:
            place = f"{self.settings.host}:{self.settings.port}"
            raise SettingsError(f"cannot listen on {place}: {error.strerror or error}") from error
        self._listener = Listener(
            sockets,
            self._limiter,
            partial(self._new_protocol, partial(self._fast_path.new_protocol, serve)),
            find_address=self._find_peer_address,
            tls=self._certificate.context,
            log_limiter=self._log_limiter,
            refusal_counts=self.counts.connections_refused,
        )
        self._listener.start()
        scheme = "http" if self._certificate.context is None else "https"
        self.urls = [f"{scheme}://{_format_address(socket.getsockname())}" for socket in self._listener.sockets]

    def _new_protocol(
        self, serve: Callable[[PreauthLimiter], asyncio.Protocol], connection: Connection
    ) -> PreauthLimiter:
        return PreauthLimiter(connection, serve, partial(self._limiter.count_refusal, "too_large", connection.address))

    def _find_peer_address(self, host: str | None) -> tuple[str, bool]:
        """Return the address that a peer is counted by, and whether it is a trusted proxy."""
        return self._to_network_cached(host, None), is_trusted(host, self._trusted_networks)

    def list_endpoints(self) -> list[Endpoint]:
        """Return the HTTP operations that this server offers."""
        handlers: dict[str, OperatorHandler] = {
            "/": self._handle_hello,
            "/healthz": self._handle_healthz,
            "/readyz": self._handle_readyz,
        }
        if self.settings.metrics and self.settings.metrics_port is None:
            handlers[METRICS_PATH] = self._serve_metrics
        if self.settings.openapi:
            document = CachedDocument(lambda: build_document(self.list_endpoints(), self.settings.api_limits))
            handlers["/openapi.json"] = document.serve
        return [
            *list_endpoints(handlers, has_public_metrics=self.settings.metrics_public),
            *self.events.list_endpoints(),
            *AuditEndpoints(self.log).list_endpoints(),
            *self.ledger.list_endpoints(),
            *self.deltas.list_endpoints(),
            *self.chat.list_endpoints(),
        ]

    def reload(self) -> None:
        """Reload settings, certificate, schemas and credential files, each by itself, and check open connections.

        Parts that cannot be loaded are logged and keep their previous content.
        """
        parts = [self._certificate.load, self._authenticator.reload, self._reload_settings]
        if self._schemas is not None:
            parts.append(self._schemas.reload)
        failures = 0
        for load in parts:
            try:
                load()
            except OncelogError as error:
                failures += 1
                logger.error("not reloaded: %s", error)  # noqa: TRY400 - a stack trace says nothing more
        self._run_checks()
        if not failures:
            logger.info("keys, grants and certificates were reloaded")

    def _reload_settings(self) -> None:
        self._apply_settings(self.settings if self._load_settings is None else self._load_settings())

    def _apply_settings(self, new: ServerSettings) -> None:
        """The settings that need no restart: the operator's switch, how full the disk may be, quotas."""
        guard = self.log.write_gate
        guard.set_read_only(is_read_only=new.read_only, actor=SERVER_ACTOR)
        if new.disk != self.settings.disk:
            guard.set_limits(new.disk.limits)
        self._wanted_tenants = new.tenants
        if self._tenants_task is None:
            self._tenants_task = asyncio.get_running_loop().create_task(self._set_tenants())
        self.settings = replace(self.settings, read_only=new.read_only, disk=new.disk)

    async def _set_tenants(self) -> None:
        """Until they are those that were wanted last: to count takes long, and others may be wanted meanwhile."""
        try:
            # Also where they are the ones that this server has had: another one may have written others meanwhile.
            while (wanted := self._wanted_tenants) is not None:
                self._wanted_tenants = None
                is_changed = await self.log.set_tenants(wanted, SERVER_ACTOR)
                self._events_service.set_tenants(wanted)
                self.settings = replace(self.settings, tenants=wanted)
                if is_changed:
                    logger.info("quotas were reloaded", extra={"tenants": len(wanted)})
        except OncelogError as error:
            logger.error("the quotas stay as they were: %s", error)  # noqa: TRY400 - as above
        finally:
            self._tenants_task = None

    async def _poll_credentials(self) -> None:
        """Reload credential files that have changed, and end the connections of credentials that have gone."""
        credential_files = self._authenticator.files
        while True:
            await asyncio.sleep(CREDENTIALS_POLL_S)
            try:
                changes = await asyncio.to_thread(credential_files.load_changes)
                has_changed, failures = credential_files.apply(changes)
                for failure in failures:
                    logger.error("not reloaded; %s", failure)
                self._authenticator.report_expired()
                if has_changed:
                    self._run_checks()
            except Exception:
                logger.exception("the credential files could not be polled")

    def _record_credential(self, event: CredentialEvent) -> None:
        """Record the end of a key. Every server of the file does so, and the log keeps one record."""
        act = to_record_act(event)
        if act is not None:
            self.log.record(act)

    def subscribe_credentials(self, listener: CredentialListener) -> None:
        """Call the listener when this server notices that a key was revoked or removed, or has expired."""
        self._authenticator.subscribe(listener)

    async def _run_checks_periodically(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._run_checks()

    def _run_checks(self) -> None:
        """Run the periodic checks, about once a second. The failure of one of them does not affect the others."""
        parts: list[Callable[[], object]] = [
            self.event_sessions.renew,
            self.chat_sessions.renew,
            self.events.streams.renew,
            self.ledger.streams.renew,
            self.deltas.streams.renew,
            errors.store_failures.poll,
            self._log_limiter.flush,
            self._limiter.close_expired,
            self.metrics_listener.close_expired,
            partial(self._fast_path.close_idle, asyncio.get_running_loop().time() - KEEP_ALIVE_S),
        ]
        if self.grpc_service is not None:
            parts.append(self.grpc_service.renew)
        for part in parts:
            try:
                part()
            except Exception:
                logger.exception("a periodic check failed")

    # --- every request

    @web.middleware
    async def _handle_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whom we do not serve at all, how errors look, and which answer is the last one of its connection."""
        connection = self._limiter.find_connection(request.transport)
        if connection is not None:
            connection.start_request()
        self._open_requests[id(request)] = request.content
        try:
            response = await self._respond(request, handler)
        finally:
            self._open_requests.pop(id(request), None)
            if connection is not None:
                connection.finish_request(request.content)
        if self._events_service.is_closing and not response.prepared:
            response.force_close()
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        dialect = _find_dialect(request.path)
        try:
            self._check_request(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=PREFLIGHT_HEADERS)
            return await handler(request)
        except ApiError as error:
            self._count_failure(request.path, error)
            return to_error_response(error, dialect)
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return to_error_response(self._to_api_error(error), dialect, allowed)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            logger.exception("a request failed", extra={"method": request.method, "path": request.path})
            return to_error_response(_FAILURE, dialect)

    def _to_api_error(self, error: web.HTTPException) -> ApiError:
        """Return the error for a request that aiohttp refuses."""
        match error:
            case web.HTTPRequestEntityTooLarge():
                size = self.settings.api_limits.frame_bytes_max
                message = f"body: must have at most {size} bytes"
                return ApiError(error_codes.BAD_REQUEST, message, field="body", limit=size, status=413)
            case web.HTTPNotFound():
                return ApiError(error_codes.UNKNOWN_PATH, "the server has no such path; `GET /` names its APIs")
            case web.HTTPMethodNotAllowed():
                message = f"the path takes {', '.join(sorted(error.allowed_methods))} only"
                return ApiError(error_codes.METHOD_NOT_ALLOWED, message)
            case _:
                return ApiError(error_codes.BAD_REQUEST, error.reason, status=error.status)

    def _count_failure(self, path: str, error: ApiError) -> None:
        self.counts.requests[_find_api_name(path), "http", error.code] += 1

    def _check_request(self, request: web.Request) -> None:
        headers = request.headers
        check_single_authorization(headers.getall("Authorization", ()))
        forwarded = ",".join(headers.getall("X-Forwarded-Proto", ())) or None
        self._check_host_and_origin(request.remote, headers.get("Host"), forwarded, headers.get("Origin"))
        if self._events_service.is_closing and request.path.startswith("/v1/"):
            raise shutdown_error()

    def _check_host_and_origin(
        self, remote: str | None, host: str | None, forwarded: str | None = None, origin: str | None = None
    ) -> None:
        refused = self._find_refusal_cached(remote, host, forwarded, origin)
        if refused is not None:
            field, message = refused
            raise ApiError(error_codes.FORBIDDEN, f"{field}: {message}", field=field)

    def _find_refusal(
        self, remote: str | None, host: str | None, forwarded: str | None, origin: str | None
    ) -> tuple[str, str] | None:
        """The header for which a request is refused, and why. The same come again and again, so it is kept."""
        if self.settings.development and not is_loopback_host(host):
            # A web page can have its own name point to this machine, and be of the same origin as we are.
            return "Host", "must be a loopback name in development mode"
        scheme = get_scheme(remote, forwarded, self._certificate.context is not None, self._trusted_networks)
        if not is_allowed_origin(origin, scheme, host, self._allowed_origins):
            return "Origin", "is not one of those that may connect"
        return None

    async def _add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Lets pages of configured origins read the answer. Who is not allowed was refused, and gets no such header."""
        origin = request.headers.get("Origin")
        if origin is not None and normalize_origin(origin) in self._allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"
        if self._allowed_origins:
            response.headers["Vary"] = "Origin"

    def _get_caller(self, request: web.Request) -> Caller:
        connection = self._limiter.find_connection(request.transport)
        if connection is not None and not connection.is_proxy:
            return connection
        address = self._get_address(request)
        return Caller(address) if connection is None else ForwardedRequest(connection, address)

    def _get_address(self, request: web.Request) -> str:
        # Of several lines the last was written by the proxy that we know, as of several addresses in one.
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ())) or None
        return self._to_network_cached(request.remote, forwarded)

    def _to_network(self, remote: str | None, forwarded: str | None) -> str:
        return to_client_network(find_client_address(remote, forwarded, self._trusted_networks))

    def _check_capacity(self, connection: Connection | None = None) -> None:
        connections_max = self.settings.api_limits.connections_max
        if self._reader_count >= connections_max and not self._limiter.close_unauthenticated_stream(connection):
            message = f"connections_max is {connections_max}, and that many are there already"
            raise ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=1000)
        if self._events_service.is_closing:
            raise shutdown_error()

    def _open_grpc_stream(self, address: str) -> CountedStream:
        self._check_capacity()
        return self._limiter.open_stream(address)

    def _admit_stream(self, request: web.Request) -> Caller:
        """Return the caller of a WebSocket or stream, which stays. Raises ApiError if a limit is reached."""
        connection = self._limiter.find_connection(request.transport)
        self._check_capacity(connection)
        self._open_requests.pop(id(request), None)
        if connection is None:
            return Caller(self._get_address(request))
        connection.is_stream = True
        if not connection.is_proxy:
            return connection
        return self._limiter.open_stream(self._get_address(request), connection)

    # --- for operators

    async def _handle_hello(self, _: web.Request) -> web.Response:
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

    async def _handle_healthz(self, _: web.Request) -> web.Response:
        """The process lives."""
        return web.json_response({"status": "ok"})

    async def _handle_readyz(self, _: web.Request) -> web.Response:
        """And can do its work: the log can be read, and it is not about to stop."""
        if not self._is_ready:
            status = "stopping" if self._events_service.is_closing else "the store cannot be read"
            return web.json_response({"status": status}, status=503)
        try:
            heads = await asyncio.wait_for(self.log.heads(), READY_TIMEOUT_S)
        except OncelogError as error:
            self._log_limiter.warn("not ready", error=str(error))
            return web.json_response({"status": "the store cannot be read"}, status=503)
        except TimeoutError:
            self._log_limiter.warn("not ready: the store has not answered in time", seconds=READY_TIMEOUT_S)
            return web.json_response({"status": "the store does not answer"}, status=503)
        newest = heads[0].position if 0 in heads else 0
        found = {"status": "ok", "epoch": self.log.epoch, "last_committed_id": newest}
        # Ready all the same: what is known is answered, and all can be read. Who asks can tell the difference.
        read_only = self.log.read_only
        return web.json_response({**found, "read_only": read_only} if read_only else found)

    def _get_positions(self) -> dict[int, int]:
        """The newest position of each lane. In lane 0 it is the newest that this server has delivered."""
        return {**{lane: head.position for lane, head in self._heads.items()}, 0: self.hub.position}

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        if not self.settings.tenants:
            self.metrics.usage = ()
        else:
            with suppress(OncelogError):  # then it is as it was
                self.metrics.usage = await self.log.usage()
        with suppress(OncelogError, TimeoutError):
            self._heads = await asyncio.wait_for(self.log.heads(), METRICS_TIMEOUT_S)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": self.metrics.content_type})


def _find_api_name(path: str) -> str:
    for prefix, api_name in _API_NAMES.items():
        if path.startswith(prefix):
            return api_name
    return "events"


_API_NAMES: Final = {"/v1/ledger/": "ledger", "/v1/sync/": "deltas", WEBSOCKET_PATH: "chat", "/v1/audit": "audit"}
_PROBLEM_DIALECTS: Final = {"deltas": DELTAS_PROBLEMS, "chat": CHAT_PROBLEMS, "ledger": LEDGER_PROBLEMS}
_FAILURE: Final = ApiError(error_codes.SERVER_ERROR, "the server is at fault", status=500)


def _find_dialect(path: str) -> ProblemDialect:
    return _PROBLEM_DIALECTS.get(_find_api_name(path), DEFAULT_DIALECT)


def _format_address(address: tuple[str, int] | str) -> str:
    """`host:port`, an IPv6 address in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
