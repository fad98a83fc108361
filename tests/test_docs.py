"""What the documents say is true: programs print what they show, tables match the code, commands and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

import oncelog
from oncelog.cli import app
from oncelog.core.policy import BUILT_IN, Policy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(  # noqa: S603
        command, input=given, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.stderr == ""
    return done.stdout


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_first_program_prints_what_the_readme_shows() -> None:
    assert run(sys.executable, "-c", blocks("python")[0]) == blocks("text")[0]


def test_the_policy_of_the_readme_can_be_declared() -> None:
    namespace: dict[str, object] = {}
    exec(blocks("python")[1], namespace)  # noqa: S102 - it is our own page
    assert isinstance(namespace["payments"], Policy)


def test_the_commands_of_the_readme_print_what_it_shows() -> None:
    shown = re.findall(r"^\$ echo '(.*)' \| \.venv/bin/oncelog (.*)\n(.*)$", blocks("console")[1], re.MULTILINE)
    assert len(shown) == 2
    for given, command, answer in shown:
        assert run(sys.executable, "-m", "oncelog", *command.split(), given=given).strip() == answer


def test_the_policy_table_names_every_built_in_policy() -> None:
    assert re.findall(r"^\| `([A-Z]+)` \|", README, re.MULTILINE) == [policy.name.upper() for policy in BUILT_IN]


def test_every_field_of_a_policy_is_documented() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)) == set(Policy.__struct_fields__)


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for name, command in root.commands.items():
        assert isinstance(command, TyperGroup)
        for inner in command.commands:
            assert f"`oncelog {name} {inner}`" in page


def test_every_make_target_has_a_line_of_help() -> None:
    shown = run("make", "--no-print-directory", "help")
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    targets = set(phony[1].split()) - {"new-venv"}
    assert targets >= {"run", "test", "lint", "bench", "soak", "help"}
    for target in targets:
        assert re.search(rf"^  make {target} ", shown, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_public_names_are_there() -> None:
    assert all(hasattr(oncelog, name) for name in oncelog.__all__)
    assert len(set(oncelog.__all__)) == len(oncelog.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_names_a_machine(page: Path) -> None:
    assert not re.search(r"/(home|root|work|tmp)/", page.read_text(encoding="utf-8"))


def test_the_narrated_tour_tells_its_story() -> None:
    told = run(sys.executable, "examples/narrated.py")
    for words in (
        "known: position 1 again",
        "refused (identity_reused)",
        "known: sequence 1 again, and the content differs",
        "refused (not_a_member)",
        "refused (sequence_gap)",
        "refused (lease_lost)",
        "{'done': 'true', 'litres': '2', 'note': '\"organic\"'}",
        "with another total? False",
    ):
        assert words in told
