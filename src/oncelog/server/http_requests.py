"""Parsing of HTTP requests, for every API."""

import asyncio
import re
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes

from aiohttp import web

from oncelog import error_codes
from oncelog.server.background_tasks import run_long
from oncelog.server.errors import ApiError, field_error
from oncelog.server.json_schemas import JSON

ENCODINGS: Final = ("identity", "gzip", "deflate")
_GZIP_BITS: Final = zlib.MAX_WBITS + 16
BODY_TIMEOUT_S: Final = 60
"""Longest time in which the body of a request must arrive."""
_DIGITS_MAX: Final = 16
_BAD_PERCENT: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_FIELDS_MAX: Final = 1000
"""Parameters of one query. No operation needs as many."""


def get_credential(request: web.Request) -> str | None:
    """Return the bearer credential of a request, or None for a request without one."""
    return parse_bearer(request.headers.get("Authorization", ""))


def parse_bearer(header: str) -> str | None:
    """Return the credential of an `Authorization` header, or None for another scheme than `Bearer`."""
    kind, _, credential = header.partition(" ")
    return credential.strip() if kind.lower() == "bearer" else None


def check_single_authorization(headers: Sequence[str]) -> None:
    """Raise ApiError for a request with several `Authorization` headers.

    A proxy may check one of them and the server another.
    """
    if len(headers) > 1:
        raise field_error("Authorization", "must not be repeated")


def check_json(request: web.Request) -> None:
    """Raise ApiError unless the body is JSON, which browsers send to other origins only after a preflight (CO-24)."""
    if request.content_type != JSON:
        raise field_error("Content-Type", f"must be {JSON}", status=415)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises ApiError if it does not match its headers, such as half of a chunk."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise field_error("Content-Encoding", f"must be one of {', '.join(ENCODINGS)}", status=415)
    try:
        if request.content.is_eof():
            body = await request.read()  # most bodies arrive together with the headers
        else:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
    except TimeoutError:
        raise field_error("body", f"must arrive within {BODY_TIMEOUT_S} seconds", status=408) from None
    except web.RequestPayloadError:
        raise _body_error() from None
    if encoding == "identity" or not body:
        return body
    bytes_max = request.client_max_size
    return await run_long(bytes_max, partial(_decompress, body, encoding, bytes_max))


def _decompress(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Decompress a body. Raises ApiError if it is malformed, HTTPRequestEntityTooLarge as soon as it is too long."""
    # Some clients send deflate without the zlib header, whose first byte names the method.
    has_header = body[0] & 0x0F == zlib.DEFLATED
    bits = _GZIP_BITS if encoding == "gzip" else zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(bits)
    try:
        found = decompressor.decompress(body, bytes_max + 1)
    except zlib.error:
        raise _body_error() from None
    if len(found) > bytes_max:
        raise web.HTTPRequestEntityTooLarge(max_size=bytes_max, actual_size=len(found))
    if not decompressor.eof or decompressor.unused_data:
        raise _body_error()
    return found


def _body_error() -> ApiError:
    return field_error("body", "does not match its headers")


def get_path_name(request: web.Request, name: str) -> str:
    """Return a name in the path, decoded once. Raises ApiError.

    aiohttp's `match_info` keeps invalid UTF-8 as it was sent, and decodes `%25` afterwards: `%FF` and `%25FF` would
    be one name.
    """
    resource = request.match_info.route.resource
    assert resource is not None  # noqa: S101 - a route with names has a resource
    place = resource.canonical.split("/").index(f"{{{name}}}")
    sent = request.rel_url.raw_path.split("/")[place]
    if _BAD_PERCENT.search(sent):
        raise field_error(name, "must have %25 for % in the path")
    try:
        return unquote_to_bytes(sent.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise field_error(name, "must be UTF-8, percent-encoded, in the path") from None


def parse_query(request: web.Request) -> list[tuple[str, str]]:
    """Return the parameters of the query as they were sent. Raises ApiError.

    The parser of aiohttp replaces invalid UTF-8 by another character, which could name another partition.
    """
    try:
        return parse_qsl(
            request.rel_url.raw_query_string, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        is_text = isinstance(error, UnicodeDecodeError)
        message = "the query must be UTF-8" if is_text else f"the query must have at most {_FIELDS_MAX} parameters"
        raise ApiError(error_codes.BAD_REQUEST, message, field="query") from None


def parse_number(text: str, name: str) -> int:
    """Parse a whole number of a query. Raises ApiError."""
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) >= 2**53:
        raise field_error(name, "must be a whole number from 0 to 2^53−1")
    return int(text)
