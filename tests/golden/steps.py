"""The steps of a scenario: data that clients send to the server, and the number of answers that they wait for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Json = Any
"""A value that is sent as JSON. A string is sent as is."""
TICKET: Final = {"ticket": r'"ticket":"([^"]+)"'}
"""Saves the ticket in an answer."""


@dataclass(frozen=True)
class Note:
    """Add a comment to the transcript."""

    text: str


@dataclass(frozen=True)
class Http:
    """Send a request on a new connection and read the complete response.

    `to` is method and path. `by` is the credential, which is sent as a bearer token. `save` maps a name to a regular
    expression; later steps use its group in the response as `{{name}}`. `hidden` replaces the body in the transcript,
    which then omits the values of the content headers.
    """

    to: str
    body: Json = None
    by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    save: Mapping[str, str] = field(default_factory=dict)
    hidden: str = ""


@dataclass(frozen=True)
class Poll:
    """Repeat a GET until the response contains the text. The transcript does not show the requests."""

    path: str
    text: str


@dataclass(frozen=True)
class Listen:
    """Open a stream of server-sent events and read its first `events` events."""

    name: str
    to: str
    events: int = 1
    by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class More:
    """Read more events of a stream, or the rest of the stream if `events` is None."""

    name: str
    events: int | None = 1


@dataclass(frozen=True)
class Open:
    """Open a WebSocket."""

    name: str
    path: str
    by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    receive_buffer_bytes: int = 0


@dataclass(frozen=True)
class Send:
    """Send a frame and wait for frames from the server."""

    name: str
    frame: Json
    receive: int = 1
    opcode: int = 1
    save: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Receive:
    """Wait for more frames. Pings, which arrive whenever a connection is idle, are answered and not counted."""

    name: str
    frames: int = 1


@dataclass(frozen=True)
class Heartbeat:
    """Wait for a ping from the server."""

    name: str


@dataclass(frozen=True)
class Flood:
    """Send frames one after another. `{{number}}` becomes 1, 2, …; each frame waits for the answer to the previous one.

    The transcript does not show the frames.
    """

    name: str
    frame: Json
    count: int


@dataclass(frozen=True)
class Drain:
    """Read frames until the connection closes. The transcript omits frames that contain the text."""

    name: str
    without: str


@dataclass(frozen=True)
class HangUp:
    """Close the connection of a stream or a WebSocket without a closing handshake."""

    name: str


@dataclass(frozen=True)
class Rpc:
    """Call a ledger method with a message in JSON form. If the answer is a stream, read its first `messages`."""

    method: str
    message: Json
    by: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    messages: int = 1
    save: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Send SIGTERM to the server, and do not wait until it exits."""


Step = Note | Http | Poll | Listen | More | Open | Send | Receive | Heartbeat | Flood | Drain | HangUp | Rpc | Stop
