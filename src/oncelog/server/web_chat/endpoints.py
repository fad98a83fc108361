"""Serves the web chat's static files, with a content security policy that allows no other code.

The page is an ordinary client of the Chat API, so this module needs no authorization.
"""

from pathlib import Path
from typing import Final

from aiohttp import web

PATH: Final = "/chat"
STATIC_DIRECTORY: Final = Path(__file__).parent / "static"
PAGE_NAME: Final = "index.html"
FILE_LIST_NAME: Final = "files.json"
"""Name under which the server lists the files for the service worker to cache. With them the page loads even while the
server is unreachable."""
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
        # A user's text cannot become HTML or a script, even if the page has a bug.
        "require-trusted-types-for 'script'; trusted-types oncelog-worker"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Browsers revalidate every file, so that the page and its modules have the same version.
    "Cache-Control": "no-cache",
    # The service worker's file is below the page's path, but its scope must include the page.
    "Service-Worker-Allowed": PATH,
}


class WebChat:
    """The web chat's files. They are listed once at startup, so a name in a request never becomes a path."""

    def __init__(self) -> None:
        self._files = {path.name: path for path in sorted(STATIC_DIRECTORY.iterdir()) if path.suffix in _CONTENT_TYPES}

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of the web chat to a server."""
        app.router.add_get(PATH, self._serve_file)
        app.router.add_get(f"{PATH}/", self._redirect)
        app.router.add_get(f"{PATH}/{{name}}", self._serve_file)

    async def _redirect(self, request: web.Request) -> web.StreamResponse:
        """Redirect to the path without a trailing slash, which is the page's address."""
        location = f"{PATH}?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else PATH
        return web.Response(status=308, headers={**_HEADERS, "Location": location})

    async def _serve_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", PAGE_NAME)
        if name == FILE_LIST_NAME:
            names = [f"{PATH}/{file_name}" for file_name in self._files if file_name != PAGE_NAME]
            return web.json_response(names, headers=_HEADERS)
        if name not in self._files:
            raise web.HTTPNotFound
        return _new_file_response(self._files[name])


def _new_file_response(path: Path) -> web.StreamResponse:
    return web.FileResponse(path, headers={**_HEADERS, "Content-Type": f"{_CONTENT_TYPES[path.suffix]}; charset=utf-8"})
