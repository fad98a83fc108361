"""Results that an earlier version stored are replayed: the identity of a call has not changed."""

from pathlib import Path
from typing import Final

import pytest

import oncelog
from compatibility.formats import name_versions, unpack
from compatibility.once_results import CALLS, INVOICE, call_all

FILES: Final = name_versions("once-results")


def test_there_is_a_file_with_results() -> None:
    assert FILES


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("version", FILES)
def test_stored_results_are_replayed(version: int, tmp_path: Path) -> None:
    CALLS.clear()
    with oncelog.open_blocking(unpack(FILES[version], tmp_path / "log.db")) as log:
        results = call_all(log)
    assert CALLS == []
    assert results == [
        3,
        {"values": [1, 2.5, "é", None, True, 1e21], "options": {"b": [], "a": {"€": -0.5}}},
        INVOICE,
        {"roll": 20},
        ("declined", 7),
    ]
