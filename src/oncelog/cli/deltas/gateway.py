"""A gateway of a server, as the commands for deltas speak to it: over HTTP, each request until it is answered."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import typer
from msgspec import Raw, Struct

from oncelog.cli.remote import Remote, check_text, translate_decode_errors
from oncelog.cli.retries import Retrier
from oncelog.client.runtime.websocket import status_error
from oncelog.core.deltas import encode_push, find_gateway_fault
from oncelog.core.limits import CLOCK_DRIFT_MS_MAX
from oncelog.error_codes import CLOCK_DRIFT, RATE_LIMITED, TOO_LARGE
from oncelog.errors import OncelogError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

REQUEST_BYTES_MAX: Final = 1024 * 1024
"""A request with more is divided: servers take 4 MiB unless told otherwise. One delta is never divided."""
RATE_DIVIDE_S: Final = 2.0
"""A push that a limit of new deltas holds back for longer is divided: what is smaller finds room sooner."""
HEARTBEAT_TIMEOUT_S: Final = 90.0
"""How long nothing may come where a heartbeat should."""
T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="GATEWAY", help="The gateway's name.", show_default=False)]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to try each request.")]


class DeltasRefusedError(ServerRefusedError):
    """The Deltas API refused the request."""

    def __init__(
        self, code: str, message: str, retry_after_ms: int = 0, index: int | None = None, *, is_compacted: bool = False
    ) -> None:
        super().__init__(code, message, retry_after_ms)
        self.index = index
        """Of the delta at fault, where one is."""
        self.is_compacted = is_compacted
        """The deltas after the cursor are compacted: only a snapshot has their rows."""

    @property
    def is_transient(self) -> bool:
        """Whether the same may be sent again later: also from a clock that is only a little too far ahead."""
        is_ahead = self.code == CLOCK_DRIFT and 0 < self.retry_after_ms <= CLOCK_DRIFT_MS_MAX
        return is_ahead or super().is_transient


class PushTooLargeError(OncelogError):
    """A push that the server would take in smaller parts only."""


class _ErrorBody(Struct, frozen=True, rename="camel"):
    error: str
    code: str
    index: int | None = None
    retry_after_ms: int = 0
    snapshot: bool = False


class DeltaResult(Struct, frozen=True, rename="camel"):
    """Of a pushed delta."""

    delta_id: str
    sequence: int
    duplicate: bool


class _PushResults(Struct, frozen=True):
    results: list[Raw]


_ERROR_DECODER: Final = msgspec.json.Decoder(_ErrorBody)
_PUSH_RESULTS_DECODER: Final = msgspec.json.Decoder(_PushResults)
_RESULT_DECODER: Final = msgspec.json.Decoder(DeltaResult)


class Gateway:
    """`async with` opens and closes its connections."""

    def __init__(self, remote: Remote, name: str, timeout_s: float) -> None:
        fault = find_gateway_fault(check_text(name, "GATEWAY"))
        if fault is not None:
            raise OncelogError(f"GATEWAY {fault}")
        self.remote = remote
        self._url = f"{remote.url}/v1/sync/{quote(name, safe='')}/"
        self._retrier = Retrier(remote, timeout_s)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Gateway":
        import aiohttp  # noqa: PLC0415 - what the library alone does not need

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def has_retried(self) -> bool:
        """Whether a request may have been taken although it was refused later."""
        return self._retrier.has_retried

    async def get(self, kind: type[T], path: str, **parameters: str | int | None) -> T:
        """An answer. Raises GaveUpError, or the refusal."""
        answer = await self._retrier.run(lambda: self._request_once("GET", path, parameters))
        return self._decode(answer, kind)

    async def post(self, kind: type[T], path: str, body: bytes) -> T:
        """An answer. Raises GaveUpError, or the refusal."""
        answer = await self._retrier.run(lambda: self._request_once("POST", path, {}, body))
        return self._decode(answer, kind)

    async def push(self, deltas: Sequence[bytes], *, can_divide: bool = False) -> list[tuple[Raw, DeltaResult]]:
        """Pushes deltas under their ids until they are answered: the results as they came, and read.

        Raises as `post` does; and PushTooLargeError, if the caller divides what exceeds the limits of the server.
        """
        body, loop = encode_push(deltas), asyncio.get_running_loop()
        limited_s: float | None = None

        async def push_once() -> bytes:
            nonlocal limited_s
            sent_s = loop.time()
            try:
                return await self._request_once("POST", "push", {}, body)
            except DeltasRefusedError as error:
                is_too_much = error.code == TOO_LARGE
                if error.code == RATE_LIMITED:
                    # From the first refusal to when it was sent again: an answer that was long on its way is no sign.
                    held_back_s = 0.0 if limited_s is None else sent_s - limited_s
                    is_too_much = max(held_back_s, error.retry_after_ms / 1000) > RATE_DIVIDE_S
                    limited_s = loop.time() if limited_s is None else limited_s
                if can_divide and is_too_much and len(deltas) > 1:
                    raise PushTooLargeError(str(error)) from error
                raise

        raws = self._decode(await self._retrier.run(push_once), _PushResults).results
        if len(raws) != len(deltas):
            raise OncelogError(f"{self.remote.url} has answered {len(deltas)} deltas with {len(raws)} results")
        with translate_decode_errors(self.remote):
            return [(raw, _RESULT_DECODER.decode(raw)) for raw in raws]

    async def open_live_stream(self, since: int, epoch: str) -> "aiohttp.ClientResponse":
        """A stream of server-sent events, to be closed. Raises LostError or ServerRefusedError."""
        import aiohttp  # noqa: PLC0415 - as above

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HEARTBEAT_TIMEOUT_S, sock_read=HEARTBEAT_TIMEOUT_S)
        response = await self._session.get(
            self._build_url("live", {"since": since, "epoch": epoch or None}),
            headers=self.remote.headers,
            timeout=timeout,
        )
        if response.status != 200:
            async with response:
                raise _build_refusal(response.status, response.headers.get("Retry-After"), await response.read())
        return response

    async def _request_once(
        self, method: str, path: str, parameters: dict[str, str | int | None], body: bytes | None = None
    ) -> bytes:
        headers = dict(self.remote.headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = self._build_url(path, parameters)
        async with self._session.request(method, url, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise _build_refusal(response.status, response.headers.get("Retry-After"), answer)
        return answer

    def _build_url(self, path: str, parameters: dict[str, str | int | None]) -> Any:
        from yarl import URL  # noqa: PLC0415 - aiohttp brings it

        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        return URL(self._url + path + (f"?{query}" if query else ""), encoded=True)

    def _decode(self, answer: bytes, kind: type[T]) -> T:
        with translate_decode_errors(self.remote):
            return msgspec.json.decode(answer, type=kind)


def decode_error(payload: bytes) -> DeltasRefusedError:
    """Decode an error of the Deltas API. Raises msgspec.MsgspecError for a malformed one."""
    error = _ERROR_DECODER.decode(payload)
    code = error.code.lower()
    return DeltasRefusedError(code, error.error, error.retry_after_ms, error.index, is_compacted=error.snapshot)


def _build_refusal(status: int, retry_after: str | None, answer: bytes) -> ServerRefusedError:
    try:
        return decode_error(answer)
    except msgspec.MsgspecError:  # the words of a proxy
        error = status_error(status)
        if status == 413:
            return DeltasRefusedError(TOO_LARGE, "HTTP status 413")
        if retry_after is not None and retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 6:
            error.retry_after_ms = 1000 * int(retry_after)
        return error
