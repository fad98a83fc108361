"""The "Try it" sections of reference pages and guides work as printed, and reference programs pass type checks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.server_process import reserve_port
from walkthrough import Walkthrough

REFERENCE = Path(__file__).parent.parent / "docs/reference"
GUIDES = REFERENCE.parent / "guides"
EXAMPLES = {
    page.stem: found[1]
    for page in sorted([*REFERENCE.glob("*.md"), *GUIDES.glob("*.md")])
    if (found := re.search(r"^## Try it\n(.*?)(?=^## )", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    and "make cluster" not in found[1]  # tests/testing covers the cluster.
}
PROGRAMS = {
    page.stem: programs
    for page in sorted(REFERENCE.glob("*.md"))
    if (programs := re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_first_example_works_as_printed(page: str, tmp_path: Path) -> None:
    with reserve_port() as port:
        walkthrough = Walkthrough(tmp_path, port)
        try:
            walkthrough.follow(EXAMPLES[page])
        finally:
            walkthrough.kill_server()


def test_pages_with_examples_are_found() -> None:
    assert {"canonical", "chat", "cli", "deltas", "events", "ledger", "proofs"} <= set(EXAMPLES)
    assert {"operations", "operators", "server"} <= set(EXAMPLES)


def test_programs_pass_strict_type_checks(tmp_path: Path) -> None:
    for page, programs in PROGRAMS.items():
        for number, program in enumerate(programs):
            (tmp_path / f"{page}_{number}.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stdout


def test_program_for_an_embedded_log_with_deltas_prints_its_description(tmp_path: Path) -> None:
    (program,) = PROGRAMS["deltas"]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.startswith("Committed 1\nReplayed 1\nTrue ")
