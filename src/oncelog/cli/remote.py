"""What the commands share that speak to a server: where it is, who they are, and messages over its WebSocket.

Just enough for a person at a terminal. Everything that a command waits for ends as one of two errors: the connection
is lost (`LostError`), and the same may be sent again; or the server has refused (`ServerRefusedError`), and says why.
"""

import asyncio
import os
import stat
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Final
from uuid import uuid4

import msgspec
import orjson
import typer
from msgspec import Raw, Struct

from oncelog.cli.secret_files import read_token_file
from oncelog.client.events import codec
from oncelog.client.events.codec import Envelope
from oncelog.client.runtime import websocket
from oncelog.client.runtime.websocket import normalize_url
from oncelog.core.canonical import is_unicode
from oncelog.error_codes import AUTH_FAILED, PROTOCOL_VERSION
from oncelog.errors import LostError, OncelogError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

DEFAULT_URL: Final = "http://127.0.0.1:7171"
TOKEN_VARIABLE: Final = "ONCELOG_TOKEN"  # noqa: S105 - its name
CONNECT_TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 30.0
TOKEN_FILE_BYTES_MAX: Final = 64 * 1024

Url = Annotated[str, typer.Option(metavar="URL", help="Where the server is.")]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", help="A token or API key. Others can see it while the command runs: prefer a file."),
]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with the token; without either, ONCELOG_TOKEN has it.")
]
Partitions = Annotated[
    list[str] | None, typer.Option("--partition", metavar="NAME", help="A partition; may be given several times.")
]
ClientId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Which client this is. API keys, and some tokens, are of one client alone."),
]


class Remote(Struct, frozen=True):
    """A server, and by what right we come."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    @property
    def events_url(self) -> str:
        """URL of the WebSocket of the Events API."""
        return f"{self.url}/v1/events"

    @property
    def headers(self) -> dict[str, str]:
        """Of a request over HTTP."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def build_remote(url: str, token: str | None, token_file: str | None) -> Remote:
    """The server that the options of a command name. Raises OncelogError for options that are wrong."""
    if find_spec("aiohttp") is None:
        raise OncelogError("this command needs aiohttp: pip install 'oncelog[server]'")
    return Remote(normalize_url(url, "--url"), _load_credential(token, token_file))


def _load_credential(token: str | None, token_file: str | None) -> str | None:
    if token is not None and token_file is not None:
        raise OncelogError("--token and --token-file: one of them, not both")
    if token_file is not None:
        token = read_token_file(token_file, TOKEN_FILE_BYTES_MAX)
    elif token is None:
        token = os.environ.get(TOKEN_VARIABLE)
    token = None if token is None else token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise OncelogError("the token has characters that no token has")
    return token or None


def check_partitions(partitions: list[str] | None) -> list[str]:
    """Raises OncelogError if there is none."""
    if not partitions:
        raise OncelogError("--partition must be given, at least once")
    return [check_text(partition, "--partition") for partition in partitions]


def check_text(text: str, option: str) -> str:
    """Raise OncelogError for bytes of a terminal that are not UTF-8."""
    if not is_unicode(text):
        raise OncelogError(f"{option} is not UTF-8")
    return text


def choose_client_id(client_id: str | None, command: str) -> str:
    """The client that a WebSocket is of: as the option says, or one of its own."""
    return f"{command}-{uuid4().hex[:12]}" if client_id is None else check_text(client_id, "--client-id")


# --- errors of the wire -----------------------------------------------------------------------------------


@contextmanager
def translate_connection_errors(remote: Remote) -> Iterator[None]:
    """Turns what can happen to a connection into our own errors. What no further attempt can mend ends the command."""
    import aiohttp  # noqa: PLC0415 - what the library alone does not need

    try:
        with websocket.translate_errors(remote.url):
            yield
    except LostError as error:
        if isinstance(error.__cause__, aiohttp.ClientSSLError | aiohttp.InvalidURL):
            raise OncelogError(str(error)) from error
        raise


@contextmanager
def translate_decode_errors(remote: Remote) -> Iterator[None]:
    """For what cannot be read in an answer."""
    try:
        yield
    except msgspec.MsgspecError as error:
        raise OncelogError(f"{remote.url} does not answer as an Oncelog server does: {error}") from error


def decode_refusal(payload: bytes | Raw) -> ServerRefusedError:
    """The error in the server's own words. Raises msgspec.MsgspecError for what is none."""
    error = codec.decode_error(payload)
    return ServerRefusedError(error.code, error.message, error.details.retry_after_ms)


async def run_while_output_open(work: Awaitable[None]) -> None:
    """Until the work is done, or whoever reads our output has gone: at a pipe that is seen before anything is written.

    Raises BrokenPipeError then.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    descriptor, is_alone = sys.stdout.fileno(), False

    def stop() -> None:
        nonlocal is_alone
        is_alone = True
        loop.remove_reader(descriptor)
        if task is not None:
            task.cancel()

    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    if is_pipe:
        loop.add_reader(descriptor, stop)  # nothing is ever to be read there, but that nobody reads is told so
    try:
        await work
    except asyncio.CancelledError:
        if is_alone:
            raise BrokenPipeError from None
        raise
    finally:
        if is_pipe:
            loop.remove_reader(descriptor)


# --- the WebSocket ----------------------------------------------------------------------------------------


class EventsConnection:
    """A connection that the server has let in. `async with` closes it."""

    def __init__(self, remote: Remote, socket: "aiohttp.ClientWebSocketResponse") -> None:
        self._remote = remote
        self._socket = socket
        self.epoch = ""
        self.last_committed_id = 0
        """At the moment of the connection."""

    async def __aenter__(self) -> "EventsConnection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def authenticate(self, client_id: str) -> None:
        """Says who we are. Raises as `receive` does."""
        payload = {"client_id": client_id, "token": self._remote.token}
        await self.send("connect", orjson.dumps(payload))
        try:
            message = await self.receive()
        except ServerRefusedError as error:
            if error.code != AUTH_FAILED or self._remote.token is None:
                raise
            hint = f"the token is not good, or not of the client {client_id!r} (--client-id)"
            raise ServerRefusedError(AUTH_FAILED, hint) from error
        with translate_decode_errors(self._remote):
            hello = codec.decode_connected(message.payload)
        self.epoch, self.last_committed_id = hello.epoch, hello.server_last_committed_id

    async def send(self, kind: str, payload: bytes, msg_id: int | None = None) -> None:
        """Raises LostError."""
        number = "" if msg_id is None else f'"msg_id":{msg_id},'
        head = f'{{"type":"{kind}","protocol_version":"{PROTOCOL_VERSION}",{number}"payload":'
        with translate_connection_errors(self._remote):
            await self._socket.send_str(f"{head}{payload.decode()}}}")

    async def receive(self) -> Envelope:
        """The next message, unless it is an error without a `msg_id`: then, as when the connection is lost, raises."""
        with translate_connection_errors(self._remote):
            frame = await self._socket.receive()
        if not isinstance(frame.data, str):
            code = self._socket.close_code
            raise LostError(
                f"the connection to {self._remote.url} was lost" + (f" (closed with {code})" if code else "")
            )
        with translate_decode_errors(self._remote):
            message = codec.decode_envelope(frame.data)
            if message.type == "error" and message.msg_id is None:
                raise decode_refusal(message.payload)
        return message


async def connect(session: "aiohttp.ClientSession", remote: Remote, client_id: str) -> EventsConnection:
    """A new connection. Raises LostError or ServerRefusedError."""
    import aiohttp  # noqa: PLC0415 - as above

    with translate_connection_errors(remote):
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            socket = await session.ws_connect(
                remote.events_url,
                heartbeat=HEARTBEAT_S,
                max_msg_size=0,  # how large a page is, the server says
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
            connection = EventsConnection(remote, socket)
            try:
                await connection.authenticate(client_id)
            except BaseException:
                await socket.close()
                raise
            return connection
