"""ASGI middleware for the `Idempotency-Key` request header.

    app.add_middleware(IdempotencyMiddleware, log="app.db", scope=lambda connection: str(connection["user"].id))

The middleware stores the first response under a key (status, headers and body) before sending it. A retry gets the
stored response, marked with `Idempotent-Replayed: true`, and does not reach the application. Several worker processes
may share one file.

Install it behind authentication: `scope` returns the user to whom the key belongs, so that no user gets another user's
response. The middleware does not store responses after which a retry may succeed (429, 5xx; see `store_status`). If the
application raises, nothing is stored and the application handles the retry. docs/guides/idempotency-key.md has the
details.
"""

import asyncio
import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from oncelog.core.identity import scope_of
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.policy import KEY_BYTES_MAX, Retention
from oncelog.engine.answer_cache import WorkResult
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.engine.log import Log, open_log
from oncelog.errors import (
    BusyError,
    ConflictError,
    InFlightError,
    LeaseLostError,
    OncelogError,
    ResultErasedError,
)
from oncelog.idempotency.call_key import InFlight, build_leased_policy, build_work_factory
from oncelog.idempotency.http_request import Fingerprint, build_http_request, compute_fingerprint
from oncelog.idempotency.once import RETENTION_DEFAULT, RUN_S_MAX

logger: Final = logging.getLogger("oncelog.http")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
StoreStatus = Callable[[int], bool] | Iterable[int]
User = str | UUID | None
ScopeFunction = Callable[[Scope], User | Awaitable[User]]
Path = str | os.PathLike[str]
Headers = Sequence[tuple[bytes, bytes]]

HEADER: Final = b"idempotency-key"
REPLAYED: Final = (b"idempotent-replayed", b"true")
METHODS: Final = ("POST", "PATCH")
STATUSES: Final = range(200, 600)
"""Statuses of final responses."""
STORED_STATUSES: Final = frozenset(STATUSES) - {401, 403, 408, 425, 429} - frozenset(range(500, 600))
"""Statuses that are stored by default. Other responses depend on credentials, timing or faults, so a retry may
succeed."""
RETRY_AFTER_MS: Final = 1000
"""Retry delay while another request with the key is running. The expiry of its lease is no guide, because the lease is
renewed."""
_MIB: Final = 2**20
_BYPASS_EXTENSIONS: Final = frozenset(
    {"http.response.trailers", "http.response.pathsend", "http.response.zerocopysend"}
)
"""Server extensions that send a response body without passing it through the middleware."""
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Connection-specific headers (RFC 9110, 7.6.1), which a retry on a different connection must not receive."""
_KEY: Final = re.compile(
    rb'"(?P<quoted>(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"|(?P<bare>[\x21\x23-\x7e][\x21-\x7e]*)'
)
"""Value of the header: an RFC 8941 string, or visible ASCII characters without surrounding quotes."""
_ESCAPED: Final = re.compile(rb'\\(["\\])')
"""Escape sequence in an RFC 8941 string, which is printable ASCII with a backslash before quotes and backslashes."""
_PROBLEM: Final = "urn:oncelog:problem:"
_REFUSALS: Final[Mapping[type[OncelogError], tuple[int, str, str, int | None]]] = {
    ConflictError: (
        422,
        "key-reused",
        "This Idempotency-Key was used for another request. Use a new key for a new request.",
        None,
    ),
    InFlightError: (409, "in-flight", "A request with this Idempotency-Key is still being processed.", RETRY_AFTER_MS),
    ResultErasedError: (410, "answer-erased", "The request was processed; its response has been erased since.", None),
}
"""The problem response for each error that the log raises when it refuses a request."""
_BUSY_RESPONSES: Final = {
    "busy": (503, "busy", "Too many requests are waiting. Try again."),
    "rate_limited": (429, "rate-limited", "Too many new requests. Try again."),
    "read_only": (503, "read-only", "New requests are not accepted for now. Try again later."),
    "quota_exceeded": (507, "quota-exceeded", "A quota for new requests is used up. Try again later."),
}
"""The problem response for each reason of a `BusyError`. The application does not see the request."""


class _StoredResponse(Struct):
    """Head of a stored response, in JSON. The body follows a zero byte, which JSON cannot contain."""

    status: int
    headers: list[tuple[str, str]]
    is_whole: bool = True
    """False if the body was too large to be stored."""


@dataclass(eq=False)
class _Problem(Exception):  # noqa: N818 - it never leaves this module
    """An error response from the middleware itself, as application/problem+json."""

    status: int
    kind: str
    detail: str
    retry_after_ms: int | None = None


class IdempotencyMiddleware:
    """ASGI middleware that answers repeated requests from the log. See the module docstring."""

    def __init__(  # noqa: PLR0913 - keyword arguments, all but two with a safe default
        self,
        app: App,
        *,
        log: Log | Callable[[], Log] | Path,
        scope: ScopeFunction,
        methods: Iterable[str] = METHODS,
        required: bool = False,
        in_flight: InFlight = "raise",
        wait_s: float | None = None,
        retention: Retention = RETENTION_DEFAULT,
        name: str = "http",
        lease_s: float = 30,
        run_s_max: float = RUN_S_MAX,
        request_bytes_max: int = _MIB,
        answer_bytes_max: int = _MIB,
        store_status: StoreStatus = STORED_STATUSES,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """Store the responses of `app` in `log`, which is an open log, a function that returns one, or a log's path.

        A log given by its path is opened before the application's lifespan or with the first request, and closed after
        the lifespan.

        `scope` returns the authenticated user, as a string or a UUID, from a connection's ASGI scope. If it returns
        None, the request is passed on without checking its key. With `required`, requests of `methods` without a key
        are refused with 400. While another request with the key runs, the response is 409, or with `in_flight="wait"`
        the response to that request, after at most `wait_s`. Requests with a key and a body larger than
        `request_bytes_max` are refused with 413. A response larger than `answer_bytes_max` is sent but not stored: a
        retry gets a 409 that explains that the request was carried out.

        `store_status` is a collection of the statuses whose responses are stored, or a function that returns whether to
        store a status. After any other response, the application handles the next request with the key. `fingerprint`
        is a sync or async function that returns 1 to 64 bytes for an `HttpRequest`. Requests with the same key are
        equal if these bytes are equal. It may instead return a value, such as a pydantic model of the body. Requests
        with the same key are then equal if method, path and value are equal.
        """
        self._new_work = build_work_factory(in_flight, wait_s, lease_s, run_s_max)
        if not isinstance(log, Log | str | os.PathLike) and not callable(log):
            raise TypeError(
                f"log must be an open Log, a function that returns one, or a path, not {type(log).__name__}"
            )
        if isinstance(methods, str):
            raise TypeError("methods must be a list of names, not a single name")
        if not callable(scope):
            raise TypeError("scope must be a function that returns the user's name, or None, for an ASGI scope")
        if fingerprint is not None and not callable(fingerprint):
            raise TypeError(f"fingerprint must be a function or None, not {type(fingerprint).__name__}")
        for limit, value in (("request_bytes_max", request_bytes_max), ("answer_bytes_max", answer_bytes_max)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{limit} must be a whole number of at least 1, not {value!r}")
        self._app = app
        self._log_source = log
        self._own_log_task: asyncio.Task[Log] | None = None
        self._scope = scope
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required
        self._request_bytes_max = request_bytes_max
        self._answer_bytes_max = answer_bytes_max
        self._stored_statuses = _collect_stored_statuses(store_status)
        self._fingerprint = fingerprint
        self._policy = build_leased_policy(name, retention)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        if scope["type"] == "lifespan" and isinstance(self._log_source, str | os.PathLike):
            await self._handle_lifespan(self._log_source, scope, receive, send)
        elif scope["type"] != "http" or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
        else:
            try:
                await self._handle_request(scope, receive, send)
            except _Problem as problem:
                await _send_problem(send, problem)

    # --- a request

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = [value.strip() for name, value in scope["headers"] if name.lower() == HEADER]
        user = await self._get_user(scope) if values or self._required else None
        if user is None:
            await self._app(scope, receive, send)
            return
        key = _parse_key(values)
        body = await _read_body(receive, self._request_bytes_max)
        if body is None:
            return  # the client has disconnected
        work = self._new_work(
            policy=self._policy,
            scope=_build_stream_name(user),
            key=key,
            fingerprint=await compute_fingerprint(build_http_request(scope, body), self._fingerprint),
        )
        log, result_or_lease = await self._begin(work)
        if isinstance(result_or_lease, HeldLease):
            replay = _replay_message({"type": "http.request", "body": body, "more_body": False}, receive)
            await self._run_app(log, result_or_lease, scope, replay, send)
        else:
            await _replay_response(send, result_or_lease)

    async def _get_user(self, scope: Scope) -> str | None:
        user = self._scope(scope)
        user = await user if inspect.isawaitable(user) else user
        if isinstance(user, UUID):
            return str(user)
        if user is not None and not isinstance(user, str):
            raise TypeError(f"scope must return a string, a UUID or None, not {type(user).__name__}")
        return user

    async def _begin(self, work: Work) -> tuple[Log, WorkResult | HeldLease]:
        try:
            log = await self._get_log()
            return log, log.leases.recall(work) or await log.leases.begin(work)
        except BusyError as error:
            raise _Problem(*_BUSY_RESPONSES[error.reason], error.retry_after_ms) from error
        except OncelogError as error:
            if type(error) not in _REFUSALS:
                logger.exception("a request with a key was not passed to the application")
                raise _build_unavailable("The request was not processed. Try again.") from error
            raise _Problem(*_REFUSALS[type(error)]) from error

    async def _run_app(self, log: Log, lease: HeldLease, scope: Scope, receive: Receive, send: Send) -> None:
        # Change the scope in place, because outer middleware may read what the application adds to it, such as the
        # route.
        extensions = scope.get("extensions") or {}
        if not _BYPASS_EXTENSIONS.isdisjoint(extensions):
            scope["extensions"] = {
                name: extension for name, extension in extensions.items() if name not in _BYPASS_EXTENSIONS
            }
        answer = _ResponseRecorder(log, lease, send, self._stored_statuses, self._answer_bytes_max)
        try:
            await self._app(scope, receive, answer)
        finally:
            # Without a response, release the lease, so that waiting requests stop waiting.
            if not answer.is_settled:
                await log.leases.release(lease)

    # --- the log

    async def _get_log(self) -> Log:
        source = self._log_source
        if isinstance(source, Log):
            return source
        if isinstance(source, str | os.PathLike):
            return await self._open_own_log(source)
        found: object = source()
        if not isinstance(found, Log):
            raise TypeError(f"log must return a Log opened with `oncelog.open`, not {type(found).__name__}")
        return found

    async def _open_own_log(self, path: Path) -> Log:
        """Return the log of this event loop. Tests may run each request in its own event loop."""
        loop = asyncio.get_running_loop()
        open_task = self._own_log_task
        if open_task is None or open_task.get_loop() is not loop:
            open_task = self._own_log_task = loop.create_task(open_log(path, policies=[self._policy]).__aenter__())
        try:
            return await asyncio.shield(open_task)  # a disconnected client must not cancel it for other requests
        except BaseException:
            if self._own_log_task is open_task and open_task.done():
                self._own_log_task = None  # the next request retries
            raise

    async def _handle_lifespan(self, path: Path, scope: Scope, receive: Receive, send: Send) -> None:
        startup = await receive()
        try:
            log = await self._open_own_log(path)
        except OncelogError as error:
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return

        async def forward(message: Message) -> None:
            # Close the log before the last message, because the event loop may stop after it.
            if message["type"] != "lifespan.startup.complete":
                self._own_log_task = None
                await log.close()
            await send(message)

        await self._app(scope, _replay_message(startup, receive), forward)


def _replay_message(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that first returns an already received message."""
    messages = [message]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _ResponseRecorder:
    """Collects the application's response, stores it and then sends it."""

    def __init__(self, log: Log, lease: HeldLease, send: Send, stored_statuses: frozenset[int], bytes_max: int) -> None:
        self._log = log
        self._lease = lease
        self._send = send
        self._stored_statuses = stored_statuses
        self._bytes_max = bytes_max
        self._start: Message | None = None
        self._buffer = bytearray()
        self.is_settled = False
        """Whether the lease has ended. Further messages from the application are then sent directly."""
        self._is_replaced = False
        """Whether the client was sent a problem instead of the response."""

    async def __call__(self, message: Message) -> None:
        if self._is_replaced:
            return
        if self.is_settled or message["type"] not in ("http.response.start", "http.response.body"):
            await self._send(message)
        elif message["type"] == "http.response.body":
            await self._handle_body(message)
        elif self._start is not None:
            raise RuntimeError("the application started its response twice")
        else:
            # Copy the message, because it is sent later, and the headers may be an iterator.
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            self._start = {**message, "headers": headers}

    async def _handle_body(self, message: Message) -> None:
        start = self._start
        if start is None:
            raise RuntimeError("the application sent a response body before the response start")
        self._buffer += message.get("body", b"")
        is_last = not message.get("more_body", False)
        is_too_large = len(self._buffer) > self._bytes_max
        is_stored = start["status"] in self._stored_statuses
        if is_stored and not is_last and not is_too_large:
            return
        body = bytes(self._buffer)
        self._buffer.clear()
        try:
            if is_stored:
                await self._store_response(start, None if is_too_large else body)
            else:
                self.is_settled = True
                await self._log.leases.release(self._lease)
        except _Problem as problem:
            self._is_replaced = True
            await _send_problem(self._send, problem)
            return
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _store_response(self, start: Message, body: bytes | None) -> None:
        """Store the response, or only its status if the body is None because it is too large."""
        encoded = _encode_response(start, body)
        if len(encoded) > self._log.limits.body_bytes_max:
            encoded = _encode_response(start, None)
        self.is_settled = True
        try:
            await self._log.leases.complete(self._lease, encoded)
        except LeaseLostError as error:
            detail = "A retry took over this request after its lease had expired. Repeat the request for its outcome."
            raise _Problem(409, "taken-over", detail, RETRY_AFTER_MS) from error
        except OncelogError as error:
            logger.exception("a response was not stored")
            detail = "The request was processed, but its response was not stored. Try again with the same key."
            raise _build_unavailable(detail) from error


# --- requests ----------------------------------------------------------------------------------------


def _parse_key(values: Sequence[bytes]) -> bytes:
    if not values:
        raise _Problem(400, "key-missing", "This request needs an Idempotency-Key header.")
    if len(values) > 1:
        raise _Problem(400, "key-invalid", "There must be one Idempotency-Key header, not several.")
    found = _KEY.fullmatch(values[0])
    key = b"" if found is None else found["bare"] or _ESCAPED.sub(rb"\1", found["quoted"])
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        detail = (
            f"An Idempotency-Key must have 1 to {KEY_BYTES_MAX} visible ASCII characters, or be a quoted string of "
            "printable ASCII characters."
        )
        raise _Problem(400, "key-invalid", detail)
    return key


def _build_stream_name(user: str) -> str:
    """Return a user's stream. A user name that cannot be part of a stream name is hashed instead of refused."""
    stream = scope_of("http", user)
    if len(stream) <= NAME_CHARACTERS_MAX and stream.isprintable():
        return stream
    return scope_of("http", "sha256", sha256(user.encode("utf-8", "surrogatepass")).hexdigest())


def _collect_stored_statuses(store_status: StoreStatus) -> frozenset[int]:
    """Return the statuses to store. Calls a function for every status, so that its faults surface at startup."""
    if callable(store_status):
        found = {status: store_status(status) for status in STATUSES}
        for status, is_stored in found.items():
            if not isinstance(is_stored, bool):
                raise TypeError(f"store_status must return True or False, not {is_stored!r} for {status}")
        stored = frozenset(status for status, is_stored in found.items() if is_stored)
    elif isinstance(store_status, str | bytes) or not isinstance(store_status, Iterable):
        raise TypeError(f"store_status must be a function or a set of statuses, not {type(store_status).__name__}")
    else:
        stored = frozenset(store_status)
        for status in stored:
            if isinstance(status, bool) or not isinstance(status, int) or status not in STATUSES:
                raise ValueError(f"store_status must have statuses from 200 to 599, not {status!r}")
    if not stored:
        raise ValueError("store_status must have at least one status: otherwise the application handles every retry")
    return stored


async def _read_body(receive: Receive, bytes_max: int) -> bytes | None:
    """Return the body of a request, or None if the client disconnected before sending all of it."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > bytes_max:
            detail = f"With an Idempotency-Key a request may have at most {bytes_max} bytes."
            raise _Problem(413, "request-too-large", detail)
        if not message.get("more_body", False):
            return bytes(body)


# --- answers -----------------------------------------------------------------------------------------


def _encode_response(start: Message, body: bytes | None) -> bytes:
    if body is None:
        return msgspec.json.encode(_StoredResponse(start["status"], [], is_whole=False)) + b"\0"
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in _filter_end_to_end(start["headers"])
    ]
    return msgspec.json.encode(_StoredResponse(start["status"], headers)) + b"\0" + body


def _filter_end_to_end(headers: Headers) -> Headers:
    """Return the headers without hop-by-hop headers, including the names that the `Connection` header lists."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection").lower().split(b",")
    of_connection = _HOP_BY_HOP.union(name.strip() for name in named)
    return [(name, value) for name, value in headers if name.lower() not in of_connection]


async def _replay_response(send: Send, result: WorkResult) -> None:
    head, _, body = result.body.partition(b"\0")
    answer = msgspec.json.decode(head, type=_StoredResponse)
    if not answer.is_whole:
        detail = f"The request was processed ({answer.status}); its response was too large to be stored."
        raise _Problem(409, "answer-not-kept", detail)
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await _send_response(send, answer.status, [*headers, REPLAYED], body)


async def _send_problem(send: Send, problem: _Problem) -> None:
    document: Mapping[str, object] = {
        "type": f"{_PROBLEM}{problem.kind}",
        "title": problem.kind.replace("-", " "),
        "status": problem.status,
        "detail": problem.detail,
    }
    body = msgspec.json.encode(document)
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if problem.retry_after_ms is not None:
        headers.append((b"retry-after", str(max(1, -(-problem.retry_after_ms // 1000))).encode()))
    await _send_response(send, problem.status, headers, body)


async def _send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _build_unavailable(detail: str) -> _Problem:
    return _Problem(503, "log-unavailable", detail, RETRY_AFTER_MS)
