"""ASGI middleware for the `Idempotency-Key` request header.

    app.add_middleware(IdempotencyMiddleware, log="app.db", scope=lambda connection: str(connection["user"].id))

The first answer under a key is kept, with status, headers and body, before it is sent; a retry gets it again, marked
with `Idempotent-Replayed: true`, and the application does not see it. Several worker processes may share one file.

It must stand behind the authentication: `scope` returns the user whose key it is, so that no user gets the answer of
another one. Answers after which a retry may succeed (429, 5xx; see `store_status`) are not kept, nor is anything if the
application raises: then the retry is carried out. docs/guides/idempotency-key.md has the details.
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
from oncelog.idempotency.call_key import InFlight, build_leased_policy, check_wait_options
from oncelog.idempotency.http_request import Fingerprint, build_http_request, compute_fingerprint
from oncelog.idempotency.once import RETENTION_DEFAULT, RUN_S_MAX

logger: Final = logging.getLogger("oncelog.http")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
StoreStatus = Callable[[int], bool] | Iterable[int]
ScopeFunction = Callable[[Scope], str | Awaitable[str | None] | None]
Path = str | os.PathLike[str]
Headers = Sequence[tuple[bytes, bytes]]

HEADER: Final = b"idempotency-key"
REPLAYED: Final = (b"idempotent-replayed", b"true")
METHODS: Final = ("POST", "PATCH")
STATUSES: Final = range(200, 600)
"""Statuses of final responses."""
STORED_STATUSES: Final = frozenset(STATUSES) - {401, 403, 408, 425, 429} - frozenset(range(500, 600))
"""Stored by default. The others depend on credentials, on time or on a fault, so that a retry may succeed."""
RETRY_AFTER_MS: Final = 1000
"""For what is under way. When its lease ends says nothing about it: that is renewed for as long as it takes."""
_MIB: Final = 2**20
_BYPASS_EXTENSIONS: Final = frozenset(
    {"http.response.trailers", "http.response.pathsend", "http.response.zerocopysend"}
)
"""Extensions by which an answer would pass by those who must keep it."""
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
"""Headers of a connection (RFC 9110, 7.6.1): a retry comes on another one."""
_QUOTED: Final = re.compile(rb'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPED: Final = re.compile(rb'\\(["\\])')
"""A string of RFC 8941: printable ASCII, with a backslash before quotes and backslashes."""
_BARE: Final = re.compile(rb"[\x21-\x7e]+")
_PROBLEM: Final = "urn:oncelog:problem:"
_REFUSALS: Final[Mapping[type[OncelogError], tuple[int, str, str, int | None]]] = {
    ConflictError: (
        422,
        "key-reused",
        "This Idempotency-Key was used for another request. Use a new key for a new request.",
        None,
    ),
    InFlightError: (409, "in-flight", "A request with this Idempotency-Key is being carried out.", RETRY_AFTER_MS),
    ResultErasedError: (410, "answer-erased", "The request was carried out; its answer has been erased since.", None),
}
"""Problems by the error with which the log refuses a request."""
_BUSY_RESPONSES: Final = {
    "busy": (503, "busy", "Too many requests are waiting. Try again."),
    "rate_limited": (429, "rate-limited", "Too many new requests. Try again."),
    "read_only": (503, "read-only", "No new requests are carried out for now. Try again later."),
    "quota_exceeded": (507, "quota-exceeded", "There is no more room for new requests. Try again later."),
}
"""Problems of new requests that are not carried out, by the reason of a `BusyError`."""


class _StoredResponse(Struct):
    """An answer as it is kept: its start, then its body behind a zero byte (JSON has none)."""

    status: int
    headers: list[tuple[str, str]]
    is_whole: bool = True
    """False if the body was too large to be kept."""


@dataclass(eq=False)
class _Problem(Exception):  # noqa: N818 - it never leaves this module
    """Error response of the middleware itself, as application/problem+json."""

    status: int
    kind: str
    detail: str
    retry_after_ms: int | None = None


class IdempotencyMiddleware:
    """Around an ASGI application. See the module's text."""

    def __init__(  # noqa: PLR0913 - each with a default that is safe
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
        """Keeps the answers of `app` in `log`: one that is open, a function that gives it, or the path of one.

        One that is given by its path is opened before the application's lifespan, or else with the first request, and
        closed after the lifespan.

        `scope` gets the connection's ASGI scope and says whose key it is, the authenticated user's; None leaves the
        request alone, whatever its key. `required` answers requests of `methods` that have no key with 400. While
        another request with the key is under way the answer is 409, or with `in_flight="wait"` that request's, for
        which it waits `wait_s` at most. Requests with a key and more than `request_bytes_max` are answered with 413. A
        larger answer than `answer_bytes_max` is sent, but a retry is only told that the request was carried out (409).

        `store_status` is the statuses whose answers are stored, or a function that returns whether a status is one of
        them. After any other answer the next request with the key is carried out. `fingerprint` is a function, sync or
        async, from an `HttpRequest` to 1 to 64 bytes: requests under one key are the same if these are equal.
        """
        self._wait_options = check_wait_options(in_flight, wait_s, lease_s, run_s_max)
        if not isinstance(log, Log | str | os.PathLike) and not callable(log):
            raise TypeError(f"log is an open Log, a function that gives one, or a path, not {type(log).__name__}")
        if isinstance(methods, str):
            raise TypeError("methods is a list of names, not one of them")
        if not callable(scope):
            raise TypeError("scope is a function from the ASGI scope to the name of the user, or None")
        if fingerprint is not None and not callable(fingerprint):
            raise TypeError(f"fingerprint must be a function or None, not {type(fingerprint).__name__}")
        for limit, value in (("request_bytes_max", request_bytes_max), ("answer_bytes_max", answer_bytes_max)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{limit} must be a whole number from 1 on, not {value!r}")
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
        """As ASGI says."""
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
            return  # the client has gone
        work = Work(
            policy=self._policy,
            scope=_build_stream_name(user),
            key=key,
            fingerprint=await compute_fingerprint(build_http_request(scope, body), self._fingerprint),
            **self._wait_options,
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
        if user is not None and not isinstance(user, str):
            raise TypeError(f"scope must give a text or None, not {type(user).__name__}")
        return user

    async def _begin(self, work: Work) -> tuple[Log, WorkResult | HeldLease]:
        try:
            log = await self._get_log()
            return log, log.leases.recall(work) or await log.leases.begin(work)
        except BusyError as error:
            raise _Problem(*_BUSY_RESPONSES[error.reason], error.retry_after_ms) from error
        except OncelogError as error:
            if type(error) not in _REFUSALS:
                logger.exception("a request could not be begun")
                raise _build_unavailable("The request was not carried out. Try again.") from error
            raise _Problem(*_REFUSALS[type(error)]) from error

    async def _run_app(self, log: Log, lease: HeldLease, scope: Scope, receive: Receive, send: Send) -> None:
        # In place: those outside may look into the scope afterwards for what the application put there, the route.
        extensions = scope.get("extensions") or {}
        if not _BYPASS_EXTENSIONS.isdisjoint(extensions):
            scope["extensions"] = {
                name: extension for name, extension in extensions.items() if name not in _BYPASS_EXTENSIONS
            }
        answer = _ResponseRecorder(log, lease, send, self._stored_statuses, self._answer_bytes_max)
        try:
            await self._app(scope, receive, answer)
        finally:
            # Nobody may wait for what will not come; and what was kept already stays kept.
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
            raise TypeError(f"log must give a Log of `oncelog.open`, not {type(found).__name__}")
        return found

    async def _open_own_log(self, path: Path) -> Log:
        """The log of this event loop. An application that has none of its own (tests) may come with one a request."""
        loop = asyncio.get_running_loop()
        open_task = self._own_log_task
        if open_task is None or open_task.get_loop() is not loop:
            open_task = self._own_log_task = loop.create_task(open_log(path, policies=[self._policy]).__aenter__())
        try:
            return await asyncio.shield(open_task)  # a client that goes away does not take it from the others
        except BaseException:
            if self._own_log_task is open_task and open_task.done():
                self._own_log_task = None  # the next request tries again
            raise

    async def _handle_lifespan(self, path: Path, scope: Scope, receive: Receive, send: Send) -> None:
        startup = await receive()
        try:
            log = await self._open_own_log(path)
        except OncelogError as error:
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return

        async def forward(message: Message) -> None:
            if message["type"] != "lifespan.startup.complete":  # then it is the end, and the loop may not go on after
                self._own_log_task = None
                await log.close()
            await send(message)

        await self._app(scope, _replay_message(startup, receive), forward)


def _replay_message(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that returns a message that was received already, and then the following ones."""
    messages = [message]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _ResponseRecorder:
    """Holds the application's answer until it is whole and durable, then sends it."""

    def __init__(self, log: Log, lease: HeldLease, send: Send, stored_statuses: frozenset[int], bytes_max: int) -> None:
        self._log = log
        self._lease = lease
        self._send = send
        self._stored_statuses = stored_statuses
        self._bytes_max = bytes_max
        self._start: Message | None = None
        self._buffer = bytearray()
        self.is_settled = False
        """Kept, or given back: what the application sends from now on goes straight out."""
        self._is_replaced = False
        """The client was told something else in its place."""

    async def __call__(self, message: Message) -> None:
        if self._is_replaced:
            return
        if self.is_settled or message["type"] not in ("http.response.start", "http.response.body"):
            await self._send(message)
        elif message["type"] == "http.response.body":
            await self._handle_body(message)
        elif self._start is not None:
            raise RuntimeError("the application started its answer twice")
        else:
            # A copy, since it is sent later; and headers may be something that can be gone through once.
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            self._start = {**message, "headers": headers}

    async def _handle_body(self, message: Message) -> None:
        start = self._start
        if start is None:
            raise RuntimeError("the application sent a body before its start")
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
        """Store the answer; without a body, which was too large, only that there was one."""
        encoded = _encode_response(start, body)
        if len(encoded) > self._log.limits.body_bytes_max:
            encoded = _encode_response(start, None)
        self.is_settled = True
        try:
            await self._log.leases.complete(self._lease, encoded)
        except LeaseLostError as error:
            detail = "This took so long that a retry has taken over. Ask again for its outcome."
            raise _Problem(409, "taken-over", detail, RETRY_AFTER_MS) from error
        except OncelogError as error:
            logger.exception("an answer could not be kept")
            detail = "The request was carried out, but its answer could not be kept. Try again with the same key."
            raise _build_unavailable(detail) from error


# --- requests ----------------------------------------------------------------------------------------


def _parse_key(values: Sequence[bytes]) -> bytes:
    if not values:
        raise _Problem(400, "key-missing", "This request needs an Idempotency-Key header.")
    if len(values) > 1:
        raise _Problem(400, "key-invalid", "There must be one Idempotency-Key header, not several.")
    key = values[0]
    if key.startswith(b'"'):
        quoted = _QUOTED.fullmatch(key)
        key = b"" if quoted is None else _ESCAPED.sub(rb"\1", quoted[1])
    elif not _BARE.fullmatch(key):
        key = b""
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        detail = (
            f"An Idempotency-Key must have 1 to {KEY_BYTES_MAX} visible ASCII characters, or be a quoted string of "
            "printable ASCII characters."
        )
        raise _Problem(400, "key-invalid", detail)
    return key


def _build_stream_name(user: str) -> str:
    """Names of users that cannot be part of a stream's are hashed, so that there is none that is refused."""
    stream = scope_of("http", user)
    if len(stream) <= NAME_CHARACTERS_MAX and stream.isprintable():
        return stream
    return scope_of("http", "sha256", sha256(user.encode("utf-8", "surrogatepass")).hexdigest())


def _collect_stored_statuses(store_status: StoreStatus) -> frozenset[int]:
    """Return the statuses to store. A function is asked for all of them here, so that its faults show at the start."""
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
        raise ValueError("store_status must have at least one status: otherwise every retry is carried out")
    return stored


async def _read_body(receive: Receive, bytes_max: int) -> bytes | None:
    """None if the client went away before it had sent everything."""
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
    """Without those of the connection, and those that it names as its own."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection").lower().split(b",")
    of_connection = _HOP_BY_HOP.union(name.strip() for name in named)
    return [(name, value) for name, value in headers if name.lower() not in of_connection]


async def _replay_response(send: Send, result: WorkResult) -> None:
    head, _, body = result.body.partition(b"\0")
    answer = msgspec.json.decode(head, type=_StoredResponse)
    if not answer.is_whole:
        detail = f"The request was carried out ({answer.status}); its answer was too large to be kept."
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
