"""Byte mutations that the fuzzer uses to derive new inputs from the corpus."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

BYTES_MAX: Final = 64 * 1024
"""Inputs are short, because length matters only for limits, which have separate tests."""
TOKENS: Final = (
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\\udc00", b"\\u00e9"),
    *(b"null", b"true", b"false", b"0", b"-0", b"-1", b"1e400", b"1e-400", b"1.5", b"NaN", b"Infinity"),
    *(b"9007199254740991", b"9007199254740993", b"9223372036854775808", b"18446744073709551616", b"1" * 400),
    *(b"\x00", b"\x7f", b"\x80", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xa8"),
    *("é".encode(), "e\u0301".encode(), "😀".encode(), "\u202e".encode()),
    *(b"[" * 200, b'{"a":' * 200, b" " * 300, b"\r\n", b"%00", b"../", b"'", b";", b"--", b"=", b".", b"=="),
)

Mutation = Callable[[bytearray, Random, Sequence[bytes]], None]


def mutate(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return the input after one to eight mutations."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        random.choice(MUTATIONS)(changed, random, corpus)
    return bytes(changed[:BYTES_MAX])


def _flip_bit(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _replace_byte(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _insert_token(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.choice(TOKENS)


def _replace_with_token(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    data[start:end] = random.choice(TOKENS)


def _delete_part(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    del data[start:end]


def _repeat_part(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    data[end:end] = data[start:end] * random.choice((1, 1, 2, 10, 100))
    del data[BYTES_MAX:]


def _move_part(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    start, end = _part(data, random)
    part = data[start:end]
    del data[start:end]
    place = random.randrange(len(data) + 1)
    data[place:place] = part


def _truncate(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del data[random.randrange(len(data) + 1) :]


def _splice(data: bytearray, random: Random, corpus: Sequence[bytes]) -> None:
    """Replace a part with a part of another input."""
    other = bytearray(random.choice(corpus))
    start, end = _part(data, random)
    first, last = _part(other, random)
    data[start:end] = other[first:last]


def _replace_number(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    digits = [place for place, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if digits:
        place = random.choice(digits)
        data[place : place + 1] = random.choice((b"-1", b"0", b"1.0", b"1e3", b"99999999999999999999", b"00", b""))


def _part(data: bytearray, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((0, 1, 1, 2, 4, 8, 16, 64)))


MUTATIONS: Final[tuple[Mutation, ...]] = (
    _flip_bit,
    _replace_byte,
    _insert_token,
    _replace_with_token,
    _delete_part,
    _repeat_part,
    _move_part,
    _truncate,
    _splice,
    _replace_number,
)
