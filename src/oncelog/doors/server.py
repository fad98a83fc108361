"""The server: one log, its doors, and what operators need. HTTP and WebSocket on one port.

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

from oncelog import codes
from oncelog.core.policy import ledger_policy
from oncelog.core.tenants import Tenant
from oncelog.core.values import LaneHead, WantedSettings
from oncelog.doors import faults
from oncelog.doors.audit_http import SERVER_ACTOR, AuditHttp, act_of_credential
from oncelog.doors.cached_document import CachedDocument
from oncelog.doors.chat.acks import Acks
from oncelog.doors.chat.door import ChatDoor
from oncelog.doors.chat.http import PATH as CHAT_PATH
from oncelog.doors.chat.http import ChatHttp
from oncelog.doors.chat.hub import ChatHub
from oncelog.doors.chat.session import ChatSession
from oncelog.doors.chat.words import error_response as chat_error_response
from oncelog.doors.chat_page.http import ChatPage
from oncelog.doors.connections import (
    Caller,
    Connection,
    ConnectionLimiter,
    CountedStream,
    ForwardedRequest,
    connection_limits,
)
from oncelog.doors.credential_events import CredentialEvent, CredentialListener
from oncelog.doors.deltas.door import DeltasDoor
from oncelog.doors.deltas.http import LIVE, PATH, DeltasHttp
from oncelog.doors.deltas.schemas import Schemas, both
from oncelog.doors.deltas.words import error_response as deltas_error_response
from oncelog.doors.entrance import Entrance
from oncelog.doors.events.camel import Camel
from oncelog.doors.events.dialect import FirstDialect
from oncelog.doors.events.door import EventsDoor
from oncelog.doors.events.http import EventsHttp
from oncelog.doors.events.hub import Hub
from oncelog.doors.events.session import Session as EventsSession
from oncelog.doors.faults import DoorError, stopping
from oncelog.doors.gate import Gate
from oncelog.doors.http_headers import add_response_headers
from oncelog.doors.http_log import http_logger
from oncelog.doors.http_protocol import HttpProtocol
from oncelog.doors.ledger.door import LedgerDoor
from oncelog.doors.ledger.http import Handler as LedgerHandler
from oncelog.doors.ledger.http import LedgerHttp
from oncelog.doors.ledger.rpc import LedgerRpc
from oncelog.doors.limits import INSIEME_FRAME_BYTES, REQUESTS_BURST_SECONDS
from oncelog.doors.listener import Listener, bind
from oncelog.doors.log_limiter import LogLimiter
from oncelog.doors.metrics import Counts, Metrics
from oncelog.doors.metrics_listener import MetricsListener
from oncelog.doors.open_files import raise_limit
from oncelog.doors.openapi import description
from oncelog.doors.origins import (
    client_address,
    client_network,
    is_allowed_origin,
    is_loopback_host,
    is_trusted,
    normal_origin,
    scheme_of,
)
from oncelog.doors.quick import Quick
from oncelog.doors.rates import Rates
from oncelog.doors.requests import check_single_authorization, credential_of, error_response
from oncelog.doors.settings import ServerSettings, authenticator_of
from oncelog.doors.sockets import Sockets
from oncelog.doors.tls import ServerCertificate
from oncelog.doors.validating import validate_of
from oncelog.engine.log import open_log
from oncelog.errors import OncelogError, SettingsError
from oncelog.file_modes import parse_file_mode
from oncelog.stores.address import shown
from oncelog.stores.clock import Clock, SystemClock

logger: Final = logging.getLogger("oncelog.doors")

KEEP_ALIVE_S: Final = 75.0
"""How long a connection without a request is kept for the next one."""
METRICS_S: Final = 1.0
"""Longest wait for the store before metrics show the positions of the previous request."""
METRICS_GRANT: Final = "oncelog/metrics"
"""A credential needs a read grant for this name to read `/metrics`."""
READY_S: Final = 5.0
"""How long a store may take before a server says that it is not ready: whoever asks waits for seconds, not for ever."""
CREDENTIALS_POLL_S: Final = 1.0
"""How often credential files are checked for changes."""
RENEW_S: Final = 1.0
"""How often the rights of those who are connected are looked at."""
RATE_KEYS_MAX: Final = 100_000
JUDGED_MAX: Final = 256
"""Kept of what was found out about addresses and headers."""
CLOSING_S: Final = 1.0
"""How long one who does not read may take to be closed when the server stops."""
REPLIES_S: Final = 3.0
"""Longest wait for replies when the server stops, within `shutdown_ms`. Only a client that does not read needs it."""
LINGER_S: Final = 0.25
"""How long connections without a request are kept when the server stops: one may be on its way, and gets an answer."""
ACCEPTING_S: Final = 0.05
"""How long a server that stops still takes connections. Who comes is told, as all are."""
LOOK_S: Final = 0.005
"""How often a server that stops looks whether it still has to wait."""
LINE_BYTES_MAX: Final = 64 * 1024
"""Longest request line. A relationship of three names of 1,024 characters, percent-encoded, needs 36 KiB of it, and the
token of its page 16 KiB."""
HEADER_BYTES_MAX: Final = 32 * 1024
"""Longest header."""
PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Last-Event-ID",
    "Access-Control-Max-Age": "600",
}
"""What a browser is told that asks before it sends a request of another origin (CORS)."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """`async with Server(settings) as server:` serves until the block is left."""

    def __init__(
        self, settings: ServerSettings, clock: Clock | None = None, again: Callable[[], ServerSettings] | None = None
    ) -> None:
        self.settings, self._again = settings, again
        self._clock = clock or SystemClock()
        self._schemas = None if settings.deltas_schemas is None else Schemas(settings.deltas_schemas)
        ttl_ms = settings.ledger.ttl_ms
        self.log = open_log(
            settings.store,
            policies=() if ttl_ms is None else [ledger_policy(ttl_ms)],
            settings=WantedSettings(eviction_interval=settings.ledger.eviction_interval),
            validate=both(
                None if settings.validate is None else validate_of(settings.validate),
                None if self._schemas is None else self._schemas.validate,
            ),
            limits=settings.engine_limits,
            clock=clock,
            room=settings.disk.room,
            tenants=settings.tenants,
            actor=SERVER_ACTOR,
            file_mode=parse_file_mode(settings.file_mode),
        )
        if settings.read_only:
            self.log.set_read_only(actor=SERVER_ACTOR)
        self._authenticator = authenticator_of(settings, self._clock.wall_ms)
        self.counts = Counts()
        self._log_limiter = LogLimiter(self._clock.elapsed_ms)
        self._limiter = ConnectionLimiter(
            connection_limits(settings.door_limits, is_open=settings.development),
            self._clock.elapsed_ms,
            self.counts,
            self._log_limiter,
        )
        self._entrance = self._new_entrance()
        self._door = self._new_events_door()
        self.hub = self._door.hub
        self.sockets = Sockets(self._entrance, settings.door_limits, self.counts, partial(EventsSession, self._door))
        self.http = EventsHttp(self._door)
        self._networks = settings.trusted_networks
        self._not_ours = lru_cache(maxsize=JUDGED_MAX)(self._judged)
        self._network_of = lru_cache(maxsize=JUDGED_MAX)(self._network)
        ledger_door = LedgerDoor(self.log, self._entrance, limits=settings.door_limits, counts=self.counts)
        self.ledger = LedgerHttp(ledger_door)
        self.deltas = DeltasHttp(DeltasDoor(self.log, self._entrance, limits=settings.door_limits, counts=self.counts))
        self._chat_door = ChatDoor(self.log, self._entrance, limits=settings.door_limits, counts=self.counts)
        self._chat_hub = ChatHub(self.log, settings.door_limits, self.counts, self._cannot_follow)
        new_session = partial(ChatSession, self._chat_door, self._chat_hub, Acks(self.log))
        self.chat_sockets = Sockets(self._entrance, settings.door_limits, self.counts, new_session)
        self.chat = ChatHttp(self._chat_door)
        self.rpc = self._new_rpc(ledger_door) if settings.grpc else None
        self.metrics = Metrics(
            self.counts,
            queue_items=lambda: self.log.queued,
            positions=self._positions,
            evictions=lambda: (self.log.evictions, self.log.evicted_clients),
            subscribers=lambda: self._readers,
            guard=self.log.guard,
            failed_files=self._authenticator.files.failed,
        )
        self.log.watch_commits(self.metrics.observe_commit)
        self.metrics_listener = MetricsListener(
            {"/metrics": self._rendered_metrics, "/healthz": self._healthz, "/readyz": self._readyz},
            timeout_ms=settings.door_limits.connect_timeout_ms,
            now_ms=self._clock.elapsed_ms,
            counts=self.counts,
            log_limiter=self._log_limiter,
        )
        self._origins = settings.allowed_origins
        self._certificate = ServerCertificate(settings)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._quick = Quick(
            {f"/v1/ledger/{path}": handler for path, handler in self.ledger.quick_routes().items()},
            demand_ours=self._demand_ours,
            failed=self._count_failed,
            body_bytes_max=settings.door_limits.frame_bytes_max,
            varies=bool(self._origins),
        )
        self._renewing: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._wanted_tenants: tuple[Tenant, ...] | None = None
        self._is_ready = False
        self._heads: Mapping[int, LaneHead] = {}
        """As the store had them when metrics were last asked for."""
        self._asked: dict[int, StreamReader] = {}
        """Bodies of the requests that have no answer yet, but for those that stay."""
        self.urls: list[str] = []
        """Where it listens."""

    def _new_events_door(self) -> EventsDoor:
        shows_actor = self.settings.show_actors
        first = FirstDialect(shows_actor=shows_actor)
        door = EventsDoor(
            self.log,
            Hub(self._clock.wall_ms, self.counts, self._cannot_read, first),
            self._entrance,
            limits=self.settings.door_limits,
            counts=self.counts,
            first=first,
            second=Camel(None, shows_actor=shows_actor),
        )
        door.set_tenants(self.settings.tenants)
        return door

    def _new_rpc(self, door: LedgerDoor) -> LedgerRpc:
        return LedgerRpc(
            door,
            host=self.settings.host,
            port=self.settings.ledger_port,
            with_reflection=self.settings.openapi,
            certificate=lambda: self._certificate.pem,
            address_of=self._network_of,
            open_stream=self._open_grpc_stream,
        )

    def _new_entrance(self) -> Entrance:
        per_minute = self.settings.door_limits.auth_failures_per_minute_max
        auth_failures = Rates(per_minute / 60, max(1, per_minute), RATE_KEYS_MAX, self._clock.elapsed_ms)
        per_second = self.settings.door_limits.requests_per_second_max
        requests = Rates(per_second, max(1, REQUESTS_BURST_SECONDS * per_second), RATE_KEYS_MAX, self._clock.elapsed_ms)
        return Entrance(self._authenticator, self.counts, self._clock, auth_failures, self._log_limiter, requests)

    @property
    def _readers(self) -> int:
        """Who is connected to stay."""
        streams = len(self.http.streams) + len(self.ledger.streams) + len(self.deltas)
        return len(self.sockets) + len(self.chat_sockets) + streams + len(self.rpc or ())

    @property
    def closed_connections(self) -> int:
        """Connections that were closed since the start."""
        return self._limiter.closed

    @property
    def grpc_address(self) -> str:
        """Where the ledger is served over gRPC: `host:port`, or nothing."""
        return "" if self.rpc is None else _place((self.settings.host, self.rpc.port))

    # --- from start to stop

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Opens the log and listens. Raises OncelogError for what is wrong with either."""
        self.watch_credentials(self._record_credential)
        self._authenticator.reload()
        if self._schemas is not None:
            self._schemas.reload()
        self._certificate.load()
        await self.log.__aenter__()
        try:
            self.hub.start(await self.log.listen(self.hub))
            self._limit_open_files()
            await self._listen()
            if self.settings.metrics and self.settings.metrics_port is not None:
                await self.metrics_listener.start(self.settings.metrics_host, self.settings.metrics_port)
            if self.rpc is not None:
                await self.rpc.start()
        except BaseException:
            await self._close_listener()
            await self.log.close()
            raise
        self._renewing = asyncio.get_running_loop().create_task(self._renew_all())
        if self._authenticator.files:
            self._polling = asyncio.get_running_loop().create_task(self._poll_credentials())
        self._is_ready = True
        where = {"urls": " ".join(self.urls), "store": shown(self.settings.store)}
        logger.info("listening", extra={**where, "grpc": self.grpc_address} if self.rpc is not None else where)
        if self._authenticator.is_open:
            logger.warning("development mode: everybody on this machine may do everything, without a token")
        if self.settings.door_limits.frame_bytes_max < INSIEME_FRAME_BYTES:
            logger.warning(
                "limits.frame_bytes_max is %d: clients of the npm package insieme send up to %d bytes, and wait "
                "forever if a frame is too large; raise the limit, or lower submitBatch.maxBytes of these clients",
                self.settings.door_limits.frame_bytes_max,
                INSIEME_FRAME_BYTES,
            )

    def _limit_open_files(self) -> None:
        grpc_connections_max = self.settings.door_limits.connections_max if self.rpc is not None else 0
        limits = self._limiter.limits
        total_max, grpc_connections_max = raise_limit(limits.total_max, grpc_connections_max)
        self._limiter.limits = replace(limits, total_max=total_max)
        if self.rpc is not None:
            self.rpc.connections_max = grpc_connections_max

    async def stop(self) -> None:
        """Takes no more connections, finishes what was accepted, tells everybody, exits."""
        if self._runner is None:
            return
        self._is_ready = False
        self._door.is_closing = self.ledger.is_closing = self.deltas.is_closing = self._chat_door.is_closing = True
        self._quick.end()
        lingers_until_s = asyncio.get_running_loop().time() + min(LINGER_S, self.settings.shutdown_ms / 1000)
        runner, self._runner = self._runner, None
        logger.info("stopping", extra={"connections": self._readers, "queued": self.log.queued})
        await self._accept_last()
        calls = None if self.rpc is None else asyncio.ensure_future(self.rpc.stop(self.settings.shutdown_ms / 1000))
        for task in (self._renewing, self._polling, self._listening, self._counting):
            if task is not None:
                task.cancel()
        try:
            async with asyncio.timeout(self.settings.shutdown_ms / 1000):
                await self._answered()
        except TimeoutError:
            logger.warning("not all that was accepted has its answer yet", extra={"queued": self.log.queued})
        self.sockets.finish()
        self.chat_sockets.finish()
        self.http.streams.finish()
        self.ledger.streams.finish()
        self.deltas.finish()
        await self._linger(lingers_until_s)
        self._quick.finish()
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
            await asyncio.sleep(min(ACCEPTING_S, self.settings.shutdown_ms / 1000))
            self._listener.close()

    async def _close_listener(self) -> None:
        """Of a server that could not be started as a whole."""
        await self.metrics_listener.stop()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _answered(self) -> None:
        """Returns when nothing is in flight and what was answered is on its way, but for those who do not read."""
        # A request whose body has not come as a whole may never do so: only those that have are waited for.
        while self._quick.is_busy or any(body.is_eof() for body in self._asked.values()):  # noqa: ASYNC110 - once
            await asyncio.sleep(LOOK_S)
        await self.log.settled()
        await asyncio.sleep(0)  # the answers of the last commit
        replied = asyncio.gather(self.sockets.replied(), self.chat_sockets.replied())
        await asyncio.wait([replied], timeout=REPLIES_S)

    async def _linger(self, until_s: float) -> None:
        """Returns when nobody is connected, or then. Who asks meanwhile is told, and that the connection ends."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s and not self._limiter.are_all_closed():  # noqa: ASYNC110 - once
            await asyncio.sleep(LOOK_S)

    def _cannot_read(self, error: Exception) -> None:
        """The log could not be read for long. Everybody is let go; whoever comes back finds it as it is then."""
        logger.error("the log cannot be read; all connections are closed: %s", error)
        self._set_ready(is_ready=False)
        self.sockets.fail(error)
        if not self._door.is_closing:
            self._listening = asyncio.get_running_loop().create_task(self._listen_again())

    def _cannot_follow(self, error: Exception) -> None:
        """The same of the lanes of chats, which are listened to again when the next one connects."""
        logger.error("chats cannot be followed; their connections are closed: %s", error)
        self.chat_sockets.fail(error)

    def _set_ready(self, *, is_ready: bool) -> None:
        self._is_ready = is_ready
        if self.rpc is not None and not self._door.is_closing:
            self._telling = asyncio.get_running_loop().create_task(self.rpc.set_ready(is_ready=is_ready))

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
        app = web.Application(client_max_size=self.settings.door_limits.frame_bytes_max, middlewares=[self._guard])
        self._route(app)
        app.on_response_prepare.append(self._tell_origin)
        app.on_response_prepare.append(add_response_headers)
        # aiohttp waits for it twice. Accepted requests have been waited for before.
        self._runner = web.AppRunner(app, shutdown_timeout=min(CLOSING_S, self.settings.shutdown_ms / 1000))
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - it has been set up
        serve = partial(
            HttpProtocol,
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no access log
            logger=http_logger(self._log_limiter),
            keepalive_timeout=KEEP_ALIVE_S,
            # Otherwise a token of the length that we allow would not come through.
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=LINE_BYTES_MAX,
            # A body is unpacked by who wants it (`body_of`), as far as its limit, and not as it comes, of whomever.
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
            partial(self._new_protocol, partial(self._quick.protocol, serve)),
            address_of=self._peer,
            tls=self._certificate.context,
            log_limiter=self._log_limiter,
            refused=self.counts.connections_refused,
        )
        self._listener.start()
        scheme = "http" if self._certificate.context is None else "https"
        self.urls = [f"{scheme}://{_place(socket.getsockname())}" for socket in self._listener.sockets]

    def _new_protocol(self, serve: Callable[[Gate], asyncio.Protocol], connection: Connection) -> Gate:
        return Gate(connection, serve, partial(self._limiter.count_refusal, "too_large", connection.address))

    def _peer(self, host: str | None) -> tuple[str, bool]:
        """Return the address that a peer is counted by, and whether it is a trusted proxy."""
        return self._network_of(host, None), is_trusted(host, self._networks)

    def _route(self, app: web.Application) -> None:
        app.router.add_get("/", self._hello)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        if self.settings.metrics and self.settings.metrics_port is None:
            app.router.add_get("/metrics", self._metrics)
        if self.settings.openapi:
            document = CachedDocument(lambda: description(self.settings.door_limits))
            app.router.add_get("/openapi.json", document.serve)
        if self.settings.development:
            ChatPage().route(app)
        app.router.add_get("/v1/events", self._events)
        app.router.add_post("/v1/events", self._submit)
        app.router.add_get("/v1/events/stream", self._stream)
        audit = AuditHttp(self.log, self._entrance, self.counts)
        app.router.add_get("/v1/audit", partial(self._handle_plain, audit.page))
        for path, (method, handler) in self.ledger.routes().items():
            app.router.add_route(method, f"/v1/ledger/{path}", partial(self._handle_ledger, handler))
        for path, (method, handler) in self.deltas.routes().items():
            app.router.add_route(method, f"/v1/sync/{{gateway}}/{path}", partial(self._handle_deltas, handler, path))

        app.router.add_get(CHAT_PATH, self._chat_socket)
        for method, path, chat_handler in self.chat.routes():
            app.router.add_route(method, path, partial(self._handle_plain, chat_handler))

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
        self._renew()
        if not failures:
            logger.info("keys, grants and certificates were reloaded")

    def _reload_settings(self) -> None:
        self._change(self.settings if self._again is None else self._again())

    def _change(self, new: ServerSettings) -> None:
        """The settings that need no restart: the operator's switch, how full the disk may be, quotas."""
        guard = self.log.guard
        guard.set_read_only(is_read_only=new.read_only, actor=SERVER_ACTOR)
        if new.disk != self.settings.disk:
            guard.use(new.disk.room)
        self._wanted_tenants = new.tenants
        if self._counting is None:
            self._counting = asyncio.get_running_loop().create_task(self._set_tenants())
        self.settings = replace(self.settings, read_only=new.read_only, disk=new.disk)

    async def _set_tenants(self) -> None:
        """Until they are those that were wanted last: to count takes long, and others may be wanted meanwhile."""
        try:
            # Also where they are the ones that this server has had: another one may have written others meanwhile.
            while (wanted := self._wanted_tenants) is not None:
                self._wanted_tenants = None
                is_changed = await self.log.set_tenants(wanted, SERVER_ACTOR)
                self._door.set_tenants(wanted)
                self.settings = replace(self.settings, tenants=wanted)
                if is_changed:
                    logger.info("quotas were reloaded", extra={"tenants": len(wanted)})
        except OncelogError as error:
            logger.error("the quotas stay as they were: %s", error)  # noqa: TRY400 - as above
        finally:
            self._counting = None

    async def _poll_credentials(self) -> None:
        """Reload credential files that have changed, and end the connections of credentials that have gone."""
        credential_files = self._authenticator.files
        while True:
            await asyncio.sleep(CREDENTIALS_POLL_S)
            try:
                changes = await asyncio.to_thread(credential_files.read_changes)
                has_changed, failures = credential_files.apply(changes)
                for failure in failures:
                    logger.error("not reloaded; %s", failure)
                self._authenticator.report_expired()
                if has_changed:
                    self._renew()
            except Exception:
                logger.exception("the credential files could not be polled")

    def _record_credential(self, event: CredentialEvent) -> None:
        """Record the end of a key. Every server of the file does so, and the log keeps one record."""
        act = act_of_credential(event)
        if act is not None:
            self.log.record(act)

    def watch_credentials(self, listener: CredentialListener) -> None:
        """Call the listener when this server notices that a key was revoked or removed, or has expired."""
        self._authenticator.watch(listener)

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._renew()

    def _renew(self) -> None:
        """Run the periodic checks, about once a second. The failure of one of them does not affect the others."""
        parts: list[Callable[[], object]] = [
            self.sockets.renew,
            self.chat_sockets.renew,
            self.http.streams.renew,
            self.ledger.streams.renew,
            self.deltas.streams.renew,
            faults.failures.look,
            self._log_limiter.flush,
            self._limiter.sweep,
            self.metrics_listener.sweep,
            partial(self._quick.close_idle, asyncio.get_running_loop().time() - KEEP_ALIVE_S),
        ]
        if self.rpc is not None:
            parts.append(self.rpc.renew)
        for part in parts:
            try:
                part()
            except Exception:
                logger.exception("a periodic check failed")

    # --- every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whom we do not serve at all, how errors look, and which answer is the last one of its connection."""
        connection = self._limiter.of(request.transport)
        if connection is not None:
            connection.requested()
        self._asked[id(request)] = request.content
        try:
            response = await self._answer(request, handler)
        finally:
            self._asked.pop(id(request), None)
            if connection is not None:
                connection.answered(request.content)
        if self._door.is_closing and not response.prepared:
            response.force_close()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        respond = _RESPONSES.get(_door_of(request.path), error_response)
        try:
            self._demand_served(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return web.Response(status=204, headers=PREFLIGHT)
            return await handler(request)
        except DoorError as error:
            self._count_failed(request.path, error)
            return respond(error)
        except web.HTTPRequestEntityTooLarge:
            size = self.settings.door_limits.frame_bytes_max
            message = f"body: must have at most {size} bytes"
            return respond(DoorError(codes.BAD_REQUEST, message, field="body", limit=size, status=413))
        except web.HTTPException as error:
            allowed = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            return respond(DoorError(codes.BAD_REQUEST, error.reason, status=error.status), allowed)
        except asyncio.CancelledError:
            raise
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request failed", extra={"method": request.method, "path": request.path})
            return respond(DoorError(codes.SERVER_ERROR, "the server is at fault", status=500))

    def _count_failed(self, path: str, error: DoorError) -> None:
        self.counts.requests[_door_of(path), "http", error.code] += 1

    def _demand_served(self, request: web.Request) -> None:
        headers = request.headers
        check_single_authorization(headers.getall("Authorization", ()))
        forwarded = ",".join(headers.getall("X-Forwarded-Proto", ())) or None
        self._demand_ours(request.remote, headers.get("Host"), forwarded, headers.get("Origin"))
        if self._door.is_closing and request.path.startswith("/v1/"):
            raise stopping()

    def _demand_ours(
        self, remote: str | None, host: str | None, forwarded: str | None = None, origin: str | None = None
    ) -> None:
        refused = self._not_ours(remote, host, forwarded, origin)
        if refused is not None:
            field, what = refused
            raise DoorError(codes.FORBIDDEN, f"{field}: {what}", field=field)

    def _judged(
        self, remote: str | None, host: str | None, forwarded: str | None, origin: str | None
    ) -> tuple[str, str] | None:
        """The header for which a request is refused, and why. The same come again and again, so it is kept."""
        if self.settings.development and not is_loopback_host(host):
            # A web page can have its own name point to this machine, and be of the same origin as we are.
            return "Host", "must be a loopback name in development mode"
        scheme = scheme_of(remote, forwarded, self._certificate.context is not None, self._networks)
        if not is_allowed_origin(origin, scheme, host, self._origins):
            return "Origin", "is not one of those that may connect"
        return None

    async def _tell_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Lets pages of configured origins read the answer. Who is not allowed was refused, and gets no such header."""
        origin = request.headers.get("Origin")
        if origin is not None and normal_origin(origin) in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"
        if self._origins:
            response.headers["Vary"] = "Origin"

    def _caller(self, request: web.Request) -> Caller:
        connection = self._limiter.of(request.transport)
        if connection is not None and not connection.is_proxy:
            return connection
        address = self._address(request)
        return Caller(address) if connection is None else ForwardedRequest(connection, address)

    def _address(self, request: web.Request) -> str:
        # Of several lines the last was written by the proxy that we know, as of several addresses in one.
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ())) or None
        return self._network_of(request.remote, forwarded)

    def _network(self, remote: str | None, forwarded: str | None) -> str:
        return client_network(client_address(remote, forwarded, self._networks))

    def _demand_room(self, connection: Connection | None = None) -> None:
        connections_max = self.settings.door_limits.connections_max
        if self._readers >= connections_max and not self._limiter.close_unauthenticated_stream(connection):
            message = f"connections_max is {connections_max}, and that many are there already"
            raise DoorError(codes.SERVER_BUSY, message, retry_after_ms=1000)
        if self._door.is_closing:
            raise stopping()

    def _open_grpc_stream(self, address: str) -> CountedStream:
        self._demand_room()
        return self._limiter.open_stream(address)

    def _let_stay(self, request: web.Request) -> Caller:
        """Return the caller of a WebSocket or stream, which stays. Raises DoorError if a limit is reached."""
        connection = self._limiter.of(request.transport)
        self._demand_room(connection)
        self._asked.pop(id(request), None)
        if connection is None:
            return Caller(self._address(request))
        connection.is_stream = True
        if not connection.is_proxy:
            return connection
        return self._limiter.open_stream(self._address(request), connection)

    # --- the doors

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self.sockets.serve(request, self._let_stay(request))
        return await self.http.page(request, self._caller(request))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        return await self.http.submit(request, self._caller(request))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await self.http.stream(request, self._let_stay(request))

    async def _handle_ledger(self, handler: LedgerHandler, request: web.Request) -> web.StreamResponse:
        stays = request.path.endswith("/stream")
        return await handler(request, self._let_stay(request) if stays else self._caller(request))

    async def _handle_deltas(self, handler: LedgerHandler, path: str, request: web.Request) -> web.StreamResponse:
        return await handler(request, self._let_stay(request) if path == LIVE else self._caller(request))

    async def _chat_socket(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise DoorError(codes.BAD_REQUEST, "Upgrade: must be websocket", field="Upgrade", status=426)
        return await self.chat_sockets.serve(request, self._let_stay(request))

    async def _handle_plain(self, handler: LedgerHandler, request: web.Request) -> web.StreamResponse:
        return await handler(request, self._caller(request))

    # --- for operators

    async def _hello(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "oncelog": codes.PROTOCOL_VERSION,
                "events": "/v1/events",
                "ledger": "/v1/ledger",
                "deltas": "/v1/sync",
                "chat": CHAT_PATH,
                "health": "/readyz",
            }
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        """The process lives."""
        return web.json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        """And can do its work: the log can be read, and it is not about to stop."""
        if not self._is_ready:
            status = "stopping" if self._door.is_closing else "the store cannot be read"
            return web.json_response({"status": status}, status=503)
        try:
            heads = await asyncio.wait_for(self.log.heads(), READY_S)
        except OncelogError as error:
            logger.warning("not ready: %s", error)
            return web.json_response({"status": "the store cannot be read"}, status=503)
        except TimeoutError:
            logger.warning("not ready: the store has not answered for %s s", READY_S)
            return web.json_response({"status": "the store does not answer"}, status=503)
        newest = heads[0].position if 0 in heads else 0
        found = {"status": "ok", "epoch": self.log.epoch, "last_committed_id": newest}
        # Ready all the same: what is known is answered, and all can be read. Who asks can tell the difference.
        read_only = self.log.read_only
        return web.json_response({**found, "read_only": read_only} if read_only else found)

    def _positions(self) -> dict[int, int]:
        """The newest position of each lane. In lane 0 it is the newest that this server has delivered."""
        return {**{lane: head.position for lane, head in self._heads.items()}, 0: self.hub.position}

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.settings.metrics_public:
            principal = self._entrance.authenticate(credential_of(request), self._caller(request))
            if not principal.grants.may_read(METRICS_GRANT):
                raise DoorError(codes.FORBIDDEN, f"metrics: need the grant to read {METRICS_GRANT}")
        return await self._rendered_metrics(request)

    async def _rendered_metrics(self, _: web.Request) -> web.Response:
        if not self.settings.tenants:
            self.metrics.usage = ()
        else:
            with suppress(OncelogError):  # then it is as it was
                self.metrics.usage = await self.log.usage()
        with suppress(OncelogError, TimeoutError):
            self._heads = await asyncio.wait_for(self.log.heads(), METRICS_S)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": self.metrics.content_type})


def _door_of(path: str) -> str:
    for prefix, door in _DOORS.items():
        if path.startswith(prefix):
            return door
    return "events"


_DOORS: Final = {"/v1/ledger/": "ledger", PATH: "deltas", CHAT_PATH: "chat"}
_RESPONSES: Final = {"deltas": deltas_error_response, "chat": chat_error_response}
"""How errors look, where a door has words of its own."""


def _place(address: tuple[str, int] | str) -> str:
    """`host:port`, an IPv6 address in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
