"""Requests and answers over plain HTTP, for every API."""

import asyncio
import re
import zlib
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes

from aiohttp import web

from oncelog import error_codes
from oncelog.server.errors import ApiError, field_error
from oncelog.server.limits import LONG_FRAME_BYTES

JSON: Final = "application/json"
ENCODINGS: Final = ("identity", "gzip", "deflate")
_GZIP_BITS: Final = zlib.MAX_WBITS + 16
BODY_TIMEOUT_S: Final = 60
"""How long the body of a request may take to come."""
_DIGITS_MAX: Final = 16
_BAD_PERCENT: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_FIELDS_MAX: Final = 1000
"""Of a query. One that is shorter than its line may be can have no more that mean anything."""


def get_credential(request: web.Request) -> str | None:
    """What the client shows, if anything."""
    return parse_bearer(request.headers.get("Authorization", ""))


def parse_bearer(header: str) -> str | None:
    """The credential in an `Authorization`, if it has one that we know."""
    kind, _, credential = header.partition(" ")
    return credential.strip() if kind.lower() == "bearer" else None


def check_single_authorization(headers: Sequence[str]) -> None:
    """Raise ApiError for a request with several `Authorization` headers.

    A proxy may check one of them and the server another.
    """
    if len(headers) > 1:
        raise field_error("Authorization", "must not be repeated")


def check_json(request: web.Request) -> None:
    """Raises ApiError. A page of another origin can send a form without asking, but not this (CO-24)."""
    if request.content_type != JSON:
        raise field_error("Content-Type", f"must be {JSON}", status=415)


async def read_body(request: web.Request) -> bytes:
    """Raises ApiError for one that is not what its headers say: half of a chunk, no gzip."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise field_error("Content-Encoding", f"must be one of {', '.join(ENCODINGS)}", status=415)
    try:
        if request.content.is_eof():
            body = await request.read()  # it has come with the headers, as most do
        else:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
    except TimeoutError:
        raise field_error("body", f"must be there within {BODY_TIMEOUT_S} seconds", status=408) from None
    except web.RequestPayloadError:
        raise _body_error() from None
    if encoding == "identity" or not body:
        return body
    bytes_max = request.client_max_size
    if bytes_max > LONG_FRAME_BYTES:  # what is short can become long: others must not wait for it
        return await asyncio.to_thread(_decompress, body, encoding, bytes_max)
    return _decompress(body, encoding, bytes_max)


def _decompress(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Raises ApiError for what is none, and HTTPRequestEntityTooLarge once it is longer than it may be: what would
    come after that is not made at all."""
    # Some send deflate without the header that it has by its standard, whose first byte says how it is packed.
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
    return field_error("body", "is not what the headers say that it is")


def get_path_name(request: web.Request, name: str) -> str:
    """A name of the path, decoded once. Raises ApiError.

    aiohttp's `match_info` keeps invalid UTF-8 as it was sent, and decodes `%25` afterwards: `%FF` and `%25FF` would
    be one name.
    """
    resource = request.match_info.route.resource
    assert resource is not None  # noqa: S101 - a handler that asks for a name was found by a path
    place = resource.canonical.split("/").index(f"{{{name}}}")
    sent = request.rel_url.raw_path.split("/")[place]
    if _BAD_PERCENT.search(sent):
        raise field_error(name, "must write % as %25 in the path")
    try:
        return unquote_to_bytes(sent.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise field_error(name, "must be UTF-8, percent-encoded, in the path") from None


def parse_query(request: web.Request) -> list[tuple[str, str]]:
    """As it was sent. aiohttp's own puts another character in place of what is not UTF-8, and so another partition."""
    try:
        return parse_qsl(
            request.rel_url.raw_query_string, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        is_text = isinstance(error, UnicodeDecodeError)
        message = "the query must be UTF-8" if is_text else f"the query must have at most {_FIELDS_MAX} parameters"
        raise ApiError(error_codes.BAD_REQUEST, message, field="query") from None


def parse_number(text: str, name: str) -> int:
    """A number of a query. Raises ApiError."""
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) >= 2**53:
        raise field_error(name, "must be a whole number from 0 to 2^53−1")
    return int(text)
