"""HTTP operations: one `Endpoint` declaration for each, and the parsing of requests.

Routes, authentication, the validation of parameters and bodies, metrics and the OpenAPI document follow from the
declaration. A handler receives a `Call` that has passed all checks, and returns the answer.
"""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, unquote_to_bytes

import orjson
from aiohttp import web
from msgspec import Struct

from oncelog import error_codes
from oncelog.engine.batch_report import RequestArrival
from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal, parse_grants
from oncelog.server.auth.stream_tickets import Ticket, restrict_to_ticket
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import UNKNOWN_OUTCOME, UNREADABLE, ApiError, field_error, to_api_error
from oncelog.server.messages import JSON, Field, Schema, run_long

# --- requests --------------------------------------------------------------------------------------------

ENCODINGS: Final = ("identity", "gzip", "deflate")
_GZIP_BITS: Final = zlib.MAX_WBITS + 16
BODY_TIMEOUT_S: Final = 60
"""Time within which the whole body of a request must arrive."""
_DIGITS_MAX: Final = 16
_BAD_PERCENT: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_FIELDS_MAX: Final = 1000
"""Maximum number of parameters in a query, far more than any operation needs."""


def get_credential(request: web.Request) -> str | None:
    """Return the bearer credential of a request, or None if it has none."""
    return parse_bearer(request.headers.get("Authorization", ""))


def parse_bearer(header: str) -> str | None:
    """Return the credential in an `Authorization` header, or None if the scheme is not `Bearer`."""
    kind, _, credential = header.partition(" ")
    return credential.strip() if kind.lower() == "bearer" else None


def check_single_authorization(headers: Sequence[str]) -> None:
    """Raise ApiError if a request has several `Authorization` headers.

    A proxy might check one of them and the server a different one.
    """
    if len(headers) > 1:
        raise field_error("Authorization", "must not be repeated")


def check_json(request: web.Request) -> None:
    """Raise ApiError unless the body is JSON, which browsers send across origins only after a preflight (CO-24)."""
    if request.content_type != JSON:
        raise field_error("Content-Type", f"must be {JSON}", status=415)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises ApiError if it contradicts its headers, as a truncated chunk does."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise field_error("Content-Encoding", f"must be one of {', '.join(ENCODINGS)}", status=415)
    try:
        if request.content.is_eof():
            body = await request.read()  # most bodies arrive together with the headers
        else:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
    except TimeoutError:
        raise field_error("body", f"must arrive within {BODY_TIMEOUT_S} seconds", status=408) from None
    except web.RequestPayloadError:
        raise _body_error() from None
    if encoding == "identity" or not body:
        return body
    bytes_max = request.client_max_size
    return await run_long(bytes_max, partial(_decompress, body, encoding, bytes_max))


def _decompress(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Decompress a body.

    Raises ApiError if it is malformed, and HTTPRequestEntityTooLarge as soon as it exceeds the limit.
    """
    # Some clients send deflate without the zlib header. The first byte of that header contains the method.
    has_header = body[0] & 0x0F == zlib.DEFLATED
    bits = _GZIP_BITS if encoding == "gzip" else zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(bits)
    try:
        found = decompressor.decompress(body, bytes_max + 1)
    except zlib.error:
        raise _body_error() from None
    if len(found) > bytes_max:
        raise web.HTTPRequestEntityTooLarge(max_size=bytes_max, actual_size=len(found))
    if not decompressor.eof or decompressor.unused_data:
        raise _body_error()
    return found


def _body_error() -> ApiError:
    return field_error("body", "does not match its headers")


def get_path_name(request: web.Request, name: str) -> str:
    """Return a name in the path, decoded once. Raises ApiError if it is malformed.

    aiohttp's `match_info` keeps invalid UTF-8 as it was sent and then decodes `%25`, so `%FF` and `%25FF` would be the
    same name.
    """
    resource = request.match_info.route.resource
    assert resource is not None  # noqa: S101 - a route with names has a resource
    place = resource.canonical.split("/").index(f"{{{name}}}")
    sent = request.rel_url.raw_path.split("/")[place]
    if _BAD_PERCENT.search(sent):
        raise field_error(name, "must encode % as %25 in the path")
    try:
        return unquote_to_bytes(sent.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise field_error(name, "must be percent-encoded UTF-8 in the path") from None


def parse_query(request: web.Request) -> list[tuple[str, str]]:
    """Return the query parameters as they were sent. Raises ApiError if the query is malformed.

    aiohttp's parser replaces invalid UTF-8 with U+FFFD, so the result could name a different partition.
    """
    try:
        return parse_qsl(
            request.rel_url.raw_query_string, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        is_text = isinstance(error, UnicodeDecodeError)
        message = "the query must be UTF-8" if is_text else f"the query must have at most {_FIELDS_MAX} parameters"
        raise ApiError(error_codes.BAD_REQUEST, message, field="query") from None


def parse_number(text: str, name: str) -> int:
    """Parse a whole number in a query. Raises ApiError if it is malformed."""
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) >= 2**53:
        raise field_error(name, "must be a whole number from 0 to 2^53−1")
    return int(text)


API_DESCRIPTIONS: Final = {
    "events": "Submit, read and follow events",
    "ledger": "Write transactions, read their results and prove them",
    "deltas": "Push and pull deltas of rows, and read the resulting rows",
    "chat": "Send, read and acknowledge messages of chats, and manage their members",
    "audit": "Read the administrative acts that the log has recorded",
    "operators": "Check and describe the server. Only `/metrics` and `/v1/stats` need a credential",
}
"""Purpose of each API, by the name that `Endpoint.api` contains."""

# --- operations ------------------------------------------------------------------------------------------

ANONYMOUS: Final = Principal(actor="", client_id=None, grants=parse_grants())
"""Principal of calls to public endpoints."""


def keep(value: Any, _: object) -> Any:
    """Return a parameter or a body unchanged."""
    return value


class Parameter(Field, frozen=True, kw_only=True):
    """One parameter of an endpoint.

    An absent required parameter is decoded as an empty string, so that the error names it. The schema has a
    description, and is an array if the parameter may be repeated.
    """

    place: Literal["query", "path", "header"] = "query"
    decode: Callable[[Any, str], Any] = keep
    """Converts the parameter's string, or list of strings. The second argument is its name, for errors."""
    example: Any = None
    """Example value in the OpenAPI document. Required parameters have one."""

    @property
    def is_repeated(self) -> bool:
        """Whether the parameter may occur several times."""
        return self.schema.get("type") == "array"


TICKET: Final = Parameter(
    name="ticket",
    schema={
        "type": "string",
        "description": "A ticket for this stream. It replaces the `Authorization` header, which `EventSource` cannot "
        "send. `POST` to the same path returns a ticket.",
    },
)


class RequestBody(Struct, frozen=True, kw_only=True):
    """JSON body of a request."""

    schema: str
    """Name of the body's schema in the OpenAPI document."""
    decode: Callable[[bytes, Principal], Any]
    """Decodes the body, in a thread if it is long. Raises ApiError."""
    example: Any
    """Example body in the OpenAPI document."""
    is_required: bool = True


class Call:
    """A request that has passed the checks of its endpoint."""

    def __init__(self, request: web.Request, caller: Caller, principal: Principal) -> None:
        self.request = request
        self.caller = caller
        self.principal = principal
        self.parameters: dict[str, Any] = {}
        self.sent_names: dict[str, str] = {}
        """The name under which each query parameter was sent, by its declared name."""
        self.body: Any = None
        """Decoded body, or None if an optional body is empty."""
        self.scope = ""
        """Result of `Endpoint.authorize`."""

    def get_sent_name(self, name: str) -> str:
        """Return the name under which a query parameter was sent: its current name or its previous one."""
        return self.sent_names.get(name, name)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a parameter, or its default."""
        return self.parameters[name]


class Reply(Struct, frozen=True):
    """An answer with a status other than 200."""

    status: int
    body: bytes | Mapping[str, Any]


Answer = bytes | Mapping[str, Any] | Reply | web.StreamResponse
WebSocketHandler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]


class Endpoint(Struct, frozen=True, kw_only=True):
    """One HTTP operation."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    api: str
    """Name of the API in metrics, and tag in the OpenAPI document."""
    name: str
    """The `operationId`."""
    summary: str
    description: str = ""
    handle: Callable[[Call], Awaitable[Answer]]
    """Answers the call. Raises ApiError, or OncelogError if the log fails."""
    responses: Mapping[int, Schema]
    """Successful answers in the OpenAPI document."""
    parameters: tuple[Parameter, ...] | None = ()
    """With None, parameters are neither read nor checked."""
    body: RequestBody | None = None
    authorize: Callable[[Call], str] | None = None
    """Checks access to the names in the parameters, both before and after the body is read. Raises ApiError. A handler
    whose access rules depend on the body checks them itself."""
    errors: tuple[int, ...] = ()
    """Error statuses that do not follow from the other fields."""
    is_public: bool = False
    """Whether the endpoint needs no credential."""
    list_stream_names: Callable[[Call], Sequence[str]] | None = None
    """For a stream only: returns the names that the stream reads, to which its tickets are bound. A stream lasts until
    the client closes it, counts towards the connection limit, and has the `TICKET` parameter."""
    serve_websocket: WebSocketHandler | None = None
    """Serves requests to upgrade to a WebSocket at the same path."""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream."""
        return self.list_stream_names is not None


class EndpointRouter:
    """Serves the endpoints of a server: checks each request, calls the handler, and encodes the answer."""

    def __init__(
        self,
        auth_gate: AuthGate,
        *,
        find_caller: Callable[[web.Request], Caller],
        admit_stream: Callable[[web.Request], Caller],
    ) -> None:
        self._auth_gate = auth_gate
        self._find_caller = find_caller
        self._admit_stream = admit_stream

    def add_routes(self, app: web.Application, endpoints: Iterable[Endpoint]) -> None:
        """Add a route for each endpoint."""
        for endpoint in endpoints:
            app.router.add_route(endpoint.method, endpoint.path, partial(self._serve, endpoint))
            if endpoint.method == "GET":
                app.router.add_route("HEAD", endpoint.path, partial(self._serve, endpoint))

    async def _serve(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        if endpoint.serve_websocket is not None and request.headers.get("Upgrade", "").lower() == "websocket":
            return await endpoint.serve_websocket(request, self._admit_stream(request))
        if endpoint.is_stream or not self._auth_gate.measures_latency:
            return await self._serve_call(endpoint, request)
        with RequestArrival():
            return await self._serve_call(endpoint, request)

    async def _serve_call(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        caller = self._admit_stream(request) if endpoint.is_stream else self._find_caller(request)
        call = Call(request, caller, ANONYMOUS)
        ticket = None
        if endpoint.is_stream and (text := _find_ticket(request)) is not None:
            call.principal, ticket = self._auth_gate.authenticate_ticket(text, caller)
        elif not endpoint.is_public:
            call.principal = self._auth_gate.authenticate(get_credential(request), caller)
        if endpoint.parameters is not None:
            # Most writes have no query string to parse.
            sent = _decode_query(call, endpoint.parameters) if request.rel_url.raw_query_string else {}
            call.parameters = {one.name: _parse_parameter(call, one, sent) for one in endpoint.parameters}
        if ticket is not None:
            _use_ticket(endpoint, call, ticket)
        _authorize(endpoint, call)
        if endpoint.body is not None:
            await self._read_body(endpoint, endpoint.body, call)
        try:
            answer = await endpoint.handle(call)
        except OncelogError as error:
            raise to_api_error(error, UNREADABLE if endpoint.method == "GET" else UNKNOWN_OUTCOME) from error
        return answer if isinstance(answer, web.StreamResponse) else self._respond(endpoint, answer)

    async def _read_body(self, endpoint: Endpoint, expected: RequestBody, call: Call) -> None:
        if expected.is_required or call.request.body_exists:
            check_json(call.request)
        body = await read_body(call.request)
        if body or expected.is_required:
            call.body = await run_long(len(body), partial(expected.decode, body, call.principal))
        # The credential may have expired or been revoked while the body arrived.
        call.principal = self._auth_gate.recheck_principal(call.principal)
        self._auth_gate.check_open()
        _authorize(endpoint, call)

    def _respond(self, endpoint: Endpoint, answer: bytes | Mapping[str, Any] | Reply) -> web.Response:
        status, content = (answer.status, answer.body) if isinstance(answer, Reply) else (200, answer)
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        counts = self._auth_gate.counts
        counts.requests[endpoint.api, "http", "ok"] += 1
        counts.bytes_sent += len(body)
        return web.Response(body=body, status=status, content_type=JSON)


def _find_ticket(request: web.Request) -> str | None:
    """Return the ticket of a request for a stream, or None if it has none."""
    if TICKET.name not in request.rel_url.raw_query_string:
        return None
    text = next((text for name, text in parse_query(request) if name == TICKET.name), None)
    if text is not None and "Authorization" in request.headers:
        raise field_error(TICKET.name, "must not be combined with the header Authorization")
    return text


def _use_ticket(endpoint: Endpoint, call: Call, ticket: Ticket) -> None:
    """Restrict the principal to the stream of its ticket. Raises ApiError if the ticket is for another stream."""
    assert endpoint.list_stream_names is not None  # noqa: S101 - only streams have tickets
    restricted = restrict_to_ticket(call.principal, ticket, endpoint.name, endpoint.list_stream_names(call))
    if restricted is None:
        raise field_error(TICKET.name, "is for another stream", error_codes.FORBIDDEN)
    call.principal = restricted


def _authorize(endpoint: Endpoint, call: Call) -> None:
    if endpoint.authorize is not None:
        call.scope = endpoint.authorize(call)


def _decode_query(call: Call, expected: tuple[Parameter, ...]) -> dict[str, Any]:
    """Return the undecoded values of all query parameters. Raises ApiError for an unknown or repeated one."""
    queries = [one for one in expected if one.place == "query"]
    by_name = {one.name: one for one in queries} | {one.previous_name: one for one in queries if one.previous_name}
    sent: dict[str, Any] = {}
    for name, text in parse_query(call.request):
        parameter = by_name.get(name)
        if parameter is None:
            known = ", ".join(one.name for one in queries) or "none"
            raise field_error(name, f"is not a parameter of this request, whose parameters are: {known}")
        if name != call.sent_names.setdefault(parameter.name, name):
            raise field_error(name, f"must not be combined with {call.sent_names[parameter.name]}")
        if parameter.is_repeated:
            sent.setdefault(parameter.name, []).append(text)
        elif parameter.name in sent:
            raise field_error(name, "must not be repeated")
        else:
            sent[parameter.name] = text
    return sent


def _parse_parameter(call: Call, parameter: Parameter, sent: Mapping[str, Any]) -> Any:
    name = parameter.name
    value: Any
    if parameter.place == "path":
        value = get_path_name(call.request, name)
    elif parameter.place == "header":
        value = call.request.headers.get(name) or None  # an empty header counts as absent
    else:
        value = sent.get(name)
    if value is None:
        if not parameter.is_required:
            return parameter.default
        value = [] if parameter.is_repeated else ""
    return parameter.convert(value, call.get_sent_name(name))
