"""Normal form C of names and texts, at a cost that grows linearly with their length."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core import canonical, identity
from oncelog.core.canonical import nfc
from oncelog.core.identity import DECOMPOSED_CHARACTERS_MAX, normal_partitions
from oncelog.errors import CanonicalError


@pytest.mark.rule("RU-3", "CO-30")
@given(st.text(alphabet="ae\u0301\u0327\u0f71\u0f72\u0f73\u0344\u1112\u1161\u11abé", min_size=65, max_size=200))
def test_long_texts_have_the_normal_form_of_unicodedata(long: str) -> None:
    assert nfc(long) == unicodedata.normalize("NFC", long)


@pytest.mark.rule("RU-3", "CO-30")
@given(
    st.lists(
        st.one_of(
            st.text(alphabet="\u0301\u0327\u0f71\u0f72\u0f73\u0f80\u0f81\u0344\u05b0\u3099", min_size=20, max_size=90),
            st.sampled_from(["a", "é", "\u1fa7", "\u0915\u093c", "\u1112\u1161\u11ab", "\u0958", "\ufb2c"]),
        ),
        min_size=2,
    )
)
def test_long_runs_of_combining_marks_have_the_normal_form_of_unicodedata(parts: list[str]) -> None:
    text = "".join(parts)
    assert nfc(text) == unicodedata.normalize("NFC", text)


def test_combining_marks_are_in_the_searched_range() -> None:
    first, end = canonical._COMBINING_MARKS
    for code in (*range(first), *range(end, 0x110000)):
        decomposed = unicodedata.normalize("NFD", chr(code))
        assert not unicodedata.combining(decomposed[0])


def test_characters_that_decompose_to_marks_are_marks_or_listed_exceptions() -> None:
    for code in range(*canonical._COMBINING_MARKS):
        decomposed = unicodedata.normalize("NFD", chr(code))
        is_mark = unicodedata.combining(chr(code)) > 0 or chr(code) in canonical._COMPOSED_MARKS
        assert is_mark == (unicodedata.combining(decomposed[0]) > 0)


@pytest.mark.rule("RU-3", "CO-30")
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ae日\u0301\u0327\u0f73\u0f75\u0f81\u0344"), st.sampled_from([1, 2, 15, 16, 31, 32, 40])
        ),
        max_size=12,
    )
)
def test_texts_that_skip_the_search_for_long_runs_have_none(parts: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in parts)
    long_run, _ = canonical._compile_mark_tables()
    assert canonical._may_have_long_run(text) or long_run.search(text) is None
    assert nfc(text) == unicodedata.normalize("NFC", canonical._sort_long_runs(text))


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("start", range(33))
def test_shortest_long_run_is_found_wherever_it_starts(start: int) -> None:
    for mark in ("\u0301", *canonical._COMPOSED_MARKS):
        assert canonical._may_have_long_run("日" * start + mark * 32 + "日" * 40)


@pytest.mark.parametrize("name", ["日本語テスト" * 40, "हिन्दी में क्षेत्र " * 13, "שָׁלוֹם עֲלֵיכֶם " * 14])
def test_ordinary_names_skip_the_search_for_long_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "_sort_long_runs", lambda text: pytest.fail(f"searched {len(text)} characters"))
    assert nfc(name) == unicodedata.normalize("NFC", name)


@pytest.mark.rule("EV-9", "CO-30")
def test_no_character_has_more_canonical_parts_than_the_length_check_assumes() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert longest == DECOMPOSED_CHARACTERS_MAX


@pytest.mark.rule("EV-9", "CO-30")
def test_partition_that_is_too_long_is_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "\u1f82" * 256
    assert normal_partitions([unicodedata.normalize("NFD", longest)]) == (longest,)
    monkeypatch.setattr(identity, "nfc", lambda text: pytest.fail(f"normalised {len(text)} characters"))
    with pytest.raises(CanonicalError, match="must have 1 to 256 characters, not 1025"):
        normal_partitions(["\u0301" * 1025])


@pytest.mark.rule("RU-3", "CO-30")
def test_long_run_of_combining_marks_is_sorted_before_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalisation moves marks one at a time, so its cost is quadratic in the length of an unsorted run."""
    composed: list[str] = []
    normalize = unicodedata.normalize

    def record_normalisation(form: Any, text: str) -> str:
        if form == "NFC":
            composed.append(text)
        return normalize(form, text)

    monkeypatch.setattr(unicodedata, "normalize", record_normalisation)
    nfc("a" + "\u0301\u0327" * 1000)
    assert composed == ["a" + "\u0327" * 1000 + "\u0301" * 1000]
