"""A JSON document that is built once and served from memory, with an ETag."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

import orjson
from aiohttp import BytesPayload, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import ETAG_ANY

from oncelog.server.http_requests import JSON

PART_BYTES: Final = 16 * 1024
"""Bytes that are written before the client has read the ones before them. Any caller may request the document, so a
client that does not read it must not make the server keep all of it."""


class PartedBody(BytesPayload):
    """A body that is written in parts, as fast as the client reads."""

    async def write(self, writer: AbstractStreamWriter) -> None:
        """As aiohttp says."""
        for start in range(0, len(self._value), PART_BYTES):
            await writer.write(self._value[start : start + PART_BYTES])
            await writer.drain()


class CachedDocument:
    """Serves the JSON of `build`, which is called at the first request."""

    def __init__(self, build: Callable[[], dict[str, Any]]) -> None:
        self._build = build
        self._body = b""
        self._etag = ""

    async def serve(self, request: web.Request) -> web.Response:
        """Return the document, or 304 if the client has it (`If-None-Match`)."""
        if not self._body:
            self._body = orjson.dumps(self._build())
            self._etag = sha256(self._body).hexdigest()[:32]
        known = {etag.value for etag in request.if_none_match or ()}
        is_known = not known.isdisjoint({self._etag, ETAG_ANY})
        response = (
            web.Response(status=304) if is_known else web.Response(body=PartedBody(self._body, content_type=JSON))
        )
        response.etag = self._etag
        response.headers["Cache-Control"] = "no-cache"
        return response
