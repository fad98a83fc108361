"""Numbers of canonical JSON: every finite double, and the integers that ECMAScript writes exactly."""

import json
import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import rfc8785
from hypothesis import assume, example, given
from hypothesis import strategies as st

from core import vectors
from oncelog.core.canonical import (
    INTEGER_MAX,
    canonical,
    canonical_args,
    canonical_exact,
    canonical_fast,
    canonical_text,
    parse,
    parse_parts,
)
from oncelog.core.identity import fingerprint_from_json
from oncelog.errors import CanonicalError

APPENDIX_B = vectors.load("rfc8785_numbers")

small_integers = st.integers(-INTEGER_MAX, INTEGER_MAX)
large_integers = st.builds(
    lambda digits, base, exponent, offset: digits * base**exponent + offset,
    st.integers(-(10**6), 10**6) | st.integers(-(2**64), 2**64),
    st.sampled_from([2, 10]),
    st.integers(0, 330),
    st.sampled_from([0, 0, 0, 1, -1]),
)
integers = small_integers | large_integers
doubles = st.floats(allow_nan=False, allow_infinity=False) | st.builds(
    float, st.builds(lambda digits, exponent: digits * 10**exponent, small_integers, st.integers(0, 280))
)


def double_of(bits: str) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(number)


def nearest_text(integer: int) -> str | None:
    """Return the ECMAScript text of the nearest double, or None if the integer is too large for a double."""
    try:
        nearest = integer / 1
    except OverflowError:
        return None
    distance = abs(Fraction(nearest) - integer)
    for neighbour in (math.nextafter(nearest, -math.inf), math.nextafter(nearest, math.inf)):
        assert math.isinf(neighbour) or distance <= abs(Fraction(neighbour) - integer)
    return rfc8785.dumps(nearest).decode()


def get_refusal(encode: Any, value: Any) -> CanonicalError:
    with pytest.raises(CanonicalError) as refused:
        encode(value)
    return refused.value


@pytest.mark.rule("CO-1", "CO-2", "CO-4")
@pytest.mark.parametrize("sample", APPENDIX_B, ids=[one["ieee"] for one in APPENDIX_B])
def test_doubles_of_rfc_8785_appendix_b_have_the_documented_text(sample: dict[str, Any]) -> None:
    number = double_of(sample["ieee"])
    if "refused" in sample:
        for encode in (canonical, canonical_exact):
            assert get_refusal(encode, {"a": [number]}).path == "$.a[0]"
        return
    form = sample["text"].encode()
    assert canonical(number) == canonical_exact(number) == form
    assert canonical_fast(number) in {None, form}
    assert canonical_text(form) == form
    assert canonical(parse(form)) == form
    assert canonical_text(f'{{"a":{number!r}}}') == b'{"a":%b}' % form


@pytest.mark.rule("CO-2")
@pytest.mark.parametrize(
    ("number", "form"),
    [
        (2**53, "9007199254740992"),
        (-(2**53), "-9007199254740992"),
        (2**53 + 2, "9007199254740994"),
        (10**16, "10000000000000000"),
        (10**20, "100000000000000000000"),
        (999999999999999900000, "999999999999999900000"),
        (10**21, "1e+21"),
        (-(10**21), "-1e+21"),
        (10**23, "1e+23"),
        (12 * 10**300, "1.2e+301"),
        (295147905179352830000, "295147905179352830000"),
        (17976931348623157 * 10**292, "1.7976931348623157e+308"),
    ],
)
def test_integers_that_ecmascript_writes_exactly_are_accepted(number: int, form: str) -> None:
    for encode in (canonical, canonical_exact):
        assert encode({"a": [number]}) == f'{{"a":[{form}]}}'.encode()
    assert canonical_text(f'{{ "a":[{number}]}}') == f'{{"a":[{form}]}}'.encode()
    assert canonical_text(form) == form.encode()


@pytest.mark.rule("CO-2")
@pytest.mark.parametrize(
    ("number", "becomes"),
    [
        (2**53 + 1, "would become 9007199254740992 "),
        (-(2**53) - 1, "would become -9007199254740992 "),
        (2**56, "would become 72057594037927940 "),
        (2**63, "would become 9223372036854776000 "),
        (2**64 - 1, "would become 18446744073709552000 "),
        (2**68, "would become 295147905179352830000 "),
        (10**21 + 1, "would become 1e+21 "),
        (10**23 - 1, "would become 1e+23 "),
        (int(1e23), "would become 1e+23 "),
        (17976931348623157 * 10**292 + 1, "would become 1.7976931348623157e+308 "),
        (2**1024, "beyond the largest double"),
        (-(10**400), "beyond the largest double"),
    ],
)
def test_other_integers_are_refused_with_the_nearest_double(number: int, becomes: str) -> None:
    for value, path in [(number, "$"), ({"a": [0, {"b c": number}]}, '$.a[1]["b c"]')]:
        for encode in (canonical, canonical_exact, lambda one: canonical_text(json.dumps(one))):
            refused = get_refusal(encode, value)
            assert refused.path == path
            assert becomes in refused.reason
            assert refused.reason.endswith("; send it as a string")


@pytest.mark.rule("CO-2")
@pytest.mark.parametrize("written", ["1E400", "-1e999", "1" + "0" * 309, "9" * 5000, "NaN", "Infinity", "-Infinity"])
def test_numbers_that_overflow_a_double_are_refused_with_their_path(written: str) -> None:
    assert get_refusal(canonical_text, f'{{"a":[{written}]}}').path == "$.a[0]"


@pytest.mark.rule("CO-2")
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_floats_that_are_not_finite_are_refused_with_their_path(number: float) -> None:
    for encode in (canonical, canonical_exact):
        assert get_refusal(encode, {"a": [0, {"b c": number}]}).path == '$.a[1]["b c"]'


@pytest.mark.rule("CO-1", "CO-2")
@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("9007199254740992.0", "9007199254740992"),
        ("9007199254740993.0", "9007199254740992"),
        ("72057594037927936.0", "72057594037927940"),
        ("1e16", "10000000000000000"),
        ("1e20", "100000000000000000000"),
        ("1E21", "1e+21"),
        ("295147905179352825856e0", "295147905179352830000"),
        ("0.1e-400", "0"),
        ("-1e-400", "0"),
    ],
)
def test_literals_with_fraction_or_exponent_are_doubles(written: str, form: str) -> None:
    assert canonical_text(written) == form.encode()
    assert canonical_text(f'{{"a":[{written}]}}') == f'{{"a":[{form}]}}'.encode()
    assert canonical(float(written)) == form.encode()


@pytest.mark.rule("CO-2", "CO-4")
@given(integers)
@example(2**53)
@example(2**53 + 1)
@example(10**23)
@example(2**1024 - 2**970)
@example(2**1024 - 2**970 - 1)
def test_integer_is_accepted_only_if_its_nearest_double_has_the_same_text(integer: int) -> None:
    expected = nearest_text(integer)
    for value in (integer, {"a": [integer]}):
        text = json.dumps(value)
        if expected is not None and Fraction(expected) == integer:
            form = text.replace(str(integer), expected).replace(" ", "").encode()
            assert canonical(value) == canonical_exact(value) == canonical_text(text) == form
            assert canonical_text(form) == form
        else:
            for encode in (canonical, canonical_exact, lambda _, text=text: canonical_text(text)):
                refused = get_refusal(encode, value)
                assert refused.path == ("$" if value is integer else "$.a[0]")
                assert expected is None or f"would become {expected} " in refused.reason


@pytest.mark.rule("CO-2", "CO-4")
@given(doubles)
def test_every_finite_double_agrees_with_an_independent_library(number: float) -> None:
    form = rfc8785.dumps(number)
    assert canonical(number) == canonical_exact(number) == form
    assert canonical_text(repr(number)) == canonical_text(f"{number:.17e}") == form
    assert canonical_text(form) == form
    assert canonical(parse(form)) == canonical(parse_parts(form)) == form
    assert float(form) == number


@pytest.mark.rule("CO-2", "CO-4")
@given(integers, integers)
def test_two_integers_never_become_equal(left: int, right: int) -> None:
    assume(left != right)
    try:
        forms = canonical(left), canonical(right)
    except CanonicalError:
        return
    assert forms[0] != forms[1]


@pytest.mark.rule("CO-2", "CO-4")
@given(small_integers, st.integers(-60, 60))
def test_values_accepted_by_the_earlier_rule_keep_their_bytes(integer: int, exponent: int) -> None:
    """The earlier rule accepted integers up to ±(2^53−1), and floats except whole ones from there to 1e21."""
    form = b"%d" % integer
    assert canonical(integer) == canonical(float(integer)) == canonical_text(form) == form
    number = float(f"{integer}e{exponent}")
    assume(not (number.is_integer() and INTEGER_MAX < abs(number) < 1e21))
    assert canonical_text(f"{integer}e{exponent}") == canonical(number) == rfc8785.dumps(number)


@pytest.mark.rule("CO-2", "EV-4")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1e21", "1000000000000000000000"),
        ("1e16", "10000000000000000"),
        ("9007199254740992.0", "9007199254740992"),
        ("1e23", "100000000000000000000000"),
    ],
)
def test_equal_numbers_have_one_fingerprint(left: str, right: str) -> None:
    fingerprints = {
        fingerprint_from_json(read(f'{{"partitions":["a"],"event":{{"type":"t","v":{written}}}}}'.encode()))
        for written in (left, right)
        for read in (parse, parse_parts)
    }
    assert len(fingerprints) == 1


@pytest.mark.rule("CO-2")
@given(large_integers)
def test_decoders_keep_all_digits_of_an_integer(integer: int) -> None:
    written = f'{{"a":{integer}}}'.encode()
    assert parse(written) == parse_parts(written) == {"a": integer}


@pytest.mark.rule("RU-3", "RU-4")
def test_run_arguments_have_a_separate_rule() -> None:
    assert canonical_args({"a": [2**53, 2**53 + 1, 2**63 - 1]}) == (
        b'{"a":[9007199254740992,9007199254740993,9223372036854775807]}'
    )
    for number in (10**21, 2**63, 1e21, 1.0):
        assert get_refusal(canonical_args, {"a": number}).path == "$.a"
