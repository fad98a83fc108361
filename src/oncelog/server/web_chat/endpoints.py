"""Serves the web chat's static files, with a content security policy that allows no other code.

The page is an ordinary client of the Chat API, so this module needs no authorization.
"""

from pathlib import Path
from typing import Final

from aiohttp import web

from oncelog.server.static_files import StaticFiles, list_files, new_page_headers

PATH: Final = "/chat"
STATIC_DIRECTORY: Final = Path(__file__).parent / "static"
PAGE_NAME: Final = "index.html"
FILE_LIST_NAME: Final = "files.json"
"""Name under which the server lists the files for the service worker to cache. With them the page loads even while the
server is unreachable."""
_HEADERS: Final = {
    **new_page_headers("worker-src 'self'; form-action 'self'", trusted_types="oncelog-worker"),
    # The service worker's file is below the page's path, but its scope must include the page.
    "Service-Worker-Allowed": PATH,
}


class WebChat:
    """The web chat's files."""

    def __init__(self) -> None:
        self._files = StaticFiles(list_files(STATIC_DIRECTORY), _HEADERS)

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
            names = [f"{PATH}/{file_name}" for file_name in self._files.names if file_name != PAGE_NAME]
            return web.json_response(names, headers=_HEADERS)
        return self._files.serve(name)
