"""Canonical JSON: every value has exactly one encoding.

`canonical` implements RFC 8785 (JCS). A number with a fraction or an exponent is a double, and every finite double has
a canonical form. An integer has one if ECMAScript formats its nearest double as exactly this integer. Other integers
are refused with an error that gives their path and the number that they would become. `canonical_args` is the stricter
form for run arguments: integers only, strings in NFC, null members omitted.

Two encoders produce the same bytes. The fast encoder is native code behind a guard that accepts only values that the
native code encodes as JCS does. The exact encoder is the Python code below: it walks the value with an explicit stack,
so that excessive depth is an error instead of a crash, and it tracks the path of every value. The fast encoder never
refuses a value; it falls back to the exact encoder.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import cache
from json.encoder import encode_basestring
from math import inf, isfinite, isnan
from types import NoneType
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from oncelog.errors import CanonicalError

JsonValue = Any
"""A value built from exactly the JSON types: dict with str keys, list, str, int, float, bool, None."""

INTEGER_MAX: Final = 2**53 - 1
"""A double represents every integer up to this one exactly. Only some larger integers have a canonical form (see
`_format_integer`)."""

ARGS_INTEGER_MAX: Final = 2**63 - 1
ARGS_INTEGER_MIN: Final = -(2**63)

DEPTH_LEVELS_MAX: Final = 512
"""Maximum nesting of arrays and objects."""

FAST_DEPTH_LEVELS_MAX: Final = 64
"""Maximum nesting for the fast encoder, well below what the native code and Python's stack support."""

SEND_AS_STRING: Final = "; send it as a string"
"""Suffix of the reason for a refused number."""

LONE_SURROGATE: Final = "lone surrogate in a string; remove it, or send the whole surrogate pair"
_SHORT_TEXT_CHARACTERS: Final = 64
_LONG_RUN_CHARACTERS: Final = 32
"""Length at which a run of combining marks is too slow for `unicodedata` to sort. Real text has a few marks in a row;
Unicode's stream-safe format allows 30."""
_COMBINING_MARKS: Final = (0x300, 0x1E94B)
"""Range of code points that includes all combining marks. A test checks the code points outside it."""
_COMPOSED_MARKS: Final = "\u0f73\u0f75\u0f81"
"""The only other characters that decompose to combining marks. A test checks that there are no more."""
_NOT_FINITE: Final = "NaN and infinities have no JSON form; use null (None) or a string"
_JSON_TYPES: Final = "use a dict, list, string, number, bool or None"
_JSON_FORMS: Final = {
    "bytes": "encode it as a string, for example in base64",
    "date": "use its string form, isoformat()",
    "datetime": "use its string form, isoformat()",
    "Decimal": "use its string form, str()",
    "set": "use a list",
    "frozenset": "use a list",
    "tuple": "use a list",
    "UUID": "use its string form, str()",
}
"""Replacements for values without a JSON form, by name of their type."""
_TOO_LARGE: Final = f"beyond the largest double, 1.7976931348623157e+308{SEND_AS_STRING}"
_TOO_DEEP: Final = f"nested deeper than {DEPTH_LEVELS_MAX} levels"
_FAST_FLOAT_MIN: Final = 1e-4
_FAST_SMALL_FLOAT_MAX: Final = 1e-6
"""Below this value both encoders write an exponent. From here to `_FAST_FLOAT_MIN` only the native encoder does."""
_FAST_FLOAT_MAX: Final = 1e15
_BMP_MAX: Final = "\uffff"
_FOUR_BYTE_PREFIXES: Final = b"\xf0\xf1\xf2\xf3\xf4"
_LITERALS: Final = {True: "true", False: "false", None: "null"}
_SIMPLE_SCALARS: Final = frozenset({str, int, bool, NoneType})
_ORJSON_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER | orjson.OPT_PASSTHROUGH_SUBCLASS
"""Options of the native encoder. It returns even short output in a buffer of 4 KiB, so output that may be kept is
copied."""


def canonical(value: JsonValue) -> bytes:
    """Return the JCS form of a value. Raises CanonicalError if the value has none."""
    encoded = canonical_fast(value)
    return canonical_exact(value) if encoded is None else encoded


def canonical_at(value: JsonValue, path: str, form: Callable[[JsonValue], bytes] = canonical) -> bytes:
    """Return the canonical form of a value inside a larger one. `path` locates the value; errors give the full path."""
    try:
        return form(value)
    except CanonicalError as error:
        raise CanonicalError(path + error.path.removeprefix("$"), error.reason) from error


def canonical_text(text: bytes | str) -> bytes:
    """Return the JCS form of a JSON text. Raises CanonicalError if an object repeats a key.

    The native decoder silently keeps only the last of several equal keys. A dropped pair removes at least one colon,
    and nothing else changes the number of colons if none is escaped. Equal numbers before and after therefore prove
    that no pair was dropped. All other texts go to the exact encoder.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    found = None if b"\\u" in data else canonical_plain(data)
    if found is not None and found[1].count(b":") == data.count(b":"):
        return found[1]
    return canonical_exact(parse(text))


def canonical_plain(text: bytes) -> tuple[JsonValue, bytes] | None:
    """Return the value of a JSON text and its JCS form, or None if the native code may deviate from JCS.

    The decoder passes every float to a hook, so floats that the native encoder writes differently are found without
    walking the value. Whole floats become integers. Callers detect repeated keys by counting colons (`canonical_text`).
    """
    try:
        value = _decode_plain(text)
        return value, _encode_plain(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, orjson.JSONEncodeError, _NotPlain):
        return None


def canonical_fast(value: JsonValue) -> bytes | None:
    """Return the JCS form from the native encoder, or None if the encoder may deviate from JCS."""
    try:
        if not _is_plain(value, FAST_DEPTH_LEVELS_MAX):
            value = _convert_whole_floats(value, FAST_DEPTH_LEVELS_MAX)
        return _encode_plain(value)
    except (orjson.JSONEncodeError, _NotPlain, RecursionError):
        return None


def canonical_exact(value: JsonValue) -> bytes:
    """Return the JCS form from the exact encoder, which is slower, handles any value and reports the path of a
    fault."""
    return _encode(value, _JCS)


def canonical_args(value: JsonValue) -> bytes:
    """Return the strict form of a run's arguments. None means no arguments, encoded as the empty object."""
    if value is None:
        return b"{}"
    return _encode(value, _ARGS)


def parse(text: bytes | str) -> JsonValue:
    """Parse a JSON text.

    Raises CanonicalError for invalid JSON, and for valid JSON without a canonical form: a repeated key in an object, an
    integer with more digits than Python converts, or excessive depth.
    """
    reader = _ParseHooks()
    value = _decode_json(text, reader)
    if reader.has_unreadable:
        _encode(value, _READABLE)
    return value


def parse_parts(data: bytes) -> JsonValue:
    """Return the value of a JSON text, replacing parts that have no canonical form with placeholders.

    A part that `parse` refuses is replaced by an `UnreadableValue` with the reason. Raises CanonicalError for invalid
    JSON. Texts that cannot have such parts go to the native decoder (see `canonical_text`).
    """
    if b"\\u" not in data:
        try:
            value = msgspec.json.decode(data)
            if orjson.dumps(value).count(b":") == data.count(b":"):
                return value
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, orjson.JSONEncodeError):
            pass
    return _decode_json(data, _ParseHooks())


def _decode_json(text: bytes | str, reader: "_ParseHooks") -> JsonValue:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=reader.parse_object,
            parse_int=reader.parse_integer,
            parse_constant=reader.parse_constant,
        )
    except UnicodeDecodeError as error:
        raise CanonicalError("$", f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise CanonicalError("$", f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise CanonicalError("$", f"{_TOO_DEEP}, or too deep for the caller's stack") from error


def format_path(steps: Iterable[str | int]) -> str:
    """Format a path as `$.items[2].price`, with quotes around keys that are not identifiers."""
    return "$" + "".join(map(_format_step, steps))


def nfc(text: str) -> str:
    """Return a string in Unicode normal form C. ASCII strings are returned unchanged.

    `unicodedata` sorts combining marks by moving them one at a time, which would take hours for a run of a million
    marks. This function therefore sorts long runs first, which does not change the result. For a name of 240
    characters, the check for a long run takes 0.4 µs (Japanese) to 8 µs (many marks: Hindi, Hebrew); the search takes
    88 µs.
    """
    if text.isascii():
        return text
    if len(text) > _SHORT_TEXT_CHARACTERS and _may_have_long_run(text):
        text = _sort_long_runs(text)
    return unicodedata.normalize("NFC", text)


def _may_have_long_run(text: str) -> bool:
    """Return False if no 32 characters in a row decompose to combining marks.

    A run of 32 characters includes an index that is 31 modulo 32, and at least 15 characters before or after it.
    """
    combining = unicodedata.combining
    last, half = _LONG_RUN_CHARACTERS - 1, _LONG_RUN_CHARACTERS // 2
    if any(map(combining, text[last::_LONG_RUN_CHARACTERS])):
        for index in range(last, len(text), _LONG_RUN_CHARACTERS):
            if all(map(combining, text[index : index + half])) or all(
                map(combining, text[index - half + 1 : index + 1])
            ):
                return True
    first, second, third = _COMPOSED_MARKS
    return first in text or second in text or third in text


def _sort_long_runs(text: str) -> str:
    """Decompose and sort long runs of combining marks."""
    long_run, decompositions = _compile_mark_tables()

    def sort_marks(run: re.Match[str]) -> str:
        return "".join(sorted(run[0].translate(decompositions), key=unicodedata.combining))

    return long_run.sub(sort_marks, text)


@cache
def _compile_mark_tables() -> tuple[re.Pattern[str], dict[int, str]]:
    """Return a pattern for long runs of characters that decompose to combining marks, and the decompositions.

    They are compiled when the first text that may have a long run arrives, because compiling takes 13 to 20 ms.
    """
    marks = [*filter(unicodedata.combining, map(chr, range(*_COMBINING_MARKS))), *_COMPOSED_MARKS]
    pattern = re.compile(f"[{''.join(marks)}]{{{_LONG_RUN_CHARACTERS},}}")
    decomposed = {ord(mark): unicodedata.normalize("NFD", mark) for mark in marks}
    return pattern, {code: text for code, text in decomposed.items() if text != chr(code)}


def is_unicode(text: str) -> bool:
    """Return whether a string can be encoded in UTF-8, that is, has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_storable(text: str) -> bool:
    """Return whether every store can hold a string: PostgreSQL refuses U+0000, and all refuse lone surrogates."""
    return "\0" not in text and is_unicode(text)


def utf16_sort_key(text: str) -> bytes:
    """Return the sort key for UTF-16 code unit order, in which JCS and JavaScript compare strings."""
    return text.encode("utf-16-be", "surrogatepass")


# --- guard of the fast encoder -----------------------------------------------------------------------


def _is_plain(value: JsonValue, levels: int) -> bool:
    """Return whether the native encoder either encodes a value as JCS does, apart from key order, or fails.

    The native encoder deviates from JCS for floats that are whole or need an exponent, and accepts types that are not
    JSON. It fails for integers beyond 53 bits (some of which have a canonical form), lone surrogates, and keys that are
    not strings.
    """
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not list:
        return kind in _SIMPLE_SCALARS or (kind is float and _is_plain_float(value))
    for item in value:
        kind = type(item)
        if kind in _SIMPLE_SCALARS:
            continue
        if kind is float:
            if not _is_plain_float(item):
                return False
        elif levels == 0 or not _is_plain(item, levels - 1):
            return False
    return True


class _NotPlain(Exception):  # noqa: N818 - used in this module only
    """The native encoder may deviate from JCS."""


def _to_plain_number(value: float) -> float | int:
    """Convert a number to one that the native encoder writes as JCS does. Many programs send whole numbers as `1.0`."""
    if _is_plain_float(value):
        return value
    if value.is_integer() and abs(value) <= INTEGER_MAX:
        return int(value)
    raise _NotPlain


_decode_plain: Final = msgspec.json.Decoder(float_hook=lambda text: _to_plain_number(float(text))).decode


def _convert_whole_floats(value: JsonValue, levels: int) -> JsonValue:
    """Return a copy of the value in which the native encoder writes all numbers as JCS does."""
    kind = type(value)
    if kind in _SIMPLE_SCALARS:
        return value
    if kind is float:
        return _to_plain_number(value)
    if levels >= 0 and kind is dict:
        return {key: _convert_whole_floats(item, levels - 1) for key, item in value.items()}
    if levels >= 0 and kind is list:
        return [_convert_whole_floats(item, levels - 1) for item in value]
    raise _NotPlain


def _encode_plain(value: JsonValue) -> bytes:
    """Return the JCS form of a plain value. Raises _NotPlain if the native encoder may sort its keys in a different
    order."""
    encoded = b"%b" % orjson.dumps(value, option=_ORJSON_OPTIONS)
    # Deleting the prefixes of four-byte characters and comparing lengths is the fastest search for them.
    if encoded.isascii() or len(encoded.translate(None, _FOUR_BYTE_PREFIXES)) == len(encoded):
        return encoded
    if _has_only_bmp_keys(value):
        return encoded
    raise _NotPlain


def _has_only_bmp_keys(value: JsonValue) -> bool:
    """Return whether the keys sort the same in UTF-8, the native encoder's order, as in UTF-16."""
    if type(value) is dict:
        keys = "".join(value)
        if not keys.isascii() and max(keys) > _BMP_MAX:
            return False
        value = value.values()
    return all(_has_only_bmp_keys(item) for item in value if type(item) is dict or type(item) is list)


def _is_plain_float(value: float) -> bool:
    size = abs(value)
    if size < _FAST_SMALL_FLOAT_MAX:
        return size > 0
    return _FAST_FLOAT_MIN <= size < _FAST_FLOAT_MAX and not value.is_integer()


# --- exact encoder -----------------------------------------------------------------------------------

_Entry = tuple[str | int, str, JsonValue]
"""A member or element: its step in the path, the text that precedes it, and its value."""


class UnreadableValue(Exception):  # noqa: N818 - also a value
    """A value without a canonical form. `_encode` catches it and adds the path.

    In parsed JSON it is the placeholder for an unreadable part, until the walk through the value finds the path.
    """

    def __init__(self, reason: str, *steps: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps = steps


class _Form(NamedTuple):
    """The functions that differ between the canonical forms."""

    scalar: Callable[[JsonValue], str]
    members: Callable[[dict[str, JsonValue]], Iterator[_Entry]]
    levels_max: float = DEPTH_LEVELS_MAX


def _encode(value: JsonValue, form: _Form) -> bytes:
    written: list[str] = []
    # Each entry is an open container: its closing bracket and the remaining items.
    stack: list[tuple[str, Iterator[_Entry]]] = [("", iter([("$", "", value)]))]
    steps: list[str | int] = [""]
    try:
        while stack:
            closing, entries = stack[-1]
            entry = next(entries, None)
            if entry is None:
                written.append(closing)
                stack.pop()
                steps.pop()
                continue
            steps[-1], before, item = entry
            written.append(before)
            kind = type(item)
            if kind is not dict and kind is not list:
                written.append(form.scalar(item))
                continue
            if len(stack) > form.levels_max:
                raise UnreadableValue(f"{_TOO_DEEP}; a value must not contain itself")  # noqa: TRY301 - caught below, where the path is known
            if kind is dict:
                written.append("{")
                stack.append(("}", form.members(item)))
            else:
                written.append("[")
                stack.append(("]", ((index, "," if index else "", element) for index, element in enumerate(item))))
            steps.append("")
    except UnreadableValue as refusal:
        raise CanonicalError(format_path([*steps[1:], *refusal.steps]), refusal.reason) from None
    return "".join(written).encode()


def _encode_members(members: list[tuple[str, JsonValue]]) -> Iterator[_Entry]:
    return (
        (key, f"{',' if index else ''}{encode_basestring(key)}:", item) for index, (key, item) in enumerate(members)
    )


def _encode_jcs_members(value: dict[str, JsonValue]) -> Iterator[_Entry]:
    for key in value:
        _check_key(key)
    return _encode_members(sorted(value.items(), key=lambda member: utf16_sort_key(member[0])))


def _encode_args_members(value: dict[str, JsonValue]) -> Iterator[_Entry]:
    members: dict[str, JsonValue] = {}
    for key, item in value.items():
        _check_key(key)
        normal = nfc(key)
        if normal in members:
            raise UnreadableValue("two keys are equal in Unicode normal form C", key)
        members[normal] = item
    return _encode_members([(key, members[key]) for key in sorted(members) if members[key] is not None])


def _encode_jcs_scalar(value: JsonValue) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring(_check_text(value))
    if kind is int:
        return str(value) if -INTEGER_MAX <= value <= INTEGER_MAX else _format_integer(value)
    if kind is float:
        return _format_number(value)
    return _encode_other_scalar(value)


def _encode_args_scalar(value: JsonValue) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring(nfc(_check_text(value)))
    if kind is int:
        if not ARGS_INTEGER_MIN <= value <= ARGS_INTEGER_MAX:
            raise UnreadableValue(f"integer outside the signed 64-bit range{SEND_AS_STRING}")
        return str(value)
    if kind is float:
        raise UnreadableValue("floats are not allowed in run arguments; send an integer or a string")
    return _encode_other_scalar(value)


def _encode_other_scalar(value: JsonValue) -> str:
    if value is None or type(value) is bool:
        return _LITERALS[value]
    _check_readable(value)
    kind = type(value).__name__
    raise UnreadableValue(f"a value of type {kind} has no JSON form; {_JSON_FORMS.get(kind, _JSON_TYPES)}")


def _check_readable(value: JsonValue) -> str:
    if type(value) is UnreadableValue:
        raise value
    return ""


def _check_key(key: object) -> None:
    if type(key) is not str:
        raise UnreadableValue(f"a key must be a string, not {type(key).__name__}")
    if not is_unicode(key):
        raise UnreadableValue("lone surrogate in a key", key)


def _check_text(text: str) -> str:
    if not is_unicode(text):
        raise UnreadableValue(LONE_SURROGATE)
    return text


def _format_integer(value: int) -> str:
    """Return the ECMAScript text of the nearest double. Refuse the integer if that text denotes a different number."""
    try:
        nearest = float(value)
    except OverflowError:
        raise UnreadableValue(f"integer {_TOO_LARGE}") from None
    text = _format_number(nearest)
    if int(Decimal(text)) != value:
        raise UnreadableValue(f"integer that would become {text} as a double{SEND_AS_STRING}")
    return text


def _format_number(value: float) -> str:
    """Return ECMAScript's Number::toString, built from the shortest digits that parse back to the value."""
    if not isfinite(value):
        raise UnreadableValue(_NOT_FINITE if isnan(value) else f"infinite, or {_TOO_LARGE}")
    if value.is_integer() and abs(value) <= INTEGER_MAX:
        return str(int(value))
    negative, digit_tuple, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - only NaN and infinities have a letter as exponent
    digits = "".join(map(str, digit_tuple))
    point = len(digits) + exponent  # index of the decimal point, counted from the first digit
    digits = digits.rstrip("0")
    return ("-" if negative else "") + _place_point(digits, point)


def _place_point(digits: str, point: int) -> str:
    if len(digits) <= point <= 21:
        return digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    mantissa = digits if len(digits) == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{mantissa}e{point - 1:+d}"


_JCS: Final = _Form(_encode_jcs_scalar, _encode_jcs_members)
_ARGS: Final = _Form(_encode_args_scalar, _encode_args_members)
_READABLE: Final = _Form(_check_readable, lambda members: _encode_members([*members.items()]), inf)
"""Finds the first unreadable value. The encoded text is discarded."""


# --- decoding of text --------------------------------------------------------------------------------


class _ParseHooks:
    """Decoder hooks for one parse. They record whether the text has unreadable parts, so that most values need no
    second walk."""

    def __init__(self) -> None:
        self.has_unreadable = False

    def parse_object(self, pairs: list[tuple[str, JsonValue]]) -> JsonValue:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        first: dict[str, int] = {}
        repeated = next(key for index, (key, _) in enumerate(pairs) if first.setdefault(key, index) != index)
        return self._record_unreadable("duplicate key in an object", repeated)

    def parse_integer(self, digits: str) -> JsonValue:
        try:
            return int(digits)
        except ValueError:
            return self._record_unreadable(f"integer with too many digits{SEND_AS_STRING}")

    def parse_constant(self, _name: str) -> JsonValue:
        return self._record_unreadable(_NOT_FINITE)

    def _record_unreadable(self, reason: str, *steps: str) -> UnreadableValue:
        self.has_unreadable = True
        return UnreadableValue(reason, *steps)


def _format_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and step.isascii() else f"[{json.dumps(step)}]"
