"""Types of CSV cells: the same types as in a gateway's schemas."""

import re
from collections.abc import Callable, Mapping
from typing import Final

import orjson

from oncelog.core.canonical import INTEGER_MAX, SEND_AS_STRING, canonical, canonical_text
from oncelog.errors import CanonicalError

TEXT: Final = "text"
INTEGER: Final = "integer"
NUMBER: Final = "number"
BOOLEAN: Final = "boolean"
NULLABLE_SUFFIX: Final = "?"
"""Suffix of a type that encodes an empty cell as null."""
EXACT_DIGITS_MAX: Final = 15
"""A decimal number with up to this many digits survives a conversion to a double and back."""
NUMBER_CHARACTERS_MAX: Final = 400
"""Longest accepted number. The largest double has 309 digits."""
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
_NUMBER: Final = re.compile(r"-?((?:0|[1-9][0-9]*)(?:\.[0-9]+)?)([eE][+-]?[0-9]{1,4})?", re.ASCII)

CellEncoder = Callable[[str], bytes]
"""Encodes the text of a cell as canonical JSON. Raises a ValueError that states the problem."""


def _encode_integer(text: str) -> bytes:
    if len(text) > NUMBER_CHARACTERS_MAX or _INTEGER.fullmatch(text) is None:
        raise ValueError("is not an integer")
    try:
        return canonical(int(text))
    except CanonicalError as error:
        raise ValueError(f"is an {error.reason.removesuffix(SEND_AS_STRING)}; import it as text") from None


def _encode_number(text: str) -> bytes:
    if len(text) > NUMBER_CHARACTERS_MAX or _NUMBER.fullmatch(text) is None:
        raise ValueError("is not a number (digits, a point, an exponent)")
    if _INTEGER.fullmatch(text) is not None:
        return _encode_integer(text)
    try:
        return canonical(float(text))
    except CanonicalError:
        raise ValueError("is larger than any JSON number") from None


def _encode_boolean(text: str) -> bytes:
    if text.lower() not in ("true", "false"):
        raise ValueError("is neither true nor false")
    return text.lower().encode()


def _encode_json(text: str) -> bytes:
    try:
        return canonical_text(text)
    except CanonicalError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


_ENCODERS: Final[Mapping[str, CellEncoder]] = {
    TEXT: orjson.dumps,
    INTEGER: _encode_integer,
    NUMBER: _encode_number,
    BOOLEAN: _encode_boolean,
    "json": _encode_json,
}


def get_encoder(name: str) -> CellEncoder:
    """Return the encoder for a type such as `integer` or `integer?`. Raises ValueError for an unknown type."""
    kind = _ENCODERS.get(name.removesuffix(NULLABLE_SUFFIX))
    if kind is None:
        raise ValueError(f"must be one of {', '.join(_ENCODERS)}, followed by ? if an empty cell is null")
    if not name.endswith(NULLABLE_SUFFIX):
        return kind
    return lambda text: kind(text) if text else b"null"


class TypeGuess:
    """Finds the narrowest type of a column that preserves the text of every cell."""

    def __init__(self) -> None:
        self._candidates = [INTEGER, NUMBER, BOOLEAN]
        self._has_empty = False
        self._has_text = False

    def observe(self, text: str) -> None:
        """Take the text of a cell into account."""
        if not text:
            self._has_empty = True
            return
        self._has_text = True
        if self._candidates:
            self._candidates = [name for name in self._candidates if _is_exact(name, text)]

    def choose_type(self) -> str:
        """Return the type that fits all observed cells. With a type other than text, an empty cell is null."""
        if not self._candidates or not self._has_text:
            return TEXT
        return self._candidates[0] + (NULLABLE_SUFFIX if self._has_empty else "")


def _is_exact(name: str, text: str) -> bool:
    if name == NUMBER:
        found = _NUMBER.fullmatch(text)
        if found is None or len(found[1].replace(".", "").lstrip("0")) > EXACT_DIGITS_MAX:
            return False
    try:
        _ENCODERS[name](text)
    except ValueError:
        return False
    return text != "-0" and (name != INTEGER or abs(int(text)) <= INTEGER_MAX)
