"""Grants: partitions by name and by prefix, separately for reading and writing."""

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

# Few letters, so that names collide, with the asterisk and letters that NFC combines.
NAMES = st.text(alphabet="ae/*\u0301\u00e9\u1100\u1161", min_size=1, max_size=6)


def test_name_matches_exactly() -> None:
    grants = granted(read=["orders", "orders/1"])
    assert [grants.may_read(one) for one in ("orders", "orders/1", "orders/12", "order", "", "Orders")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_prefix_is_the_text_before_the_asterisk() -> None:
    grants = granted(read=["orders/*"])
    assert grants.may_read("orders/1")
    assert grants.may_read("orders/")
    assert grants.may_read("orders/*")
    assert not grants.may_read("orders")
    assert not grants.may_read("my/orders/1")


def test_single_asterisk_grants_everything() -> None:
    assert granted(["*"], ["*"], ["*"]) == EVERYTHING
    assert EVERYTHING.may_read("anything")
    assert EVERYTHING.may_write("größe")
    assert EVERYTHING.may_audit("")


def test_asterisk_before_the_end_is_literal() -> None:
    grants = granted(write=["a*b", "*x", "c**"])
    assert [grants.may_write(one) for one in ("a*b", "*x", "c*", "c*d")] == [True] * 4
    assert [grants.may_write(one) for one in ("ab", "acb", "yx", "c", "cd")] == [False] * 5


@pytest.mark.rule("EV-10", "EV-11")
def test_read_and_write_grants_are_separate() -> None:
    grants = granted(read=["a"], write=["b"])
    assert (grants.may_read("a"), grants.may_write("a")) == (True, False)
    assert (grants.may_read("b"), grants.may_write("b")) == (False, True)


def test_empty_grants_allow_nothing() -> None:
    for grants in (Grants(), granted(), grants_of_claim({}), grants_of_claim({"read": [], "write": []})):
        assert not grants.may_read("a")
        assert not grants.may_write("a")
        assert not grants.may_read("")


@pytest.mark.rule("EV-6")
def test_names_are_compared_in_nfc() -> None:
    composed, decomposed = "gr\u00f6\u00dfe", unicodedata.normalize("NFD", "gr\u00f6\u00dfe")
    assert composed != decomposed
    for written in (composed, decomposed):
        for asked in (composed, decomposed):
            assert granted(read=[written]).may_read(asked)
            assert granted(read=[written + "*"]).may_read(asked + "/1")


@pytest.mark.rule("EV-6")
def test_base_letter_is_not_a_prefix_of_its_accented_form() -> None:
    assert not granted(read=["caf\u0065*"]).may_read("caf\u0065\u0301")
    assert granted(read=["caf\u00e9*"]).may_read("caf\u0065\u0301")


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6), asked=NAMES)
def test_grants_match_their_definition(read: list[str], write: list[str], asked: str) -> None:
    (normal,) = normal_partitions([asked])

    def says(texts: list[str]) -> bool:
        forms = normal_partitions(texts)
        return any(normal.startswith(one[:-1]) if one[-1] == "*" else normal == one for one in forms)

    grants = granted(read, write)
    assert grants.may_read(asked) == says(read)
    assert grants.may_write(asked) == says(write)


@given(read=st.lists(NAMES, max_size=6), write=st.lists(NAMES, max_size=6))
def test_claim_round_trips(read: list[str], write: list[str]) -> None:
    grants = granted(read, write)
    claim = grants.as_claim()
    assert claim == {"read": sorted(normal_partitions(read)), "write": sorted(normal_partitions(write))}
    assert grants_of_claim(claim) == grants
    assert granted(reversed_twice(read), write) == grants
    assert hash(grants) == hash(grants_of_claim(claim))


def reversed_twice(texts: list[str]) -> list[str]:
    return [*reversed(texts), *texts]


@given(texts=st.lists(NAMES, max_size=6), more=NAMES, asked=NAMES)
def test_additional_grant_removes_no_access(texts: list[str], more: str, asked: str) -> None:
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
        ({"read": [f"x{number}" for number in range(GRANTS_MAX + 1)]}, "$.grants.read"),
        ({"write": ["*", *(f"x{number}*" for number in range(GRANTS_MAX))]}, "$.grants.write"),
    ],
)
def test_malformed_claim_is_refused_with_its_field(claim: Any, path: str) -> None:
    with pytest.raises(CanonicalError) as caught:
        grants_of_claim(claim)
    assert caught.value.path == path


def test_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(CanonicalError) as caught:
        granted(write="orders")
    assert caught.value.path == "$.write"


def test_values_at_the_limits_are_accepted() -> None:
    longest = "x" * PARTITION_CHARACTERS_MAX
    grants = granted([longest, longest + "*"], [str(number) for number in range(GRANTS_MAX)])
    assert grants.may_read(longest)
    assert grants.may_write(str(GRANTS_MAX - 1))
    assert not grants.may_write(str(GRANTS_MAX))


@pytest.mark.rule("EV-9")
def test_copies_of_a_grant_count_once() -> None:
    grants = granted(["caf\u00e9", "cafe\u0301", "x*"] * GRANTS_MAX)
    assert grants.as_claim()["read"] == ["caf\u00e9", "x*"]


def test_length_limit_applies_to_the_nfc_form() -> None:
    # The maximum number of letters, in twice as many code points.
    assert granted(["e\u0301" * PARTITION_CHARACTERS_MAX]).may_read("\u00e9" * PARTITION_CHARACTERS_MAX)
