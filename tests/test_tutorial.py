"""The tutorial works as printed in an empty directory, and so do the programs on the concept pages."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import oncelog
from cli.server_process import reserve_port
from walkthrough import Walkthrough

TUTORIAL = Path(__file__).parent.parent / "docs/tutorial"
STEPS = sorted(TUTORIAL.glob("[0-9]-*.md"))
GUIDES = [TUTORIAL.parent / "guides" / name for name in ("audit.md", "policies.md")]
CONCEPTS = [*sorted(TUTORIAL.parent.glob("concepts/*.md")), *GUIDES]


def test_tutorial_works_as_printed(tmp_path: Path) -> None:
    with reserve_port() as port:
        walkthrough = Walkthrough(tmp_path, port)
        try:
            for step in STEPS:
                walkthrough.follow(step.read_text(encoding="utf-8"))
        finally:
            walkthrough.kill_server()
    output = "".join(walkthrough.outputs)
    assert len(STEPS) == 4
    assert "refused: " in output
    assert "3 new orders\n0 new orders\n" in output
    assert output.count('"committed_id":5') >= 2
    assert output.count("0 orders waiting in till.db") == 3
    assert "refused, as it should be" in output
    with oncelog.open_blocking(tmp_path / "orders.db") as log:
        records = log.read(partition="orders").records
    assert [json.loads(record.body)["order"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    check_types(tmp_path)


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_programs_on_the_concept_pages_run(page: Path, tmp_path: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)  # noqa: S603


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_programs_on_the_concept_pages_pass_strict_type_checks(page: Path, tmp_path: Path) -> None:
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
        (tmp_path / f"program_{number}.py").write_text(program)
    check_types(tmp_path)


def check_types(directory: Path) -> None:
    """Check all programs in a directory with mypy."""
    programs = sorted(map(str, directory.glob("*.py")))
    if programs:
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(directory / "cache"), *programs]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)  # noqa: S603
        assert done.returncode == 0, done.stdout
