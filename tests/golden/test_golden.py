"""Observable behaviour matches the golden files."""

from pathlib import Path

import pytest

from golden import golden_files
from golden.golden_files import FILES, REGENERATE
from golden.recorders import RECORDERS


@pytest.mark.parametrize("name", RECORDERS)
def test_behaviour_matches_the_golden_files(name: str, tmp_path: Path) -> None:
    found = golden_files.differences(RECORDERS[name](tmp_path))
    if found:
        pytest.fail(f"{found}\n\n{REGENERATE}", pytrace=False)


def test_diff_shows_the_file_and_the_changed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_files, "FILES", tmp_path)
    golden_files.write({"one.txt": "first\nsecond\n", "other.txt": "same\n"})
    found = golden_files.differences({"one.txt": "first\n2nd\n", "other.txt": "same\n", "new.txt": ""})
    assert "tests/golden/files/one.txt" in found
    assert "-second\n+2nd" in found
    assert "other.txt" not in found
    assert "new.txt does not exist" in found


def test_long_diff_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_files, "FILES", tmp_path)
    golden_files.write({"one.txt": "a\n" * 1000})
    found = golden_files.differences({"one.txt": "b\n" * 1000}).split("\n")
    assert len(found) == golden_files.DIFF_LINES_MAX + 1
    assert found[-1] == "… (one.txt: the rest is not shown)"


def test_golden_files_have_unix_line_endings() -> None:
    for path in FILES.iterdir():
        data = path.read_bytes()
        assert b"\r\n" not in data, path
        assert data.endswith(b"\n"), path
