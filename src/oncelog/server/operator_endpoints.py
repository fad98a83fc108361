"""Endpoints for operators: health, metrics, and the description of all endpoints."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec
import orjson
from aiohttp import BytesPayload, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import ETAG_ANY
from msgspec.structs import replace

from oncelog import error_codes
from oncelog.errors import OncelogError, StoreUnavailableError
from oncelog.server.auth_gate import AuthGate
from oncelog.server.chat.endpoints import WEBSOCKET_PATH
from oncelog.server.endpoint import API_DESCRIPTIONS, Call, Endpoint, get_credential
from oncelog.server.errors import RETRY_AFTER_MS, UNREADABLE, ApiError, store_failures
from oncelog.server.messages import (
    JSON,
    TEXT_SCHEMA,
    TIMESTAMP,
    Schema,
    integer_schema,
    json_response,
    object_schema,
    schema_response,
    with_optional,
)
from oncelog.server.metrics import Metrics
from oncelog.server.pages.endpoints import DOCS_PATH, PAGE_HEADERS
from oncelog.server.pages.home import ApiSummary, render_home
from oncelog.server.settings import ServerSettings
from oncelog.server.web_chat.endpoints import PATH as WEB_CHAT_PATH
from oncelog.storage.figures import LogFigures, read_figures
from oncelog.version import __version__

OperatorHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METRICS_GRANT: Final = "oncelog/metrics"
"""A credential needs a read grant for this name to read `/metrics`."""
METRICS_TIMEOUT_S: Final = 1.0
"""Longest wait for the store. After that, the metrics show the positions from the previous request."""
READY_TIMEOUT_S: Final = 5.0
"""Longest wait for the store. After that, the server answers that it is not ready."""
STATS_TIMEOUT_S: Final = READY_TIMEOUT_S
"""Longest wait for a reading of the figures. It continues afterwards, for the next request."""
STATS_SHARED_MS: Final = 5000
"""How long the server answers with figures that it has already read. This limits the work that callers can cause."""
DOCUMENT_PATH: Final = "/openapi.json"
_API_PATHS: Final = {
    "events": "/v1/events",
    "ledger": "/v1/ledger",
    "deltas": "/v1/sync",
    "chat": WEBSOCKET_PATH,
    "audit": "/v1/audit",
}
"""Where the operations of each API begin."""
PART_BYTES: Final = 16 * 1024
"""Size of the parts of a document. The server writes each part after the client has read enough of the previous ones.
Every caller may request the document, so the server must not buffer all of it for a client that does not read."""
_METRICS_DESCRIPTION: Final = (
    "Requires read access to `oncelog/metrics`. With `metrics_public`, a request without a credential gets the "
    "metrics without names of tenants and consumers, and without the version. The server may serve metrics on another "
    "port, or not at all."
)
_STATS_DESCRIPTION: Final = (
    "Settings, lane heads, policies, consumers with their lag, tenants with their usage, and sizes, as `oncelog stats` "
    "prints them. Requires read access to `oncelog/metrics`. The server reads the figures in a separate thread. "
    f"Requests during a reading, and up to {STATS_SHARED_MS // 1000} seconds after it, get the same figures."
)
_METRICS_RESPONSES: Final[Mapping[int, Schema]] = {
    200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": TEXT_SCHEMA}}}
}


@dataclass(slots=True, eq=False)
class OperatorEndpoints:
    """The operator endpoints of one server."""

    _auth_gate: AuthGate
    _metrics: Metrics
    get_position: Callable[[], int]
    """Returns the newest position of lane 0 that this server has delivered."""
    get_settings: Callable[[], ServerSettings]
    build_document: Callable[[], dict[str, Any]]
    _document: tuple[bytes, str] | None = None
    """The OpenAPI document and its hash, built on the first request."""
    _stats: "asyncio.Future[LogFigures] | None" = None
    """The last reading of the figures, which may be unfinished. None if it failed."""
    _stats_ms: int = 0
    """When the last reading ended."""
    is_ready: bool = False

    @property
    def metrics_port_handlers(self) -> Mapping[str, OperatorHandler]:
        """Routes of the metrics port."""
        return {"/metrics": self._serve_metrics, "/healthz": self._serve_healthz, "/readyz": self._serve_readyz}

    def list_endpoints(self) -> list[Endpoint]:
        """Return the endpoints of the server's main port."""
        settings = self.get_settings()
        hello = {200: schema_response("Hello", "Version of the protocol and paths. Browsers get a page instead.")}
        hello[200]["content"]["text/html"] = {"schema": TEXT_SCHEMA}
        health = {200: schema_response("Health", "The process is running.")}
        ready = {
            200: schema_response("Ready", "The server is ready."),
            503: schema_response("Health", "The log cannot be read, or the server is stopping."),
        }
        endpoints = [
            _new_endpoint("/", "hello", "Describe the server", hello, self._serve_hello),
            _new_endpoint("/healthz", "health", "Check that the process is running", health, self._serve_healthz),
            _new_endpoint("/readyz", "readiness", "Check that the server is ready", ready, self._serve_readyz),
        ]
        if settings.metrics and settings.metrics_port is None:
            metrics = _new_endpoint("/metrics", "metrics", "Read metrics", _METRICS_RESPONSES, self._serve_metrics)
            if settings.metrics_public:
                metrics = replace(metrics, description=_METRICS_DESCRIPTION, handle=self._serve_public_metrics)
            else:
                metrics = replace(
                    metrics, description=_METRICS_DESCRIPTION, is_public=False, authorize=_authorize_metrics
                )
            endpoints.append(metrics)
        endpoints.append(
            Endpoint(
                method="GET",
                path="/v1/stats",
                api="operators",
                name="stats",
                summary="Read the figures of the log",
                description=_STATS_DESCRIPTION,
                authorize=_authorize_metrics,
                handle=self._read_stats,
                responses={200: schema_response("Stats", "The figures.")},
            )
        )
        if settings.openapi:
            document = {200: json_response("The document.", {"type": "object"})}
            endpoints.append(
                _new_endpoint(DOCUMENT_PATH, "describe", "Read this document", document, self._serve_document)
            )
        return endpoints

    async def _serve_hello(self, request: web.Request) -> web.Response:
        """Answer with the protocol version and the paths, as a page if the client prefers HTML."""
        before, html, _ = request.headers.get("Accept", "").partition("text/html")
        prefers_page = bool(html) and JSON not in before
        response = self._render_home() if prefers_page else web.json_response(self._describe_server())
        response.headers["Vary"] = "Accept"
        return response

    def _describe_server(self) -> dict[str, str]:
        settings = self.get_settings()
        return {
            "oncelog": error_codes.PROTOCOL_VERSION,
            **_API_PATHS,
            "health": "/readyz",
            **({"openapi": DOCUMENT_PATH, "docs": DOCS_PATH} if settings.openapi else {}),
            **({"web_chat": WEB_CHAT_PATH, "version": __version__} if settings.development else {}),
        }

    def _render_home(self) -> web.Response:
        """Return the landing page. Only a server in development mode, which is local, shows the package's version."""
        settings = self.get_settings()
        apis = [
            ApiSummary(name=name, path=path, description=API_DESCRIPTIONS[name]) for name, path in _API_PATHS.items()
        ]
        links = {
            **({"API documentation": DOCS_PATH, "OpenAPI document": DOCUMENT_PATH} if settings.openapi else {}),
            **({"Web chat": WEB_CHAT_PATH} if settings.development else {}),
            "Health": "/healthz",
            "Readiness": "/readyz",
        }
        version = f"Protocol {error_codes.PROTOCOL_VERSION}"
        if settings.development:
            version = f"Oncelog {__version__}, protocol {error_codes.PROTOCOL_VERSION}"
        page = render_home(
            version,
            apis,
            {name: path.removeprefix("/") for name, path in links.items()},
            is_development=settings.development,
        )
        return web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)

    async def _serve_healthz(self, _: web.Request) -> web.Response:
        """Answer that the process is running."""
        return web.json_response({"status": "ok"})

    async def _serve_readyz(self, _: web.Request) -> web.Response:
        """Answer whether the log can be read and the server is not stopping."""
        if not self.is_ready:
            return _not_ready("stopping" if self._auth_gate.is_closing else "the store cannot be read")
        try:
            heads = await asyncio.wait_for(self._metrics.log.heads(), READY_TIMEOUT_S)
        except OncelogError as error:
            self._auth_gate.log_limiter.warn("not ready", error=str(error))
            return _not_ready("the store cannot be read")
        except TimeoutError:
            self._auth_gate.log_limiter.warn("not ready: the store has not answered in time", seconds=READY_TIMEOUT_S)
            return _not_ready("the store does not answer")
        newest = heads[0].position if 0 in heads else 0
        found = {"status": "ok", "epoch": self._metrics.log.epoch, "last_committed_id": newest}
        # A read-only server is ready too: it answers reads and known writes.
        read_only = self._metrics.log.read_only
        return web.json_response({**found, "read_only": read_only} if read_only else found)

    async def _serve_public_metrics(self, call: Call) -> web.Response:
        """Answer with the metrics. Only a caller that may read metrics sees the version, and names of tenants and
        consumers.
        """
        credential = get_credential(call.request)
        if credential is None:
            return await self._answer_metrics(shows_names=False)
        call.principal = self._auth_gate.authenticate(credential, call.caller)
        _authorize_metrics(call)
        return await self._answer_metrics()

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return await self._answer_metrics()

    async def _answer_metrics(self, *, shows_names: bool = True) -> web.Response:
        """Answer with all metrics. If the store does not respond, its metrics keep their previous values."""
        metrics = self._metrics
        if not self.get_settings().tenants:
            metrics.usage = ()
        else:
            with suppress(OncelogError):
                metrics.usage = await self._metrics.log.usage()
        with suppress(OncelogError, TimeoutError):
            heads = await asyncio.wait_for(self._metrics.log.heads(), METRICS_TIMEOUT_S)
            metrics.positions = {lane: head.position for lane, head in heads.items()}
            metrics.consumers = await asyncio.wait_for(self._metrics.log.consumers(), METRICS_TIMEOUT_S)
        metrics.positions = {**metrics.positions, 0: self.get_position()}
        return web.Response(
            body=metrics.render(shows_names=shows_names), headers={"Content-Type": metrics.content_type}
        )

    async def _read_stats(self, _: Call) -> bytes:
        """Return the figures of the log. Requests during a reading, and shortly after it, share its result."""
        reading = self._stats
        if reading is None or (reading.done() and self._get_elapsed_ms() - self._stats_ms >= STATS_SHARED_MS):
            self._stats = reading = asyncio.ensure_future(self._read_figures())
            reading.add_done_callback(_retrieve_exception)
        await asyncio.wait([reading], timeout=STATS_TIMEOUT_S)
        if not reading.done():
            self._auth_gate.log_limiter.warn("no figures: the store has not answered in time", seconds=STATS_TIMEOUT_S)
            raise ApiError(error_codes.SERVER_BUSY, UNREADABLE, retry_after_ms=RETRY_AFTER_MS)
        try:
            return msgspec.json.encode(reading.result())
        except StoreUnavailableError as error:
            store_failures.count(error)
            raise ApiError(error_codes.SERVER_BUSY, UNREADABLE, retry_after_ms=RETRY_AFTER_MS) from error

    async def _read_figures(self) -> LogFigures:
        """Read the figures, and set when the reading ended, so that requests share it as soon as it is done."""
        try:
            figures = await asyncio.to_thread(read_figures, self.get_settings().store, is_open_here=True)
        except BaseException:
            self._stats = None
            raise
        self._stats_ms = self._get_elapsed_ms()
        return figures

    def _get_elapsed_ms(self) -> int:
        return self._auth_gate.clock.elapsed_ms()

    async def _serve_document(self, request: web.Request) -> web.Response:
        """Answer with the OpenAPI document, or 304 if the client has it (`If-None-Match`)."""
        if self._document is None:
            encoded = orjson.dumps(self.build_document())
            self._document = (encoded, sha256(encoded).hexdigest()[:32])
        document, etag = self._document
        known = {entry.value for entry in request.if_none_match or ()}
        is_known = not known.isdisjoint({etag, ETAG_ANY})
        body = None if is_known else _PartedBody(document, content_type=JSON)
        response = web.Response(status=304 if is_known else 200, body=body)
        response.etag = etag
        response.headers["Cache-Control"] = "no-cache"
        return response


def _retrieve_exception(reading: "asyncio.Future[LogFigures]") -> None:
    """Let asyncio log no stack trace if a reading fails after the last request has stopped waiting for it."""
    if not reading.cancelled():
        reading.exception()


class _PartedBody(BytesPayload):
    """A response body that is written in parts, as fast as the client reads."""

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See aiohttp."""
        for start in range(0, len(self._value), PART_BYTES):
            await writer.write(self._value[start : start + PART_BYTES])
            await writer.drain()


def build_schemas() -> dict[str, Schema]:
    """Return the schemas of the operator endpoints' answers."""
    names = ("oncelog", *_API_PATHS, "health")
    optional = ("openapi", "docs", "web_chat", "version")
    ready = object_schema(status={"const": "ok"}, epoch=TEXT_SCHEMA, last_committed_id=integer_schema())
    read_only = {**TEXT_SCHEMA, "description": "The reason why the log accepts no new writes, if any."}
    stats = object_schema(
        epoch=TEXT_SCHEMA,
        schema=integer_schema("Version of the log's format."),
        created_ms=TIMESTAMP,
        settings={"type": "object", "additionalProperties": {"type": "integer"}},
        records=integer_schema("Records of all kinds."),
        restore_records=integer_schema(),
        audit_records=integer_schema(),
        blocks=integer_schema(),
        lanes=_list_of(
            lane=integer_schema(), position=integer_schema(), height=integer_schema(), log_time_ms=TIMESTAMP
        ),
        policies={"type": "array", "items": TEXT_SCHEMA},
        consumers=_list_of(scope=TEXT_SCHEMA, name=TEXT_SCHEMA, cursor=integer_schema(), lag=integer_schema()),
        erasures=integer_schema(),
        tenants={"type": "array", "items": {"type": "object"}},
        bytes=integer_schema("Size of the file, or of the tables with their indexes."),
    )
    stats = with_optional(
        stats,
        keys={"type": "object", "description": "The key index of a file."},
        wal_bytes=integer_schema("Size of a file's write-ahead log."),
        server={**TEXT_SCHEMA, "description": "Version of the database."},
        tables={"type": "object", "additionalProperties": integer_schema()},
        leaps={
            "type": "array",
            "items": integer_schema(),
            "description": "Numbers above which restores and renewed epochs continued all numbers. Missing if empty.",
        },
    )
    return {
        "Stats": stats,
        "Hello": with_optional(
            object_schema(**dict.fromkeys(names, TEXT_SCHEMA)), **dict.fromkeys(optional, TEXT_SCHEMA)
        ),
        "Health": object_schema(status=TEXT_SCHEMA),
        "Ready": with_optional(ready, read_only=read_only),
    }


def _new_endpoint(
    path: str, name: str, summary: str, responses: Mapping[int, Schema], serve: OperatorHandler
) -> Endpoint:
    return Endpoint(
        method="GET",
        path=path,
        api="operators",
        name=name,
        summary=summary,
        responses=responses,
        parameters=None,  # Prometheus and load balancers may add query parameters
        is_public=True,
        handle=lambda call: serve(call.request),
    )


def _list_of(**members: Schema) -> Schema:
    return {"type": "array", "items": object_schema(**members)}


def _not_ready(status: str) -> web.Response:
    return web.json_response({"status": status}, status=503)


def _authorize_metrics(call: Call) -> str:
    if not call.principal.grants.may_read(METRICS_GRANT):
        raise ApiError(error_codes.FORBIDDEN, f"the credential has no read access to {METRICS_GRANT}")
    return METRICS_GRANT
