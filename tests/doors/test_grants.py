"""Grants: partitions by name and by prefix, reading and writing apart."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core.identity import normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX
from oncelog.doors.grants import EVERYTHING, Grants, granted, grants_of_claim
from oncelog.doors.limits import GRANTS_MAX
from oncelog.errors import CanonicalError

# Few letters, so that names meet; among them such that NFC joins, and the asterisk.
NAMES = st.text(alphabet="ae/*\u0301\u00e9\u1100\u1161", min_size=1, max_size=6)


def test_names_are_exact() -> None:
    grants = granted(read=["orders", "orders/1"])
    assert [grants.may_read(one) for one in ("orders", "orders/1", "orders/12", "order", "", "Orders")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_a_prefix_is_what_stands_before_the_asterisk() -> None:
    grants = granted(read=["orders/*"])
    assert grants.may_read("orders/1")
    assert grants.may_read("orders/")
    assert grants.may_read("orders/*")
    assert not grants.may_read("orders")
    assert not grants.may_read("my/orders/1")


def test_a_lone_asterisk_is_everything() -> None:
    assert granted(["*"], ["*"]) == EVERYTHING
    assert EVERYTHING.may_read("anything")
    assert EVERYTHING.may_write("größe")


def test_an_asterisk_elsewhere_is_a_character() -> None:
    grants = granted(write=["a*b", "*x", "c**"])
    assert [grants.may_write(one) for one in ("a*b", "*x", "c*", "c*d")] == [True] * 4
    assert [grants.may_write(one) for one in ("ab", "acb", "yx", "c", "cd")] == [False] * 5


@pytest.mark.rule("EV-10", "EV-11")
def test_reading_and_writing_are_apart() -> None:
    grants = granted(read=["a"], write=["b"])
    assert (grants.may_read("a"), grants.may_write("a")) == (True, False)
    assert (grants.may_read("b"), grants.may_write("b")) == (False, True)


def test_nothing_is_granted_unless_it_is_said() -> None:
    for grants in (Grants(), granted(), grants_of_claim({}), grants_of_claim({"read": [], "write": []})):
        assert not grants.may_read("a")
        assert not grants.may_write("a")
        assert not grants.may_read("")


@pytest.mark.rule("EV-6")
def test_either_form_of_unicode_is_one_name() -> None:
    composed, decomposed = "gr\u00f6\u00dfe", unicodedata.normalize("NFD", "gr\u00f6\u00dfe")
    assert composed != decomposed
    for written in (composed, decomposed):
        for asked in (composed, decomposed):
            assert granted(read=[written]).may_read(asked)
            assert granted(read=[written + "*"]).may_read(asked + "/1")


@pytest.mark.rule("EV-6")
def test_half_of_a_letter_is_no_prefix_of_it() -> None:
    assert not granted(read=["caf\u0065*"]).may_read("caf\u0065\u0301")
    assert granted(read=["caf\u00e9*"]).may_read("caf\u0065\u0301")


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6), asked=NAMES)
def test_it_is_what_its_definition_says(read: list[str], write: list[str], asked: str) -> None:
    (normal,) = normal_partitions([asked])

    def says(texts: list[str]) -> bool:
        forms = normal_partitions(texts)
        return any(normal.startswith(one[:-1]) if one[-1] == "*" else normal == one for one in forms)

    grants = granted(read, write)
    assert grants.may_read(asked) == says(read)
    assert grants.may_write(asked) == says(write)


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6))
def test_the_claim_leads_back(read: list[str], write: list[str]) -> None:
    grants = granted(read, write)
    claim = grants.as_claim()
    assert claim == {"read": sorted(normal_partitions(read)), "write": sorted(normal_partitions(write))}
    assert grants_of_claim(claim) == grants
    assert granted(reversed_twice(read), write) == grants
    assert hash(grants) == hash(grants_of_claim(claim))


def reversed_twice(texts: list[str]) -> list[str]:
    return [*reversed(texts), *texts]


@given(texts=st.lists(NAMES, max_size=6), more=NAMES, asked=NAMES)
def test_a_further_grant_takes_nothing_away(texts: list[str], more: str, asked: str) -> None:
    assert granted([*texts, more]).may_read(asked) >= granted(texts).may_read(asked)
    assert granted([more]).may_read(more)


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
        ({"read": ["x"] * (GRANTS_MAX + 1)}, "$.grants.read"),
        ({"write": ["x"] * (GRANTS_MAX + 1)}, "$.grants.write"),
    ],
)
def test_an_error_names_the_field(claim: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        grants_of_claim(claim)
    assert caught.value.path == path


def test_a_string_is_no_list_of_its_letters() -> None:
    with pytest.raises(CanonicalError) as caught:
        granted(write="orders")
    assert caught.value.path == "$.write"


def test_the_limits_themselves_are_allowed() -> None:
    longest = "x" * PARTITION_CHARACTERS_MAX
    grants = granted([longest, longest + "*"], [str(number) for number in range(GRANTS_MAX)])
    assert grants.may_read(longest)
    assert grants.may_write(str(GRANTS_MAX - 1))
    assert not grants.may_write(str(GRANTS_MAX))


def test_the_limit_is_of_the_normal_form() -> None:
    # As many letters as are allowed, in twice as many characters.
    assert granted(["e\u0301" * PARTITION_CHARACTERS_MAX]).may_read("\u00e9" * PARTITION_CHARACTERS_MAX)
