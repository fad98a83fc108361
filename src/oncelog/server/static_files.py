"""Static files of the web pages that the server offers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

_CONTENT_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}


def new_page_headers(*sources: str, trusted_types: str = "'none'") -> Mapping[str, str]:
    """Return the headers of a page and its files, with a content security policy that allows no other code.

    The policy allows scripts, styles, images and requests of the page's own server. `sources` adds directives.
    """
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'",
        *sources,
        "base-uri 'none'; frame-ancestors 'none'",
        # A user's text cannot become HTML or a script, even if the page has a bug.
        f"require-trusted-types-for 'script'; trusted-types {trusted_types}",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        # Browsers revalidate every file, so that a page and its modules have the same version.
        "Cache-Control": "no-cache",
    }


class StaticFiles:
    """Files that are listed once at startup, so a name in a request never becomes a path."""

    def __init__(self, paths: Sequence[Path], headers: Mapping[str, str]) -> None:
        self._paths = {path.name: path for path in paths}
        self._headers = headers

    @property
    def names(self) -> Sequence[str]:
        """The names of the files."""
        return list(self._paths)

    def serve(self, name: str) -> web.StreamResponse:
        """Return the response with a file. Raises HTTPNotFound for any other name."""
        path = self._paths.get(name)
        if path is None:
            raise web.HTTPNotFound
        content_type = f"{_CONTENT_TYPES[path.suffix]}; charset=utf-8"
        return web.FileResponse(path, headers={**self._headers, "Content-Type": content_type})


def list_files(directory: Path) -> Sequence[Path]:
    """Return the files of a page in a directory."""
    return [path for path in sorted(directory.iterdir()) if path.suffix in _CONTENT_TYPES]
