"""What the commands share that speak to a server: where it is, who they are, and messages over its WebSocket.

Just enough for a person at a terminal. Everything that a command waits for ends as one of two errors: the connection
is lost (`LostError`), and the same may be sent again; or the server has refused (`RefusedError`), and says why.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import orjson
import typer
from msgspec import Raw, Struct

from oncelog.doors.events.words import (
    AUTH_FAILED,
    FORBIDDEN,
    PROTOCOL_VERSION,
    RATE_LIMITED,
    SERVER_BUSY,
    SERVER_ERROR,
)
from oncelog.errors import OncelogError

if TYPE_CHECKING:
    import aiohttp

DEFAULT_URL: Final = "http://127.0.0.1:7171"
TOKEN_VARIABLE: Final = "ONCELOG_TOKEN"  # noqa: S105 - its name
CONNECT_TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 30.0
PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 5.0
TOKEN_FILE_BYTES_MAX: Final = 64 * 1024
_TRANSIENT: Final = frozenset({SERVER_BUSY, SERVER_ERROR, RATE_LIMITED})
_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}

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


class LostError(OncelogError):
    """The server cannot be reached, or went away: what was sent may have been committed or not."""


class RefusedError(OncelogError):
    """The server says no, in its own words."""

    def __init__(self, code: str, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retry_after_ms = retry_after_ms

    @property
    def is_transient(self) -> bool:
        """Whether the same may be sent again later."""
        return self.code in _TRANSIENT


class Remote(Struct, frozen=True):
    """A server, and by what right we come."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    @property
    def events_url(self) -> str:
        """Of the events door."""
        return f"{self.url}/v1/events"

    @property
    def headers(self) -> dict[str, str]:
        """Of a request over HTTP."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def remote_of(url: str, token: str | None, token_file: str | None) -> Remote:
    """The server that the options of a command name. Raises OncelogError for options that are wrong."""
    if find_spec("aiohttp") is None:
        raise OncelogError("this command needs aiohttp: pip install 'oncelog[server]'")
    return Remote(_normal_url(url), _credential(token, token_file))


def _normal_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc:
        raise OncelogError(f"--url must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"


def _credential(token: str | None, token_file: str | None) -> str | None:
    if token is not None and token_file is not None:
        raise OncelogError("--token and --token-file: one of them, not both")
    if token_file is not None:
        token = _read_token(token_file)
    elif token is None:
        token = os.environ.get(TOKEN_VARIABLE)
    token = None if token is None else token.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise OncelogError("the token has characters that no token has")
    return token or None


def _read_token(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(TOKEN_FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise OncelogError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise OncelogError(f"{path} has no token in it") from None


def demand_partitions(partitions: list[str] | None) -> list[str]:
    """Raises OncelogError if there is none."""
    if not partitions:
        raise OncelogError("--partition must be given, at least once")
    return [demand_text(one, "--partition") for one in partitions]


def demand_text(text: str, option: str) -> str:
    """Raises OncelogError for what a terminal can give and JSON cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OncelogError(f"{option} is not UTF-8") from None
    return text


def client_of(client_id: str | None, command: str) -> str:
    """The client that a WebSocket is of: as the option says, or one of its own."""
    return f"{command}-{uuid4().hex[:12]}" if client_id is None else demand_text(client_id, "--client-id")


def pauses_s(longest_s: float = PAUSE_S_MAX) -> Iterator[float]:
    """How long to wait before each further attempt. Not all alike: who was sent away together must not come so."""
    pause_s = PAUSE_S_MIN
    while True:
        yield pause_s * random.uniform(0.5, 1)  # noqa: S311 - no secret
        pause_s = min(2 * pause_s, longest_s)


def say(sentence: str) -> None:
    """On standard error: what people should know, and programs need not."""
    typer.echo(f"oncelog: {sentence}", err=True)


# --- errors of the wire -----------------------------------------------------------------------------------


@contextmanager
def as_lost(remote: Remote) -> Iterator[None]:
    """Turns what can happen to a connection into the errors of this module."""
    import aiohttp  # noqa: PLC0415 - what the library alone does not need

    try:
        yield
    except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
        raise OncelogError(f"{remote.url} cannot be used: {error}") from error
    except aiohttp.WSServerHandshakeError as error:
        raise refused_by_status(error.status) from error
    except aiohttp.ClientConnectorError as error:
        raise LostError(f"{remote.url} cannot be reached: {_why(error)}") from error
    except TimeoutError as error:
        raise LostError(f"{remote.url} does not answer in time") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise LostError(f"the connection to {remote.url} was lost: {_why(error)}") from error


def _why(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(error) or type(error).__name__


def refused_by_status(status: int) -> RefusedError:
    """For an answer that is not in the server's own words: that of a proxy, or to a WebSocket's first request."""
    if status == 429:
        return RefusedError(RATE_LIMITED, "HTTP status 429")
    if status >= 500:
        return RefusedError(SERVER_BUSY if status in (502, 503, 504) else SERVER_ERROR, f"HTTP status {status}")
    return RefusedError(AUTH_FAILED if status == 401 else FORBIDDEN, f"HTTP status {status}")


@contextmanager
def as_foreign(remote: Remote) -> Iterator[None]:
    """For what cannot be read in an answer."""
    try:
        yield
    except msgspec.MsgspecError as error:
        raise OncelogError(f"{remote.url} does not answer as an Oncelog server does: {error}") from error


class _Details(Struct, frozen=True):
    retry_after_ms: int = 0


class _Error(Struct, frozen=True):
    code: str
    message: str
    details: _Details = _Details()


def refused_by(payload: bytes | Raw) -> RefusedError:
    """The error in the server's own words. Raises msgspec.MsgspecError for what is none."""
    error = msgspec.json.decode(payload, type=_Error)
    return RefusedError(error.code, error.message, error.details.retry_after_ms)


# --- the WebSocket ----------------------------------------------------------------------------------------


class Message(Struct, frozen=True):
    """What the server sends."""

    type: str
    payload: Raw
    msg_id: int | None = None


class _Connected(Struct, frozen=True):
    epoch: str
    server_last_committed_id: int


_MESSAGE: Final = msgspec.json.Decoder(Message)
_CONNECTED: Final = msgspec.json.Decoder(_Connected)


class Connection:
    """A connection that the server has let in. `async with` closes it."""

    def __init__(self, remote: Remote, socket: "aiohttp.ClientWebSocketResponse") -> None:
        self._remote = remote
        self._socket = socket
        self.epoch = ""
        self.last_committed_id = 0
        """At the moment of the connection."""

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def introduce(self, client_id: str) -> None:
        """Says who we are. Raises as `receive` does."""
        payload = {"client_id": client_id, "token": self._remote.token}
        await self.send("connect", orjson.dumps(payload))
        try:
            message = await self.receive()
        except RefusedError as error:
            if error.code != AUTH_FAILED or self._remote.token is None:
                raise
            hint = f"the token is not good, or not of the client {client_id!r} (--client-id)"
            raise RefusedError(AUTH_FAILED, hint) from error
        with as_foreign(self._remote):
            hello = _CONNECTED.decode(message.payload)
        self.epoch, self.last_committed_id = hello.epoch, hello.server_last_committed_id

    async def send(self, kind: str, payload: bytes, msg_id: int | None = None) -> None:
        """Raises LostError."""
        number = "" if msg_id is None else f'"msg_id":{msg_id},'
        head = f'{{"type":"{kind}","protocol_version":"{PROTOCOL_VERSION}",{number}"payload":'
        with as_lost(self._remote):
            await self._socket.send_str(f"{head}{payload.decode()}}}")

    async def receive(self) -> Message:
        """The next message, which is no error without a `msg_id`. Raises LostError, or RefusedError for one that is."""
        with as_lost(self._remote):
            frame = await self._socket.receive()
        if not isinstance(frame.data, str):
            code = self._socket.close_code
            raise LostError(
                f"the connection to {self._remote.url} was lost" + (f" (closed with {code})" if code else "")
            )
        with as_foreign(self._remote):
            message = _MESSAGE.decode(frame.data)
            if message.type == "error" and message.msg_id is None:
                raise refused_by(message.payload)
        return message


async def connect(session: "aiohttp.ClientSession", remote: Remote, client_id: str) -> Connection:
    """A new connection. Raises LostError or RefusedError."""
    import aiohttp  # noqa: PLC0415 - as above

    with as_lost(remote):
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            socket = await session.ws_connect(
                remote.events_url,
                heartbeat=HEARTBEAT_S,
                max_msg_size=0,  # how large a page is, the server says
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
            connection = Connection(remote, socket)
            try:
                await connection.introduce(client_id)
            except BaseException:
                await socket.close()
                raise
            return connection
