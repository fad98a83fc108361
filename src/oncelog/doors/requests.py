"""Requests and answers over plain HTTP, as every door has them."""

import asyncio
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes

from aiohttp import web

from oncelog import codes
from oncelog.doors.faults import DoorError, error_json
from oncelog.doors.limits import LONG_FRAME_BYTES

JSON: Final = "application/json"
ENCODINGS: Final = ("identity", "gzip", "deflate")
_GZIP_BITS: Final = zlib.MAX_WBITS + 16
BODY_S: Final = 60
"""How long the body of a request may take to come."""
STATUS: Final = {
    codes.BAD_REQUEST: 400,
    codes.AUTH_FAILED: 401,
    codes.FORBIDDEN: 403,
    codes.NOT_FOUND: 404,
    codes.HISTORY_CHANGED: 409,
    codes.RATE_LIMITED: 429,
    codes.SERVER_BUSY: 503,
    codes.READ_ONLY: 503,
    codes.QUOTA_EXCEEDED: 507,
    codes.SERVER_ERROR: 500,
}
"""The one table from the door's errors to HTTP's."""
_DIGITS_MAX: Final = 16
_NOT_ENCODED: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_FIELDS_MAX: Final = 1000
"""Of a query. One that is shorter than its line may be can have no more that mean anything."""


def credential_of(request: web.Request) -> str | None:
    """What the client shows, if anything."""
    return bearer_of(request.headers.get("Authorization", ""))


def bearer_of(header: str) -> str | None:
    """The credential in an `Authorization`, if it has one that we know."""
    kind, _, credential = header.partition(" ")
    return credential.strip() if kind.lower() == "bearer" else None


def check_single_authorization(headers: Sequence[str]) -> None:
    """Raise DoorError for a request with several `Authorization` headers.

    A proxy may check one of them and the server another.
    """
    if len(headers) > 1:
        raise DoorError(codes.BAD_REQUEST, "Authorization: must not be repeated", field="Authorization")


def demand_json(request: web.Request) -> None:
    """Raises DoorError. A page of another origin can send a form without asking, but not this (CO-24)."""
    if request.content_type != JSON:
        raise DoorError(codes.BAD_REQUEST, f"Content-Type: must be {JSON}", field="Content-Type", status=415)


async def body_of(request: web.Request) -> bytes:
    """Raises DoorError for one that is not what its headers say: half of a chunk, no gzip."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        message = f"Content-Encoding: must be one of {', '.join(ENCODINGS)}"
        raise DoorError(codes.BAD_REQUEST, message, field="Content-Encoding", status=415)
    try:
        if request.content.is_eof():
            body = await request.read()  # it has come with the headers, as most do
        else:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
    except TimeoutError:
        message = f"body: must be there within {BODY_S} seconds"
        raise DoorError(codes.BAD_REQUEST, message, field="body", status=408) from None
    except web.RequestPayloadError:
        raise _not_as_said() from None
    if encoding == "identity" or not body:
        return body
    bytes_max = request.client_max_size
    if bytes_max > LONG_FRAME_BYTES:  # what is short can become long: others must not wait for it
        return await asyncio.to_thread(_unpacked, body, encoding, bytes_max)
    return _unpacked(body, encoding, bytes_max)


def _unpacked(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Raises DoorError for what is none, and HTTPRequestEntityTooLarge once it is longer than it may be: what would
    come after that is not made at all."""
    # Some send deflate without the header that it has by its standard, whose first byte says how it is packed.
    has_header = body[0] & 0x0F == zlib.DEFLATED
    bits = _GZIP_BITS if encoding == "gzip" else zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    unpacking = zlib.decompressobj(bits)
    try:
        found = unpacking.decompress(body, bytes_max + 1)
    except zlib.error:
        raise _not_as_said() from None
    if len(found) > bytes_max:
        raise web.HTTPRequestEntityTooLarge(max_size=bytes_max, actual_size=len(found))
    if not unpacking.eof or unpacking.unused_data:
        raise _not_as_said()
    return found


def _not_as_said() -> DoorError:
    return DoorError(codes.BAD_REQUEST, "body: is not what the headers say that it is", field="body")


def path_name(request: web.Request, name: str) -> str:
    """A name of the path, decoded once. Raises DoorError.

    aiohttp's `match_info` keeps invalid UTF-8 as it was sent, and decodes `%25` afterwards: `%FF` and `%25FF` would
    be one name.
    """
    resource = request.match_info.route.resource
    assert resource is not None  # noqa: S101 - a handler that asks for a name was found by a path
    place = resource.canonical.split("/").index(f"{{{name}}}")
    sent = request.rel_url.raw_path.split("/")[place]
    if _NOT_ENCODED.search(sent):
        raise DoorError(codes.BAD_REQUEST, f"{name}: must write % as %25 in the path", field=name)
    try:
        return unquote_to_bytes(sent.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        message = f"{name}: must be UTF-8, percent-encoded, in the path"
        raise DoorError(codes.BAD_REQUEST, message, field=name) from None


def query_of(request: web.Request) -> list[tuple[str, str]]:
    """As it was sent. aiohttp's own puts another character in place of what is not UTF-8, and so another partition."""
    try:
        return parse_qsl(
            request.rel_url.raw_query_string, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        is_text = isinstance(error, UnicodeDecodeError)
        message = "the query must be UTF-8" if is_text else f"the query must have at most {_FIELDS_MAX} parameters"
        raise DoorError(codes.BAD_REQUEST, message, field="query") from None


def parameters_of(request: web.Request, names: Collection[str]) -> dict[str, str]:
    """The parameters of a query. Raises DoorError for one that has no meaning, or is there twice."""
    given: dict[str, str] = {}
    for name, value in query_of(request):
        if name not in names:
            raise DoorError(codes.BAD_REQUEST, f"{name}: is no parameter of this request", field=name)
        if name in given:
            raise DoorError(codes.BAD_REQUEST, f"{name}: must be there once", field=name)
        given[name] = value
    return given


def number_of(text: str, name: str) -> int:
    """A number of a query. Raises DoorError."""
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) >= 2**53:
        raise DoorError(codes.BAD_REQUEST, f"{name}: must be a whole number from 0 to 2^53−1", field=name)
    return int(text)


def error_response(error: DoorError, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as HTTP has it: the same words as on the WebSocket, in the body. `status` is told by HTTP itself."""
    headers = dict(headers or {})
    details = dict(error.details)
    status = details.pop("status", STATUS[error.code])
    retry_after_ms = details.get("retry_after_ms")
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    if error.code == codes.AUTH_FAILED:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        body=b'{"error":%b}' % error_json(DoorError(error.code, error.message, **details)),
        status=status,
        content_type=JSON,
        headers=headers,
    )
    if details.get("field") == "body":
        response.force_close()  # what is left of it was not read, and is in the way of a next request
    return response
