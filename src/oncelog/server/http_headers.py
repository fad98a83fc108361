"""Headers of every HTTP response, including the error responses of aiohttp."""

from typing import Final

from aiohttp import web

SERVER_NAME: Final = "oncelog"
"""The value of `Server`. It names no version: a version tells an attacker which faults to try."""
RESPONSE_HEADERS: Final = {"Server": SERVER_NAME, "X-Content-Type-Options": "nosniff"}
"""`nosniff` keeps browsers from taking stored text for HTML or a script."""


async def add_response_headers(_: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the headers to a response of a handler (`on_response_prepare`)."""
    response.headers.update(RESPONSE_HEADERS)
