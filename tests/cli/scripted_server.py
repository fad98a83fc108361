"""HTTP server whose answers the test defines."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handle = Callable[[BaseHTTPRequestHandler, int], None]
SHUTDOWN_POLL_S = 0.01
"""How often the server checks for a stop request. With the default of 0.5 s, stopping takes up to 0.5 s."""


def answer(handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
    """Answer a request with bytes, or with any other value as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def scripted(handle: Handle) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a server that passes each request and its number to `handle`. Yield the URL and the received bodies."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            handle(self, len(received))

        def do_GET(self) -> None:
            received.append({"path": self.path})
            handle(self, len(received))

        def log_message(self, *_: object) -> None:
            """Do not log requests to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(SHUTDOWN_POLL_S,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", received
        finally:
            listening.shutdown()
            thread.join()
