"""Connections, answers and retries of the commands that use a server.

A request or a connection fails with one of two errors: `LostError` if the connection was lost, after which the command
may resend the same request, or `ServerRefusedError` with the server's reason.
"""

import asyncio
import os
import random
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Annotated, Any, Final, TypeVar
from uuid import uuid4

import msgspec
import typer
from msgspec import Raw, Struct, defstruct
from msgspec.json import Decoder

from oncelog.cli.server_options import Remote
from oncelog.cli.terminal import EXIT_CANNOT_READ, print_message
from oncelog.client.events import codec
from oncelog.client.events.codec import Envelope
from oncelog.client.runtime.backoff import Pauses, RetryPause, run_until_first_ends
from oncelog.client.runtime.http import (
    EVENTS_PATH,
    HttpClient,
    WebSocket,
    translate_errors,
)
from oncelog.client.runtime.values import LIMIT_MAX, MIB, BaseLimits, ConnectionLimits
from oncelog.core.canonical import is_unicode
from oncelog.error_codes import BAD_REQUEST, HISTORY_CHANGED
from oncelog.error_translation import translate_raised
from oncelog.errors import LostError, OncelogError, ServerRefusedError

CONNECT_TIMEOUT_S: Final = 10.0
HEARTBEAT_MS: Final = 30_000
MESSAGE_BYTES_MAX: Final = 1024 * MIB
"""Larger than any page, because the server limits its pages."""
_CONNECT_ID: Final = "connect"
PAUSE_LIMITS: Final = BaseLimits(pause_ms_min=100, pause_ms_max=5000, retry_after_ms_max=LIMIT_MAX)
"""Commands wait as long as the server requests, or give up immediately if that exceeds their deadline."""
T = TypeVar("T")

Partitions = Annotated[
    list[str] | None, typer.Option("--partition", metavar="NAME", help="A partition; may be repeated.")
]
ClientId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Client id. Default: the client of the API key or token."),
]
AsJsonLines = Annotated[
    bool | None,
    typer.Option("--json/--pretty", help="One JSON object per line, or readable lines (the default on a terminal)."),
]


def check_text(text: str, option: str) -> str:
    """Return the text of an argument. Raises OncelogError if the terminal sent bytes that are not UTF-8."""
    if not is_unicode(text):
        raise OncelogError(f"{option} is not UTF-8")
    return text


def check_client_id(client_id: str | None) -> str | None:
    """Return the value of --client-id. Raises OncelogError like `check_text`."""
    return None if client_id is None else check_text(client_id, "--client-id")


# --- wire errors ------------------------------------------------------------------------------------------


def translate_decode_errors(remote: Remote) -> AbstractContextManager[None]:
    """Raise OncelogError for an answer that cannot be decoded."""
    return translate_raised(
        msgspec.MsgspecError,
        lambda error: OncelogError(f"{remote.url} does not answer like an Oncelog server: {error}"),
    )


class _Results(Struct, frozen=True):
    results: list[Raw]


def decode_results(remote: Remote, answer: bytes, kind: type[T], count: int, name: str) -> list[tuple[Raw, T]]:
    """Decode the results of a request with `count` items, and return each as received and decoded.

    `name` is the plural of an item in errors.
    """
    with translate_decode_errors(remote):
        results = msgspec.json.decode(answer, type=_Results).results
        if len(results) != count:
            raise OncelogError(f"{remote.url} answered {count} {name} with {len(results)} results")
        return [(raw, msgspec.json.decode(raw, type=kind)) for raw in results]


def decode_refusal(payload: bytes | Raw) -> ServerRefusedError:
    """Decode an error from the server. Raises msgspec.MsgspecError if it is malformed."""
    error = codec.decode_error(payload)
    return ServerRefusedError(error.code, error.message, error.details.retry_after_ms)


async def run_while_output_open(work: Awaitable[None]) -> None:
    """Wait until the work is done.

    If standard output is a pipe, raises BrokenPipeError as soon as the reader closes it.
    """
    loop, descriptor, closed = asyncio.get_running_loop(), sys.stdout.fileno(), asyncio.Event()
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    if is_pipe:
        loop.add_reader(descriptor, closed.set)  # the writing end becomes readable when the reader closes the pipe
    try:
        await run_until_first_ends([work, closed.wait()])
    finally:
        if is_pipe:
            loop.remove_reader(descriptor)
    if closed.is_set():
        raise BrokenPipeError


# --- connections ------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_client(remote: Remote, answer_timeout_s: float = 60.0) -> AsyncIterator[HttpClient]:
    """Open an HTTP client for requests and WebSockets to a server."""
    limits = ConnectionLimits(
        message_bytes_max=MESSAGE_BYTES_MAX,
        answer_timeout_ms=max(1, round(1000 * answer_timeout_s)),
        heartbeat_ms=HEARTBEAT_MS,
        connect_timeout_ms=round(1000 * CONNECT_TIMEOUT_S),
    )
    client = HttpClient(remote.url, token=remote.token, limits=limits, headers=None, tls=None)
    try:
        yield client
    finally:
        await client.close()


class EventsConnection:
    """A WebSocket of the Events API, which `connect` opens and closes."""

    hello: codec.Connected
    """First message from the server, with the epoch and the newest number."""

    def __init__(self, remote: Remote, socket: WebSocket) -> None:
        self._remote = remote
        self.socket = socket

    async def authenticate(self, client_id: str | None) -> None:
        """Send the token and wait until the server admits the client. Raises LostError or ServerRefusedError.

        Without `client_id`, the server uses that of the token. A server of the previous version requires one.
        """
        remote = self._remote
        try:
            message = await self._request_admission(client_id)
        except ServerRefusedError as error:
            if client_id is not None or error.code != BAD_REQUEST:
                raise
            message = await self._request_admission(f"oncelog-{uuid4().hex[:12]}")
        with translate_decode_errors(remote):
            self.hello = codec.decode_connected(message.payload)

    async def _request_admission(self, client_id: str | None) -> Envelope:
        await self.socket.send(codec.encode_connect(self._remote.token, client_id, _CONNECT_ID))
        return await self.receive(_CONNECT_ID)

    async def receive(self, msg_id: str | None = None) -> Envelope:
        """Return the next message. Raises LostError, or ServerRefusedError if the message is an error.

        An error that answers a message other than `msg_id` is returned instead of raised.
        """
        data = await self.socket.receive()
        with translate_decode_errors(self._remote):
            message = codec.decode_envelope(data)
            if message.type == "error" and message.msg_id in {None, msg_id}:
                raise decode_refusal(message.payload)
        return message


@asynccontextmanager
async def connect(client: HttpClient, remote: Remote, client_id: str | None) -> AsyncIterator[EventsConnection]:
    """Open a connection, authenticate it, and close it on exit. Raises LostError or ServerRefusedError."""
    socket = await client.open_websocket(EVENTS_PATH)
    try:
        connection = EventsConnection(remote, socket)
        with translate_errors(remote.url):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.authenticate(client_id)
        yield connection
    finally:
        await socket.close()


# --- output -----------------------------------------------------------------------------------------------


class CursorPrinter:
    """Prints numbered items after a cursor, each once, up to a limit."""

    def __init__(
        self,
        remote: Remote,
        since: int | None,
        limit: int | None,
        *,
        number_name: str,
        as_json: bool | None,
        format_line: Callable[[Raw], bytes],
    ) -> None:
        """`number_name` is the JSON member with an item's number. `as_json` is the value of `AsJsonLines`."""
        self._remote = remote
        self.cursor = since
        """Number of the last printed item, which never decreases. None means the end of the log, which is not known
        yet."""
        self.remaining = limit
        """How many more items may be printed, or None without a limit."""
        is_json = not sys.stdout.isatty() if as_json is None else as_json
        self._format_line = encode_raw_line if is_json else format_line
        numbered: Any = defstruct("Numbered", [("number", int)], rename={"number": number_name})
        self._number_decoder = Decoder(numbered)

    def compute_page_size(self, largest: int) -> int:
        """Return how many items to request."""
        return largest if self.remaining is None else min(self.remaining, largest)

    def print(self, items: Iterable[Raw]) -> None:
        """Print the items after the cursor. Raises OncelogError for an item that cannot be decoded."""
        output = sys.stdout.buffer
        for item in items:
            with translate_decode_errors(self._remote):
                number, line = self._number_decoder.decode(item).number, self._format_line(item)
            if number <= (self.cursor or 0) or self.remaining == 0:
                continue
            output.write(line)
            self.cursor = number
            if self.remaining is not None:
                self.remaining -= 1
        output.flush()

    def advance(self, cursor: int) -> None:
        """Move the cursor past items that do not match. Beyond the limit this is harmless, because the command ends."""
        self.cursor = max(self.cursor or 0, cursor)

    def explain(self, error: ServerRefusedError) -> OncelogError:
        """Convert a refusal to the error that is reported to the user."""
        if error.code == HISTORY_CHANGED:
            return OncelogError(f"the cursor {self.cursor} belongs to a different history: {error}")
        return error


def encode_raw_line(item: Raw) -> bytes:
    """Return a JSON item with a line feed."""
    return bytes(item) + b"\n"


@contextmanager
def report_early_end(report: Callable[["GaveUpError | None"], None]) -> Iterator[None]:
    """Call `report` with the error if the command gives up, or with None if it is interrupted."""
    try:
        yield
    except GaveUpError as error:
        report(error)
        raise typer.Exit(EXIT_CANNOT_READ) from None
    except asyncio.CancelledError:
        report(None)
        raise


def describe_progress(describe: Callable[[], str]) -> AbstractContextManager[None]:
    """Print how far a command has come if it gives up or is interrupted."""
    return report_early_end(lambda error: print_message(f"{error or 'interrupted'}; {describe()}"))


# --- retries ----------------------------------------------------------------------------------------------


class GaveUpError(OncelogError):
    """No attempt was answered in time. The outcome of the request is unknown, unless no attempt reached the server."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class Retrier:
    """Retries attempts that fail because of the connection or because the server asks for a later retry.

    With `timeout_s`, each call of `run` gives up after this time. Without it, `run` retries indefinitely, but only once
    the server has been reached: call `mark_connected` as soon as it has. A wrong URL thus fails immediately. With
    `waits_for_server`, `run` also waits for a server that does not listen yet.
    """

    def __init__(
        self,
        remote: Remote,
        timeout_s: float | None = None,
        on_problem: Callable[[OncelogError], None] | None = None,
        *,
        waits_for_server: bool = False,
    ) -> None:
        """`on_problem` is called after each failed attempt. By default, the first failure is reported to the user."""
        self._waits_for_server = waits_for_server
        self._remote = remote
        self._timeout_s = timeout_s
        self._on_problem = on_problem or self._report_problem
        self._pauses = Pauses(PAUSE_LIMITS, random.Random())  # noqa: S311 - spreads retries
        self._was_connected = False
        self._has_reported = False
        self.has_retried = False
        """Whether an attempt was repeated, so that an earlier one may have succeeded unnoticed."""

    def mark_connected(self, message: str = "") -> None:
        """Reset the pauses. If a problem was reported, print `connected` or, after an interruption, the message."""
        if self._has_reported and message:
            print_message(message if self._was_connected else "connected")
        self._was_connected, self._has_reported = True, False
        self._pauses.reset()

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds.

        Raises:
            GaveUpError: no attempt succeeded in time.
            LostError: without a time limit, if no attempt ever reached the server, and it is not waited for.
            ServerRefusedError: the server refused the request, and a retry would not help.
        """
        loop = asyncio.get_running_loop()
        deadline_s = None if self._timeout_s is None else loop.time() + self._timeout_s
        if deadline_s is not None:
            self._pauses.reset()
        problem: OncelogError | None = None
        was_sent = False
        while True:
            pause = RetryPause()
            try:
                async with asyncio.timeout_at(deadline_s):
                    return await attempt()
            except TimeoutError:
                # Reaching the deadline explains nothing, so an earlier problem is more useful to the user.
                problem, was_sent = problem or LostError(f"{self._remote.url} did not respond in time"), True
            except LostError as error:
                if deadline_s is None and not self._was_connected and not self._may_start_later(error):
                    raise
                # Every attempt would fail in the same way.
                if _has_cause(error, "ClientSSLError", "InvalidURL", "ClientResponseError"):
                    raise OncelogError(str(error)) from error
                problem, was_sent = error, was_sent or not _has_cause(error, "ClientConnectorError")
            except ServerRefusedError as error:
                if not error.is_transient:
                    raise
                was_sent = True
                problem, pause = error, RetryPause(error.retry_after_ms)
            pause_s = self._pauses.next_pause_s(pause)
            if deadline_s is not None and loop.time() + pause_s >= deadline_s:
                raise GaveUpError(f"gave up after {self._timeout_s:g} s: {problem}", was_sent=was_sent)
            self.has_retried = True
            self._on_problem(problem)
            await asyncio.sleep(pause_s)

    def _may_start_later(self, error: LostError) -> bool:
        """Return whether to wait for a server that has never been reached. An unknown host is probably a typo."""
        is_refused = _has_cause(error, "ClientConnectorError") and not _has_cause(error, "ClientConnectorDNSError")
        return self._waits_for_server and is_refused

    def _report_problem(self, problem: OncelogError) -> None:
        if not self._has_reported:
            self._has_reported = True
            print_message(f"{problem}; retrying")


def _has_cause(error: LostError, *names: str) -> bool:
    """Return whether one of these aiohttp errors is the cause of a lost connection."""
    import aiohttp  # noqa: PLC0415 - the library alone does not need it

    return isinstance(error.__cause__, tuple(getattr(aiohttp, name) for name in names))
