"""Runs the steps of scenarios against a server and writes transcripts of the requests and answers."""

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.request import urlopen

from deadlines import wait_until
from golden import wire_clients
from golden.commands import FixedServer
from golden.ledger_stub import LedgerStub
from golden.steps import (
    Drain,
    Flood,
    HangUp,
    Heartbeat,
    Http,
    Listen,
    More,
    Note,
    Open,
    Poll,
    Receive,
    Rpc,
    Send,
    Step,
    Stop,
)
from golden.wire_clients import Connection, ConnectionLostError, EventStream, json_text

_CONTENT_HEADER: Final = re.compile(r"^(Content-Length|Etag|Last-Modified): .*$", re.MULTILINE)
LINE_CHARACTERS_MAX: Final = 6000
"""The transcript truncates longer texts that a client sends."""


class Transcript:
    """Requests and answers, in the order in which the scenario reads them."""

    def __init__(self, server: FixedServer, stub: LedgerStub | None = None) -> None:
        self._server = server
        self._stub = stub
        self._lines: list[str] = []
        self._saved: dict[str, str] = {}
        self._given: dict[str, str] = {}
        self._connections: dict[str, Connection] = {}
        self._streams: dict[str, EventStream] = {}

    def record(self, steps: Iterable[Step]) -> str:
        """Run the steps and return the transcript."""
        run: dict[type[Step], Callable[[Any], object]] = {
            Note: self._note,
            Http: self._request,
            Poll: self._poll,
            Listen: self._listen,
            More: lambda step: self._read_events(step.name, step.events),
            Open: self._open,
            Send: self._send,
            Receive: lambda step: self._receive(step.name, step.frames),
            Heartbeat: self._wait_for_ping,
            Flood: self._flood,
            Drain: self._drain,
            HangUp: self._hang_up,
            Rpc: self._call,
            Stop: self._stop,
        }
        try:
            for step in steps:
                run[type(step)](step)
        except TimeoutError as error:
            raise AssertionError("no answer after:\n" + "\n".join(self._lines[-10:])) from error
        finally:
            for connection in self._connections.values():
                connection.close()
        return "".join(f"{line}\n" for line in self._lines)

    def _note(self, step: Note) -> None:
        self._write("", f"# {step.text}")

    def _poll(self, step: Poll) -> None:
        wait_until(lambda: step.text in _get(self._server.url + step.path))

    def _hang_up(self, step: HangUp) -> None:
        self._connections.pop(step.name).close()
        self._write(f"{step.name}: hangs up")

    def _stop(self, _: Stop) -> None:
        self._server.process.send_signal(signal.SIGTERM)
        self._write("", "(SIGTERM)")

    def _keep(self, name: str, connection: Connection) -> Connection:
        """Store a connection under its name, and replace an earlier connection of that name."""
        if name in self._connections:
            self._connections[name].close()
        self._connections[name] = connection
        return connection

    # --- HTTP

    def _request(self, step: Http) -> None:
        body = b"" if step.body is None else self._fill_in(json_text(step.body)).encode()
        connection = Connection(self._server.port)
        try:
            head = self._exchange_heads(connection, step.to, step.by, step.headers, body, shows_content=not step.hidden)
            found = wire_clients.read_body(connection, head, is_head=step.to.startswith("HEAD "))
        except ConnectionLostError:
            self._write("< (the server closes the connection)")
            return
        finally:
            connection.close()
        if found:
            self._write("<", *(f"< {line}" for line in (step.hidden or found.decode()).rstrip("\n").split("\n")))
        self._save(step.save, found.decode())

    def _exchange_heads(
        self,
        connection: Connection,
        to: str,
        token: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        shows_content: bool = True,
    ) -> str:
        """Send a request and return the head of the response."""
        sent = {**headers}
        if token:
            sent["Authorization"] = f"Bearer {self._fill_in(token)}"
        if body:
            sent.setdefault("Content-Type", "application/json")
        to = self._fill_in(to)
        connection.send(wire_clients.request_bytes(to, {k: self._fill_in(v) for k, v in sent.items()}, body))
        shown = [to, *(f"{name}: {value}" for name, value in sent.items())]
        self._write("", *(f"> {line}" for line in shown))
        if body:
            self._write(">", f"> {_truncate(body.decode())}")
        head = wire_clients.read_head(connection)
        shown_head = head if shows_content else _CONTENT_HEADER.sub(r"\1: <…>", head)
        self._write(*(f"< {line}" for line in shown_head.split("\n")))
        return head

    def _listen(self, step: Listen) -> None:
        connection = self._keep(step.name, Connection(self._server.port))
        head = self._exchange_heads(connection, step.to, step.by, step.headers, b"")
        if "text/event-stream" not in head:
            body = wire_clients.read_body(connection, head, is_head=False)
            self._write("<", f"< {body.decode()}")
            return
        self._streams[step.name] = EventStream(connection)
        self._read_events(step.name, step.events)

    def _read_events(self, name: str, count: int | None) -> None:
        read = 0
        while count is None or read < count:
            event = self._streams[name].next()
            if event is None:
                self._write(f"{name}: < (the stream ends)")
                return
            self._write(*(f"{name}: < {line}" for line in event.split("\n")), f"{name}: <")
            read += 1

    # --- WebSocket

    def _open(self, step: Open) -> None:
        connection = Connection(self._server.port, step.receive_buffer_bytes)
        head = self._exchange_heads(
            connection, f"GET {step.path}", step.by, {**wire_clients.UPGRADE, **step.headers}, b""
        )
        body = wire_clients.read_body(connection, head, is_head=False)
        if body:
            self._write("<", f"< {body.decode()}")
            connection.close()
        else:
            self._keep(step.name, connection)

    def _send(self, step: Send) -> None:
        text = self._fill_in(json_text(step.frame))
        kind = {1: "", 2: "binary ", 8: "close ", 9: "ping ", 10: "pong "}[step.opcode]
        shown = "1000" if step.opcode == wire_clients.CLOSE else _truncate(text)
        self._write("", f"{step.name}: > {kind}{shown}")
        data = text.encode("latin-1" if step.opcode == wire_clients.CLOSE else "utf-8")
        self._connections[step.name].send(wire_clients.frame_bytes(data, step.opcode))
        self._save(step.save, self._receive(step.name, step.receive))

    def _receive(self, name: str, count: int) -> str:
        """Read frames and return the last one."""
        shown = ""
        for _ in range(count):
            try:
                shown = str(wire_clients.read_message(self._connections[name]))
            except ConnectionLostError:
                shown = "(the server closes the connection)"
            self._write(f"{name}: < {shown}")
        return shown

    def _wait_for_ping(self, step: Heartbeat) -> None:
        frame = wire_clients.read_frame(self._connections[step.name])
        assert frame.opcode == wire_clients.PING, frame
        self._write(f"{step.name}: < {frame}")

    def _flood(self, step: Flood) -> None:
        template = json_text(step.frame)
        self._write("", f"{step.name}: > (a flood of {_truncate(template)})")
        connection = self._connections[step.name]
        for number in range(1, step.count + 1):
            connection.send(wire_clients.frame_bytes(template.replace("{{number}}", f"{number:012x}").encode()))
            wire_clients.read_frame(connection)

    def _drain(self, step: Drain) -> None:
        self._write(f"{step.name}: < (frames with {step.without})")
        frame = None
        while frame is None or frame.opcode != wire_clients.CLOSE:
            try:
                frame = wire_clients.read_frame(self._connections[step.name])
            except ConnectionLostError:
                self._write(f"{step.name}: < (the server closes the connection)")
                return
            if step.without not in str(frame):
                self._write(f"{step.name}: < {frame}")

    # --- gRPC

    def _call(self, step: Rpc) -> None:
        assert self._stub is not None
        token = [("authorization", f"Bearer {self._fill_in(step.by)}")] if step.by else []
        metadata = [*token, *step.metadata]
        message = self._fill_in_all(step.message)
        request, lines = self._stub.call(step.method, message, metadata, step.messages)
        shown = [f"{name}: {value}" for name, value in metadata]
        self._write("", f"> rpc {step.method} {_truncate(request)}", *(f"> {line}" for line in shown))
        self._write(*(f"< {line}" for line in lines))
        self._save(step.save, "\n".join(lines))

    # --- texts

    def _fill_in_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._fill_in(value)
        if isinstance(value, Mapping):
            return {name: self._fill_in_all(one) for name, one in value.items()}
        return [self._fill_in_all(one) for one in value] if isinstance(value, Sequence) else value

    def _fill_in(self, text: str) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda found: self._saved[found[1]], text)

    def _save(self, wanted: Mapping[str, str], text: str) -> None:
        for name, pattern in wanted.items():
            found = re.search(pattern, text)
            assert found is not None, (pattern, text)
            self._saved[name] = found[1]

    def save(self, name: str, value: str) -> None:
        """Define a value, such as a credential, that steps and the transcript show as `{{name}}`."""
        self._saved[name] = self._given[name] = value

    def _write(self, *lines: str) -> None:
        shown = {f"127.0.0.1:{self._server.port}": "<server>", f"127.0.0.1:{self._server.rpc_port}": "<grpc server>"}
        shown |= {value: f"{{{{{name}}}}}" for name, value in self._given.items()}
        for line in lines:
            for value, replacement in shown.items():
                line = line.replace(value, replacement)  # noqa: PLW2901
            self._lines.append(line.rstrip(" "))


def _get(url: str) -> str:
    with urlopen(url) as response:  # noqa: S310 - a server of the test
        return str(response.read().decode())


def _truncate(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[:80]}… ({len(text)} characters)"
