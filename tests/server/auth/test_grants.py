"""Grants: partitions by name and by prefix, separately for reading and writing."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core.identity import normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX
from oncelog.errors import CanonicalError
from oncelog.server.auth.principal import EVERYTHING, Grants, decode_grants, parse_grants
from oncelog.server.limits import GRANTS_MAX

# A small alphabet makes collisions likely. It includes the asterisk and letters that NFC combines.
NAMES = st.text(alphabet="ae/*\u0301\u00e9\u1100\u1161", min_size=1, max_size=6)


def test_name_matches_exactly() -> None:
    grants = parse_grants(read=["orders", "orders/1"])
    assert [grants.may_read(one) for one in ("orders", "orders/1", "orders/12", "order", "", "Orders")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_prefix_is_the_text_before_the_asterisk() -> None:
    grants = parse_grants(read=["orders/*"])
    assert grants.may_read("orders/1")
    assert grants.may_read("orders/")
    assert grants.may_read("orders/*")
    assert not grants.may_read("orders")
    assert not grants.may_read("my/orders/1")


def test_single_asterisk_grants_everything() -> None:
    assert parse_grants(["*"], ["*"], ["*"]) == EVERYTHING
    assert EVERYTHING.may_read("anything")
    assert EVERYTHING.may_write("größe")
    assert EVERYTHING.may_audit("")


def test_asterisk_before_the_end_is_literal() -> None:
    grants = parse_grants(write=["a*b", "*x", "c**"])
    assert [grants.may_write(one) for one in ("a*b", "*x", "c*", "c*d")] == [True] * 4
    assert [grants.may_write(one) for one in ("ab", "acb", "yx", "c", "cd")] == [False] * 5


@pytest.mark.rule("EV-10", "EV-11")
def test_read_and_write_grants_are_separate() -> None:
    grants = parse_grants(read=["a"], write=["b"])
    assert (grants.may_read("a"), grants.may_write("a")) == (True, False)
    assert (grants.may_read("b"), grants.may_write("b")) == (False, True)


def test_empty_grants_allow_nothing() -> None:
    for grants in (Grants(), parse_grants(), decode_grants({}), decode_grants({"read": [], "write": []})):
        assert not grants.may_read("a")
        assert not grants.may_write("a")
        assert not grants.may_read("")


@pytest.mark.rule("EV-6")
def test_names_are_compared_in_nfc() -> None:
    composed, decomposed = "gr\u00f6\u00dfe", unicodedata.normalize("NFD", "gr\u00f6\u00dfe")
    assert composed != decomposed
    for written in (composed, decomposed):
        for asked in (composed, decomposed):
            assert parse_grants(read=[written]).may_read(asked)
            assert parse_grants(read=[written + "*"]).may_read(asked + "/1")


@pytest.mark.rule("EV-6")
def test_base_letter_is_not_a_prefix_of_its_accented_form() -> None:
    assert not parse_grants(read=["caf\u0065*"]).may_read("caf\u0065\u0301")
    assert parse_grants(read=["caf\u00e9*"]).may_read("caf\u0065\u0301")


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6), asked=NAMES)
def test_grants_match_the_definition(read: list[str], write: list[str], asked: str) -> None:
    (normal,) = normal_partitions([asked])

    def matches(texts: list[str]) -> bool:
        forms = normal_partitions(texts)
        return any(normal.startswith(one[:-1]) if one[-1] == "*" else normal == one for one in forms)

    grants = parse_grants(read, write)
    assert grants.may_read(asked) == matches(read)
    assert grants.may_write(asked) == matches(write)


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6))
def test_claim_round_trips(read: list[str], write: list[str]) -> None:
    grants = parse_grants(read, write)
    claim = grants.to_claim()
    assert claim == {"read": sorted(normal_partitions(read)), "write": sorted(normal_partitions(write))}
    assert decode_grants(claim) == grants
    assert parse_grants(reverse_twice(read), write) == grants
    assert hash(grants) == hash(decode_grants(claim))


def reverse_twice(texts: list[str]) -> list[str]:
    return [*reversed(texts), *texts]


@given(texts=st.lists(NAMES, max_size=6), more=NAMES, asked=NAMES)
def test_additional_grant_removes_no_access(texts: list[str], more: str, asked: str) -> None:
    assert parse_grants([*texts, more]).may_read(asked) >= parse_grants(texts).may_read(asked)
    assert parse_grants([more]).may_read(more)


@pytest.mark.parametrize(
    ("claim", "path"),
    [
        (None, "$.grants"),
        ([], "$.grants"),
        ("*", "$.grants"),
        ({"read": ["a"], "wrtie": ["a"]}, "$.grants"),
        ({"read": "orders"}, "$.grants.read"),
        ({"write": {"a": 1}}, "$.grants.write"),
        ({"write": None}, "$.grants.write"),
        ({"read": ["a", 7]}, "$.grants.read[1]"),
        ({"read": ["a", None]}, "$.grants.read[1]"),
        ({"read": ["a", True]}, "$.grants.read[1]"),
        ({"write": [""]}, "$.grants.write[0]"),
        ({"write": ["a", "b", "\ud800"]}, "$.grants.write[2]"),
        ({"write": ["a\0"]}, "$.grants.write[0]"),
        ({"read": ["x" * (PARTITION_CHARACTERS_MAX + 1)]}, "$.grants.read[0]"),
        ({"read": ["x" * (PARTITION_CHARACTERS_MAX + 1) + "*"]}, "$.grants.read[0]"),
        ({"read": [f"x{number}" for number in range(GRANTS_MAX + 1)]}, "$.grants.read"),
        ({"write": ["*", *(f"x{number}*" for number in range(GRANTS_MAX))]}, "$.grants.write"),
    ],
)
def test_malformed_claim_is_refused_with_its_field(claim: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        decode_grants(claim)
    assert caught.value.path == path


def test_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(CanonicalError) as caught:
        parse_grants(write="orders")
    assert caught.value.path == "$.write"


def test_values_at_the_limits_are_accepted() -> None:
    longest = "x" * PARTITION_CHARACTERS_MAX
    grants = parse_grants([longest, longest + "*"], [str(number) for number in range(GRANTS_MAX)])
    assert grants.may_read(longest)
    assert grants.may_write(str(GRANTS_MAX - 1))
    assert not grants.may_write(str(GRANTS_MAX))


@pytest.mark.rule("EV-9")
def test_duplicates_of_a_grant_count_once() -> None:
    grants = parse_grants(["caf\u00e9", "cafe\u0301", "x*"] * GRANTS_MAX)
    assert grants.to_claim()["read"] == ["caf\u00e9", "x*"]


def test_length_limit_applies_to_the_nfc_form() -> None:
    # The maximum number of letters in NFC, written with twice as many code points.
    assert parse_grants(["e\u0301" * PARTITION_CHARACTERS_MAX]).may_read("\u00e9" * PARTITION_CHARACTERS_MAX)
