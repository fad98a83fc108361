"""HTTP/2 frames of gRPC calls that never finish."""

from typing import Final

DATA: Final = 0
HEADERS: Final = 1
SETTINGS: Final = 4
CONTINUATION: Final = 9
END_HEADERS: Final = 4
FRAME_BYTES_MAX: Final = 16_384
LONG_INTEGER: Final = 127
"""A string length of 127 or more continues in further bytes of seven bits each."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DECLARED_BYTES: Final = 3 * 2**20
CALLS: Final = {
    "call": "/oncelog.ledger.v1.Ledger/Write",
    "health": "/grpc.health.v1.Health/Check",
}


def frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: str, value: str) -> bytes:
    """Encode a header that is not added to the dynamic table."""
    return b"\0" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    if len(text) < LONG_INTEGER:
        return bytes([len(text)]) + text.encode()
    length, rest = bytearray([LONG_INTEGER]), len(text) - LONG_INTEGER
    while rest >= 128:
        length.append(128 | rest % 128)
        rest //= 128
    return bytes([*length, rest]) + text.encode()


def _headers(path: str) -> bytes:
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "127.0.0.1"}
    return b"".join(header(*pair) for pair in {**pairs, "content-type": "application/grpc", "te": "trailers"}.items())


def unfinished_call(shape: str, size: int) -> bytes:
    """Return an unfinished call that has sent about `size` bytes of its headers (`metadata`) or of its message."""
    if shape == "metadata":
        block = _headers(CALLS["call"]) + header("authorization", "a" * size)
        parts = [block[at : at + FRAME_BYTES_MAX] for at in range(0, size, FRAME_BYTES_MAX)]
        return frame(HEADERS, parts[0], stream=1) + b"".join(frame(CONTINUATION, one, stream=1) for one in parts[1:])
    message = b"\0" + DECLARED_BYTES.to_bytes(4, "big") + bytes(size)
    parts = [message[at : at + FRAME_BYTES_MAX] for at in range(0, size, FRAME_BYTES_MAX)]
    opened = frame(HEADERS, _headers(CALLS[shape]), flags=END_HEADERS, stream=1)
    return (opened + b"".join(frame(DATA, one, stream=1) for one in parts))[:-1]


OPENING: Final = PREFACE + frame(SETTINGS, b"")
