"""Canonical JSON: RFC 8785, and the strict form of run arguments. Numbers are in test_canonical_numbers."""

import inspect
import json
import math
import struct
import sys
import tracemalloc
import unicodedata
import uuid
from collections import OrderedDict
from decimal import Decimal
from enum import IntEnum
from typing import Any

import pytest
import rfc8785
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncelog.core.canonical import (
    DEPTH_LEVELS_MAX,
    FAST_DEPTH_LEVELS_MAX,
    INTEGER_MAX,
    canonical,
    canonical_args,
    canonical_exact,
    canonical_fast,
    canonical_text,
    format_path,
    nfc,
    parse,
    utf16_sort_key,
)
from oncelog.errors import CanonicalError

# Characters around every relevant limit: escapes, surrogates, the private use area, beyond the BMP.
odd_text = st.text(
    alphabet=st.sampled_from('aZ0 "\\/\x00\x08\x1f\x7f\x80é\u0301\u2028\ud7ff\ue000\ufb33\uffff\U00010000\U0001f600')
)
text = st.text() | odd_text
integers = st.integers(-INTEGER_MAX, INTEGER_MAX)
odd_floats = st.sampled_from(
    [0.0, -0.0, 1.0, -1.5, 1e-4, 9.999e-5, 1e-6, 1e-7, 5e-324, 1e15, 1e15 + 0.5, 123456789012345.6, 1e16, 1e21, 1.5e300]
)
floats = st.floats(allow_nan=False, allow_infinity=False) | odd_floats
scalars = st.none() | st.booleans() | integers | floats | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5), max_leaves=30
)


def nested(levels: int, innermost: Any = 1) -> Any:
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


# --- JCS ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-1", "CO-4")
@given(values)
def test_fast_and_slow_path_agree_with_an_independent_library(value: Any) -> None:
    exact = canonical_exact(value)
    assert exact == rfc8785.dumps(value)
    assert canonical_fast(value) in {None, exact}
    assert canonical(value) == exact


@pytest.mark.rule("CO-2", "CO-4")
@given(values)
def test_canonical_form_is_a_fixed_point(value: Any) -> None:
    form = canonical(value)
    assert canonical_text(form) == form
    assert canonical(parse(form)) == form


@pytest.mark.rule("CO-4")
@given(values, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_equal_values_have_one_form_regardless_of_spelling(value: Any, indent: Any, ascii_only: bool) -> None:
    spelled = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert canonical_text(spelled) == canonical(value)
    assert canonical_text(spelled.encode()) == canonical(value)


@pytest.mark.rule("CO-1", "CO-4")
@given(st.integers(0, 2**64 - 1))
@example(0x7FEFFFFFFFFFFFFF)
@example(0x0000000000000001)
@example(0x0010000000000000)
@example(0x3EB0C6F7A0B5ED8D)
def test_doubles_are_written_as_in_ecmascript(bits: int) -> None:
    (number,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    assume(math.isfinite(number))
    assert canonical(number) == canonical_exact(number) == rfc8785.dumps(number)
    assert float(canonical(number)) == number


@pytest.mark.rule("CO-4")
@pytest.mark.parametrize("levels", [1, FAST_DEPTH_LEVELS_MAX, FAST_DEPTH_LEVELS_MAX + 1, 300, DEPTH_LEVELS_MAX])
def test_nesting_depth_selects_the_path_but_not_the_bytes(levels: int) -> None:
    value = nested(levels - 1, {"b": 1.0, "a": "é"})
    form = canonical(value)
    assert form == canonical_exact(value)
    assert canonical_text(form) == form
    assert json.loads(form) == value


@pytest.mark.rule("CO-4")
@pytest.mark.parametrize(
    ("value", "is_fast"),
    [
        ({"a": [1, "é", None, 0.5, {"😀": 1}], "total": 99.0, "zero": -0.0}, False),
        ({"a": [1, "é😀", None, 0.5, True], "total": 99.0, "zero": -0.0}, True),
        (nested(FAST_DEPTH_LEVELS_MAX + 1), True),
        (nested(FAST_DEPTH_LEVELS_MAX + 1, 1.0), True),
        (nested(FAST_DEPTH_LEVELS_MAX + 2), False),
        (nested(FAST_DEPTH_LEVELS_MAX + 2, 1.0), False),
        ({"a": 1e-7}, True),
        ({"a": 1e-5}, False),
        ({"a": 1e21}, False),
        ({"a": 2.0**53}, False),
        ({"a": math.nan}, False),
        ({"a": (1, 2)}, False),
    ],
)
def test_common_values_take_the_fast_path(value: Any, is_fast: bool) -> None:
    assert (canonical_fast(value) is not None) == is_fast


@pytest.mark.rule("CO-1")
@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("1", "1"),
        ("1.0", "1"),
        ("1e0", "1"),
        ("10E-1", "1"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e5", "0"),
        ("9007199254740991", "9007199254740991"),
        ("9007199254740991.0", "9007199254740991"),
        ("-9007199254740991", "-9007199254740991"),
        ("1e21", "1e+21"),
        ("1.5e300", "1.5e+300"),
        ("5e-324", "5e-324"),
        ("-5e-324", "-5e-324"),
        ("1.7976931348623157e308", "1.7976931348623157e+308"),
        ("0.000001", "0.000001"),
        ("1e-7", "1e-7"),
        ("0.0000001234", "1.234e-7"),
        ("333333333.33333329", "333333333.3333333"),
        ("4.50", "4.5"),
        ("2e-3", "0.002"),
        ("0.000000000000000000000000001", "1e-27"),
        ("1424953923781206.2", "1424953923781206.2"),
    ],
)
def test_numbers_have_one_canonical_form(written: str, form: str) -> None:
    assert canonical_text(written) == form.encode()


@pytest.mark.rule("CO-1")
def test_example_of_the_rfc_has_the_documented_form() -> None:
    written = (
        r'{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],'
        r'"string":"\u20ac$\u000F\u000aA'
        r"'\u0042\u0022\u005c\\\"\/"
        r'","literals":[null,true,false]}'
    )
    assert (
        canonical_text(written)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


@pytest.mark.rule("CO-1")
def test_keys_are_sorted_by_utf_16_code_unit_and_strings_escaped_minimally() -> None:
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6", ""]
    assert list(json.loads(canonical(dict.fromkeys(keys, 0)))) == [
        "",
        "\r",
        "1",
        "\x80",
        "ö",
        "€",
        "\U0001f600",
        "\ufb33",
    ]
    assert (
        canonical('\b\t\n\f\r"\\/\x00\x1f\x7f\u2028é😀')
        == '"\\b\\t\\n\\f\\r\\"\\\\/\\u0000\\u001f\x7f\u2028é😀"'.encode()
    )


@pytest.mark.rule("CO-5")
def test_jcs_does_not_normalise_unicode() -> None:
    assert canonical({"e\u0301": "e\u0301", "é": "é"}) == '{"e\u0301":"e\u0301","é":"é"}'.encode()


# --- invalid values and their paths ------------------------------------------------------------------


class Number(IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


@pytest.mark.rule("CO-3")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\ud800", "$"),
        (["ok", "x\udfffy"], "$[1]"),
        ({"a": {"\udc00": 1}}, '$.a["\\udc00"]'),
        ({1: 2}, "$"),
        ({"a": {None: 2}}, "$.a"),
        ({"a": {("x",): 2}}, "$.a"),
        ({"a": [b"bytes"]}, "$.a[0]"),
        ((1, 2), "$"),
        ({"a": {1, 2}}, "$.a"),
        ([Decimal(1)], "$[0]"),
        ([uuid.UUID(int=1)], "$[0]"),
        ([Number.ONE], "$[0]"),
        ([Text("x")], "$[0]"),
        ({Text("x"): 1}, "$"),
        (OrderedDict(a=1), "$"),
        ([object()], "$[0]"),
    ],
)
def test_value_without_json_form_is_refused_with_its_path(value: Any, path: str) -> None:
    for encode in (canonical, canonical_exact, canonical_args):
        with pytest.raises(CanonicalError) as refused:
            encode(value)
        assert refused.value.path == path
        assert str(refused.value) == f"{path}: {refused.value.reason}"


@pytest.mark.rule("CO-3")
@pytest.mark.parametrize(
    ("written", "path"),
    [
        ('{"a":1,"a":1}', "$.a"),
        ('{"a":1,"b":2,"a":{}}', "$.a"),
        ('[0,{"x":{"k":1,"k":2}}]', "$[1].x.k"),
        ('{"a":1,"\\u0061":2}', "$.a"),
        ('{"\\u003a":1,"a":1,"a":2}', "$.a"),
        ('{"a":{"b":1,"b":2},"a":3}', "$.a"),
        ('{"a":"::","a":"\\u003a\\u003a"}', "$.a"),
        ('"\\ud800"', "$"),
        ('["\ud800"]', "$[0]"),
        ('{"\\ud800x":1}', '$["\\ud800x"]'),
    ],
)
def test_repeated_keys_and_lone_surrogates_are_refused(written: str, path: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        canonical_text(written)
    assert refused.value.path == path


@pytest.mark.rule("CO-3", "CO-4")
@given(st.lists(st.tuples(st.sampled_from("ab:"), values), min_size=1, max_size=4), st.booleans())
def test_fast_path_finds_every_repeated_key(pairs: list[tuple[str, Any]], ascii_only: bool) -> None:
    members = [f"{json.dumps(key)}:{json.dumps(value, ensure_ascii=ascii_only)}" for key, value in pairs]
    written = "{" + ",".join(members) + "}"
    if len({key for key, _ in pairs}) == len(pairs):
        assert canonical_text(written) == canonical(dict(pairs))
    else:
        with pytest.raises(CanonicalError, match="duplicate key"):
            canonical_text(written)


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"nul", "not JSON"),
        (b"[1,]", "not JSON"),
        (b"01", "not JSON"),
        (b"1 2", "not JSON"),
        (b'"\x00"', "not JSON"),
        (b"'a'", "not JSON"),
        (b"\xef\xbb\xbf1", "not JSON"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"1" * 5000, "too many digits"),
        (b"[" * (DEPTH_LEVELS_MAX + 1) + b"]" * (DEPTH_LEVELS_MAX + 1), "deeper than 512 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 512 levels"),
        (b'{"a":' * 100_000, "deeper than 512 levels"),
    ],
)
def test_malformed_json_is_refused(written: bytes, reason: str) -> None:
    with pytest.raises(CanonicalError, match=reason):
        canonical_text(written)


@pytest.mark.rule("CO-30", "CO-33")
def test_invalid_wide_and_deep_input_costs_linear_memory() -> None:
    text = "[" * 400 + "0," * 100_000 + "NaN" + "]" * 400
    tracemalloc.start()
    with pytest.raises(CanonicalError) as refused:
        canonical_text(text)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.path.endswith("[0][100000]")
    assert peak_bytes < 20 * len(text)


def test_nested_value_is_encoded_even_from_a_deep_caller_stack() -> None:
    def from_depth(frames: int) -> bytes:
        return canonical(nested(60)) if frames == 0 else from_depth(frames - 1)

    room = sys.getrecursionlimit() - len(inspect.stack()) - 40
    assert from_depth(room) == canonical(nested(60))


@pytest.mark.rule("CO-33")
def test_recursive_value_is_refused_as_too_deep() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for encode in (canonical, canonical_args):
        with pytest.raises(CanonicalError, match="deeper than 512 levels") as refused:
            encode(endless)
        assert len(refused.value.path) > 3 * DEPTH_LEVELS_MAX
        assert len(str(refused.value)) < 300  # the message contains only both ends of the path


@given(st.binary(max_size=40) | st.text().map(lambda one: one.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        form = canonical_text(data)
    except CanonicalError:
        return
    assert canonical_text(form) == form


def test_paths_have_the_usual_notation() -> None:
    assert format_path([]) == "$"
    assert format_path(["items", 2, "price"]) == "$.items[2].price"
    assert format_path(["a b", 'say "hi"', "\udc00", ""]) == '$["a b"]["say \\"hi\\""]["\\udc00"][""]'


@given(text, text)
def test_utf16_order_equals_the_order_of_javascript(left: str, right: str) -> None:
    def code_units(one: str) -> list[int]:
        encoded = one.encode("utf-16-be")
        return [int.from_bytes(encoded[at : at + 2], "big") for at in range(0, len(encoded), 2)]

    assert (utf16_sort_key(left) < utf16_sort_key(right)) == (code_units(left) < code_units(right))


# --- run arguments -----------------------------------------------------------------------------------

args_integers = st.integers(-(2**63), 2**63 - 1)
args_values = st.recursive(
    st.none() | st.booleans() | args_integers | text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=30,
)


def naive_args(value: Any) -> Any:
    """Convert run arguments literally as RU-3 states."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, list):
        return [naive_args(item) for item in value]
    if isinstance(value, dict):
        return {unicodedata.normalize("NFC", key): naive_args(item) for key, item in value.items() if item is not None}
    return value


def has_colliding_keys(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(has_colliding_keys, value))
    if isinstance(value, dict):
        distinct = {unicodedata.normalize("NFC", key) for key in value}
        return len(distinct) < len(value) or any(map(has_colliding_keys, value.values()))
    return False


@pytest.mark.rule("RU-3", "RU-4")
@given(args_values)
def test_strict_form_equals_the_naive_form_and_is_valid_json(value: Any) -> None:
    assume(value is not None and not has_colliding_keys(value))
    form = canonical_args(value)
    expected = json.dumps(naive_args(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert form == expected.encode()
    assert canonical_args(json.loads(form)) == form


@pytest.mark.rule("RU-3")
@pytest.mark.parametrize(
    ("value", "form"),
    [
        (None, "{}"),
        ({"a": None, "b": {"c": None}, "d": [None, {"e": None}]}, '{"b":{},"d":[null,{}]}'),
        ({"\U0001f600": 1, "\ufffd": 2}, '{"\ufffd":2,"\U0001f600":1}'),
        ({"cafe\u0301": "e\u0301"}, '{"café":"é"}'),
        ("=\u0338", '"≠"'),
        ([2**63 - 1, -(2**63)], "[9223372036854775807,-9223372036854775808]"),
    ],
)
def test_run_arguments_have_the_expected_strict_form(value: Any, form: str) -> None:
    assert canonical_args(value) == form.encode()


@pytest.mark.rule("RU-4")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (20.0, "$"),
        ({"a": [0.5]}, "$.a[0]"),
        ({"a": math.nan}, "$.a"),
        ({"a": math.inf}, "$.a"),
        ({"a": 2**63}, "$.a"),
        ({"a": -(2**63) - 1}, "$.a"),
        ({"a": {1: 2}}, "$.a"),
        ({"x": {"é": 1, "e\u0301": 2}}, '$.x["e\\u0301"]'),
        ({"x": {"é": 1, "e\u0301": None}}, '$.x["e\\u0301"]'),
        ({"a": "\ud800"}, "$.a"),
        ({"\ud800": None}, '$["\\ud800"]'),
        ({"a": b""}, "$.a"),
    ],
)
def test_value_without_a_strict_form_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        canonical_args(value)
    assert refused.value.path == path


@pytest.mark.rule("RU-3")
@given(text)
def test_nfc_equals_unicodedata(one: str) -> None:
    assert nfc(one) == unicodedata.normalize("NFC", one)
