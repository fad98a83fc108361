"""Every listed mutant can be applied to the source."""

import ast
from pathlib import Path

import pytest

from mutants.__main__ import Mutant, load_mutants

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", load_mutants(), ids=lambda mutant: f"{Path(mutant.file).stem}.{mutant.function}")
def test_mutant_applies_to_the_source(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    changed = mutant.apply_to(text)
    assert changed != text
    ast.parse(changed)


def test_mutant_matches_code_without_its_comment() -> None:
    mutant = Mutant("example.py", "f", "return '# 1'", "return '# 2'")
    assert mutant.apply_to("def f():\n    return '# 1'  # a comment\n") == "def f():\n    return '# 2'\n"
