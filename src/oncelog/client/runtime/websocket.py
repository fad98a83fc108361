"""WebSockets to a server, and the translation of all their failures into LostError or ServerRefusedError."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from oncelog import error_codes
from oncelog.errors import LostError, ProtocolError, ServerRefusedError, SettingsError

if TYPE_CHECKING:
    import aiohttp

_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_STATUS_CODES: Final = {
    401: error_codes.AUTH_FAILED,
    403: error_codes.FORBIDDEN,
    429: error_codes.RATE_LIMITED,
    502: error_codes.SERVER_BUSY,
    503: error_codes.SERVER_BUSY,
    504: error_codes.SERVER_BUSY,
}
EVENTS_PATH: Final = "/v1/events"
CLOSE_TOO_LARGE: Final = 1009
"""Close code of a WebSocket whose peer received a message that is too large (RFC 6455)."""


class Socket(Protocol):
    """A connection for text messages."""

    close_code: int | None

    async def send(self, data: bytes) -> None:
        """Send a message. Raises LostError."""

    async def receive(self) -> str | bytes:
        """Return the next message. Raises LostError at the end, ProtocolError if the message is too large."""

    async def close(self) -> None:
        """Close the connection. Raises no error."""


class Transport(Protocol):
    """Opens connections to one server."""

    async def connect(self) -> Socket:
        """Open a connection. Raises LostError or ServerRefusedError."""

    async def close(self) -> None:
        """Close all connections."""


def normalize_url(url: str, name: str = "url") -> str:
    """Return the URL of a server without a trailing slash. Raises SettingsError for a malformed URL."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        (parts.hostname or "").encode("idna")  # raises for an empty or too long label
        is_url = parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # also a UnicodeError
        is_url = False
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc:
        shown = "a URL with a user or a password" if "@" in str(url) else repr(url)
        raise SettingsError(f"{name} must be http://HOST:PORT or https://HOST:PORT, not {shown}")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/').removesuffix(EVENTS_PATH)}"


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Translate errors of aiohttp into LostError and ServerRefusedError."""
    import aiohttp  # noqa: PLC0415 - the library without clients does not need it

    try:
        yield
    except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
        raise LostError(f"{url} cannot be used: {error}") from error
    except aiohttp.WSServerHandshakeError as error:
        raise status_error(error.status) from error
    except aiohttp.ClientConnectorError as error:
        raise LostError(f"{url} cannot be reached: {_describe_error(error)}") from error
    except TimeoutError as error:
        raise LostError(f"{url} does not answer in time") from error
    except aiohttp.ServerDisconnectedError as error:
        raise LostError(f"the connection to {url} was lost: the server closed it before it answered") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise LostError(f"the connection to {url} was lost: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(error) or type(error).__name__


def status_error(status: int) -> ServerRefusedError:
    """Return the error for a response without an error document, for example from a proxy."""
    code = _STATUS_CODES.get(status, error_codes.SERVER_ERROR if status >= 500 else error_codes.BAD_REQUEST)
    is_foreign = code == error_codes.BAD_REQUEST
    text = f"HTTP status {status}"
    return ServerRefusedError(code, f"no Oncelog server at this address ({text})" if is_foreign else text)


class WebSocket:
    """A `Socket` over aiohttp."""

    def __init__(self, url: str, socket: "aiohttp.ClientWebSocketResponse", message_bytes_max: int) -> None:
        import aiohttp  # noqa: PLC0415 - as above

        self.url = url
        self._socket = socket
        self._message_bytes_max = message_bytes_max
        self._text, self._close = aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.CLOSE
        self.close_code: int | None = None

    async def send(self, data: bytes) -> None:
        """Send a message. Raises LostError."""
        with translate_errors(self.url):
            await self._socket.send_frame(data, self._text)

    async def receive(self) -> str:
        """As `Socket.receive`."""
        with translate_errors(self.url):
            message = await self._socket.receive()
        if message.type is self._text:
            data: str = message.data
            return data
        code = self._socket.close_code
        if message.type is self._close:
            self.close_code = code  # of the server; aiohttp sets other codes for frames that it cannot accept
        elif code == CLOSE_TOO_LARGE:
            raise ProtocolError(f"a message of the server is larger than message_bytes_max ({self._message_bytes_max})")
        raise LostError(f"the connection to {self.url} was lost" + (f" (closed with {code})" if code else ""))

    async def close(self) -> None:
        """Close the connection. Raises no error."""
        with suppress(LostError, ServerRefusedError), translate_errors(self.url):
            await self._socket.close()
