"""Serves the page at `/docs` and the files of both pages.

The API page reads the public OpenAPI document and is an ordinary client of the API, so this module needs no
authorization.
"""

from typing import Final

from aiohttp import web

from oncelog.server.pages import STATIC_DIRECTORY
from oncelog.server.static_files import StaticFiles, list_files, new_page_headers
from oncelog.server.web_chat.endpoints import STATIC_DIRECTORY as WEB_CHAT_DIRECTORY

DOCS_PATH: Final = "/docs"
ASSETS_PATH: Final = "/assets"
PAGE_HEADERS: Final = new_page_headers("form-action 'none'")
_PAGE_NAME: Final = "docs.html"
_SHARED_NAMES: Final = frozenset({"dom.mjs", "icon.svg", "theme.css", "theme.js", "theme.mjs"})
"""Files of the web chat that the other pages use too."""


class Pages:
    """The files of the landing page and, if the server offers the OpenAPI document, the API page."""

    def __init__(self, *, has_docs: bool) -> None:
        shared = [path for path in list_files(WEB_CHAT_DIRECTORY) if path.name in _SHARED_NAMES]
        self._has_docs = has_docs
        self._page = StaticFiles([STATIC_DIRECTORY / _PAGE_NAME], PAGE_HEADERS)
        self._files = StaticFiles(
            [*(path for path in list_files(STATIC_DIRECTORY) if path.name != _PAGE_NAME), *shared], PAGE_HEADERS
        )

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of the pages to a server. `OperatorEndpoints` serves the landing page itself."""
        app.router.add_get(f"{ASSETS_PATH}/{{name}}", self._serve_file)
        if self._has_docs:
            app.router.add_get(DOCS_PATH, self._serve_docs)

    async def _serve_docs(self, _: web.Request) -> web.StreamResponse:
        return self._page.serve(_PAGE_NAME)

    async def _serve_file(self, request: web.Request) -> web.StreamResponse:
        return self._files.serve(request.match_info["name"])
