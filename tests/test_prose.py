"""The phrase list finds phrases in prose but not in code."""

from pathlib import Path

import pytest

from tools import prose


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("page.md", "Nobody may write.\n\n```text\nNobody may write.\n```\n", 1),
        ("page.md", "The class `Nobody` may write. Who is it?\n", 0),
        ("module.py", '"""Returns what is stored there."""\nnobody = "nobody"  # all that remains\n', 2),
        ("page.sql", "-- the rows of those who left\nSELECT nobody;\n", 1),
    ],
)
def test_phrases_are_found_only_in_prose(
    name: str, text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert len(prose.find_phrases([Path(name)])[0]) == expected
