"""Every program and command in the README works when pasted."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cli.server_process import reserve_port
from deadlines import WAIT_S
from walkthrough import Walkthrough

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
OUTPUT = re.findall(r"```text\n(.*?)```", README, re.DOTALL)[0]
WORDS_MAX = 900


def run(program: str, directory: Path) -> str:
    (directory / "shop.py").write_text(program)
    command = [sys.executable, "shop.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory)  # noqa: S603
    assert done.stderr == ""
    return done.stdout


def test_readme_is_short() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= WORDS_MAX


def test_installation_names_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    section = README.split("## Install\n")[1].split("\n## ")[0]
    for extra in project["optional-dependencies"].keys() - {"examples", "testing"}:
        assert re.search(rf"`{extra}`|\[{extra}\]", section), extra


def test_first_program_runs_its_function_once(tmp_path: Path) -> None:
    results = "{'charged': 4200}\n" * 2
    assert run(PROGRAMS[0], tmp_path) == f"charging 4200\n{results}"
    assert run(PROGRAMS[0], tmp_path) == results


def test_second_program_prints_the_shown_output(tmp_path: Path) -> None:
    assert run(PROGRAMS[1], tmp_path) == OUTPUT
    assert run(PROGRAMS[1], tmp_path) == OUTPUT.replace("Committed", "Replayed")


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_pass_strict_type_checks(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[number])
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stdout


def test_installation_works_in_an_empty_environment(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("src", "tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = ["/bin/bash", "-e", "-c", COMMANDS[0]]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=environment, timeout=WAIT_S)  # noqa: S603
    program = [str(tmp_path / ".venv/bin/python"), "-c", PROGRAMS[0]]
    done = subprocess.run(program, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)  # noqa: S603
    assert done.stdout.startswith("charging 4200\n")


def test_commands_of_the_server_section_work(tmp_path: Path) -> None:
    make, commands = COMMANDS[1:]
    assert make == "make run\n"
    *submits, tail = commands.replace(".venv/bin/", "").strip().splitlines()
    assert tail.startswith("oncelog tail")
    page = f"```sh\noncelog serve --development\n```\n```sh\n{chr(10).join(submits)}\n{tail} --limit 2\n```\n"
    with reserve_port() as port:
        walkthrough = Walkthrough(tmp_path, port)
        try:
            walkthrough.follow(page)
            walkthrough.follow(f"```sh\n{submits[0]}\n{submits[1]}\n```\n")
            walkthrough.stop_server()
        finally:
            walkthrough.kill_server()
    first, again = (re.findall(r'\{"results":.*?\]\}', output) for output in walkthrough.outputs)
    assert first == again
    assert len(first) == 1
