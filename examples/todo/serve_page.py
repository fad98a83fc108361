"""Serves the web page of the to-do list: python examples/todo/serve_page.py

The page and the npm package that it runs on, as files; the list itself comes from the Oncelog server, which must allow
this page's origin: oncelog serve --development --set origins=http://127.0.0.1:7172
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
    """Two directories, and nothing else."""

    def translate_path(self, path: str) -> str:
        """The file of a path; the class above it sees to it that it is in the directory."""
        path = urlsplit(path).path
        if path.startswith(_MODULES_PATH):
            self.directory = str(MODULES)
            return super().translate_path(path.removeprefix(_MODULES_PATH.rstrip("/")))
        self.directory = str(PAGE)
        return super().translate_path(path)

    def end_headers(self) -> None:
        """Whoever changes the page sees it at the next load."""
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name above
        """Says nothing."""


def page_server(port: int = PORT) -> ThreadingHTTPServer:
    """Ready to `serve_forever`. Raises SystemExit if the npm package is not there."""
    if not (MODULES / "insieme").is_dir():
        raise SystemExit("the npm package is not there: run `make todo`")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(PAGE)))
    except OSError as error:
        raise SystemExit(f"port {port} cannot be used: {error.strerror}") from error


def address(port: int, **asked: str) -> str:
    """Of the page, with what is asked of it: server, name, list."""
    return f"http://127.0.0.1:{port}/?{urlencode(asked)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves the web page of the to-do list.")
    parser.add_argument("--url", default="http://127.0.0.1:7171", help="the Oncelog server")
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    with page_server(arguments.port) as serving:
        print(f"The page is on {address(serving.server_port, server=arguments.url, name='eve')}", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            sys.exit()
