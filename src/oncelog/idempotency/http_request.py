"""HTTP requests with an `Idempotency-Key`, and the fingerprints used to compare them."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any

from msgspec import Struct

from oncelog.core.identity import frame
from oncelog.core.limits import FINGERPRINT_BYTES_MAX
from oncelog.idempotency.call_key import encode_value


class HttpRequest(Struct, frozen=True):
    """A request, as the middleware passes it to its fingerprint function."""

    method: str
    path: bytes
    """The percent-encoded path, if the server provides it."""
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers in request order. Names are in lower case."""
    body: bytes

    def header(self, name: str) -> bytes:
        """Return the value of a header, joined with commas if it is repeated, or empty if it is missing."""
        wanted = name.lower().encode()
        return b", ".join(value for found, value in self.headers if found == wanted)

    def fingerprint(self) -> bytes:
        """Return the middleware's default fingerprint: the SHA-256 of method, path, query and body."""
        fields = (
            (b"method", self.method.encode()),
            (b"path", self.path),
            (b"query", self.query),
            (b"body", self.body),
        )
        return sha256(b"".join(frame(label, value) for label, value in fields)).digest()


Fingerprint = Callable[[HttpRequest], Any | Awaitable[Any]]
"""Function of the application that returns what identifies a request: bytes, or a value such as a model."""


def build_http_request(scope: Mapping[str, Any], body: bytes) -> HttpRequest:
    """Build the request from an ASGI scope and its body."""
    return HttpRequest(
        method=scope["method"],
        path=scope.get("raw_path") or str(scope["path"]).encode("utf-8", "surrogatepass"),
        query=scope.get("query_string", b""),
        headers=tuple((bytes(name).lower(), bytes(value)) for name, value in scope["headers"]),
        body=body,
    )


async def compute_fingerprint(request: HttpRequest, replacement: Fingerprint | None) -> bytes:
    """Return the fingerprint of a request, computed by the application's function if it has one.

    That function returns 1 to 64 bytes, which are the fingerprint, or a value that identifies the request together with
    its method and path. Raises TypeError or ValueError for anything else.
    """
    if replacement is None:
        return request.fingerprint()
    replaced = replacement(request)
    found: object = await replaced if inspect.isawaitable(replaced) else replaced
    if found is None:
        raise TypeError("fingerprint must return bytes, or a value that identifies the request, not None")
    if not isinstance(found, bytes):
        return _hash_value(request, found)
    if not 1 <= len(found) <= FINGERPRINT_BYTES_MAX:
        raise ValueError(
            f"fingerprint must return 1 to {FINGERPRINT_BYTES_MAX} bytes, not {len(found)}; return a hash of them"
        )
    return found


def _hash_value(request: HttpRequest, value: object) -> bytes:
    try:
        encoded = encode_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"fingerprint returned a value of type {type(value).__name__}, which has no canonical form: {error}; "
            f"return 1 to {FINGERPRINT_BYTES_MAX} bytes, or a value that JSON, dataclasses or pydantic models represent"
        ) from error
    fields = ((b"method", request.method.encode()), (b"path", request.path), (b"value", encoded))
    return sha256(b"".join(frame(label, part) for label, part in fields)).digest()
