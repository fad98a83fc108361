"""Serves the web chat: a handful of files by their names, under a policy that lets nothing else run.

The page is a client as any other: what it does goes through the Chat API. There is nothing here to decide.
"""

from pathlib import Path
from typing import Final

from aiohttp import web

PATH: Final = "/chat"
STATIC_DIRECTORY: Final = Path(__file__).parent / "static"
PAGE_NAME: Final = "index.html"
FILE_LIST_NAME: Final = "files.json"
"""What the page's worker keeps, so that the page can be loaded while the server is away."""
_CONTENT_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "worker-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        # A string that somebody wrote cannot become HTML or a script, even by a mistake of ours.
        "require-trusted-types-for 'script'; trusted-types oncelog-worker"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for each time, so that a page and its modules are of one version.
    "Cache-Control": "no-cache",
    # The worker's file is below the page's own path.
    "Service-Worker-Allowed": PATH,
}


class WebChat:
    """What is served is found out once: no name of a request becomes a path."""

    def __init__(self) -> None:
        self._files = {path.name: path for path in sorted(STATIC_DIRECTORY.iterdir()) if path.suffix in _CONTENT_TYPES}

    def add_routes(self, app: web.Application) -> None:
        """Adds the page to a server."""
        app.router.add_get(PATH, self._serve_page)
        app.router.add_get(f"{PATH}/", self._redirect)
        app.router.add_get(f"{PATH}/{{name}}", self._serve_file)

    async def _serve_page(self, _: web.Request) -> web.StreamResponse:
        return _new_file_response(self._files[PAGE_NAME])

    async def _redirect(self, request: web.Request) -> web.StreamResponse:
        """What somebody typed with a slash. Without it the page's own addresses hold."""
        location = f"{PATH}?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else PATH
        return web.Response(status=308, headers={**_HEADERS, "Location": location})

    async def _serve_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == FILE_LIST_NAME:
            names = [f"{PATH}/{file_name}" for file_name in self._files if file_name != PAGE_NAME]
            return web.json_response(names, headers=_HEADERS)
        if name not in self._files:
            raise web.HTTPNotFound
        return _new_file_response(self._files[name])


def _new_file_response(path: Path) -> web.StreamResponse:
    return web.FileResponse(path, headers={**_HEADERS, "Content-Type": f"{_CONTENT_TYPES[path.suffix]}; charset=utf-8"})
