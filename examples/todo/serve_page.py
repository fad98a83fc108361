"""Serves the web page of the to-do list: python examples/todo/serve_page.py

It serves the page and its npm package as files. The list comes from the Oncelog server, which must allow the origin of
the page: oncelog serve --development --set origins=http://127.0.0.1:7172
"""

import argparse
import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

PORT: Final = 7172
PAGE: Final = Path(__file__).parent / "page"
MODULES: Final = Path(__file__).parents[2] / ".node/node_modules"
_MODULES_PATH: Final = "/node_modules/"


class Handler(SimpleHTTPRequestHandler):
    """Serves two directories."""

    def translate_path(self, path: str) -> str:
        """Return the file for a path. The base class keeps it inside the directory."""
        path = urlsplit(path).path
        if path.startswith(_MODULES_PATH):
            self.directory = str(MODULES)
            return super().translate_path(path.removeprefix(_MODULES_PATH.rstrip("/")))
        self.directory = str(PAGE)
        return super().translate_path(path)

    def end_headers(self) -> None:
        """Forbid caching, so that a changed page appears on the next load."""
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Do not log requests."""


def create_page_server(port: int = PORT) -> ThreadingHTTPServer:
    """Return a server to run with `serve_forever`. Raises SystemExit if the npm package is not installed."""
    if not (MODULES / "insieme").is_dir():
        raise SystemExit("the npm package is not installed: run `make todo`")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(PAGE)))
    except OSError as error:
        raise SystemExit(f"port {port} cannot be used: {error.strerror}") from error


def build_page_url(port: int, **parameters: str) -> str:
    """Return the address of the page with its parameters: server, name, list."""
    return f"http://127.0.0.1:{port}/?{urlencode(parameters)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the web page of the to-do list.")
    parser.add_argument("--url", default="http://127.0.0.1:7171", help="the Oncelog server")
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    with create_page_server(arguments.port) as serving:
        print(f"The page is at {build_page_url(serving.server_port, server=arguments.url, name='eve')}", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            sys.exit()
