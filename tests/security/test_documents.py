"""The security documents refer to existing tests and contain the sections that readers need."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_readme_lists_existing_tests() -> None:
    named = re.findall(r"`([\w./]+\.py)(?:::(\w+))?`", (HERE / "README.md").read_text())
    assert len(named) > 40
    missing = [
        (path, test)
        for path, test in named
        if not (HERE / path).is_file() or (test and f"def {test}(" not in (HERE / path).read_text())
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("path", "headings"),
    [
        ("SECURITY.md", ["Supported versions", "Report a vulnerability", "What to expect"]),
        ("docs/reference/security.md", ["Assets", "Actors", "Boundaries", "Threats and defences", "Not defended"]),
    ],
)
def test_security_policy_and_threat_model_have_their_sections(path: str, headings: list[str]) -> None:
    text = (ROOT / path).read_text()
    found = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [one for one in found if one in headings] == headings
