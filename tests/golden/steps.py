"""The steps of a scenario: what clients send to a server, and how many answers they wait for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any
"""A value that is sent as JSON; a text is sent as it is."""


@dataclass(frozen=True)
class Note:
    """A line for the reader of the transcript."""

    text: str


@dataclass(frozen=True)
class Http:
    """A request on a new connection, and its complete response.

    `to` is method and path. `by` is the credential, which is sent as a bearer token. `save` maps a name to a regular
    expression whose group is found in the response; later steps use it as `{{name}}`. `hidden` replaces the body in the
    transcript, and headers about its content have no value there.
    """

    to: str
    body: Json = None
    by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    save: Mapping[str, str] = field(default_factory=dict)
    hidden: str = ""


@dataclass(frozen=True)
class Poll:
    """Repeat a GET until the response has this text. The transcript does not show it."""

    path: str
    text: str


@dataclass(frozen=True)
class Listen:
    """Open a stream of server-sent events and read its first `events`."""

    name: str
    to: str
    events: int = 1
    by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class More:
    """Read further events of a stream; None reads to its end."""

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
    """Wait for further frames. Pings are answered and not counted: they come whenever a connection is silent."""

    name: str
    frames: int = 1


@dataclass(frozen=True)
class Heartbeat:
    """Wait for a ping of the server."""

    name: str


@dataclass(frozen=True)
class Flood:
    """Send frames one after another. `{{number}}` becomes 1, 2, …; each frame waits for the answer to the previous one.

    The transcript does not show them.
    """

    name: str
    frame: Json
    count: int


@dataclass(frozen=True)
class Drain:
    """Read frames to the end of the connection. The transcript shows those without this text."""

    name: str
    without: str


@dataclass(frozen=True)
class HangUp:
    """Close the connection of a stream or a WebSocket without a word."""

    name: str


@dataclass(frozen=True)
class Rpc:
    """Call a method of the ledger with a message in JSON form. A client reads `messages` of a stream."""

    method: str
    message: Json
    by: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    messages: int = 1
    save: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Ask the server to stop, with SIGTERM, and do not wait for its end."""


Step = Note | Http | Poll | Listen | More | Open | Send | Receive | Heartbeat | Flood | Drain | HangUp | Rpc | Stop
