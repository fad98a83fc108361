"""The documentation matches the code: programs print the shown output, tables are complete, and linked pages exist."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

import oncelog
from oncelog.cli import app, terminal
from oncelog.client.ledger import LedgerClient
from oncelog.core.policy import Policy
from oncelog.core.rules import audit
from oncelog.engine.tailer import FAILED_POLLS_MAX
from scripts import RUN_TWICE

ROOT = Path(__file__).parent.parent
LIBRARY = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/library.md").read_text(encoding="utf-8"), re.DOTALL)
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"), *ROOT.glob("examples/**/*.md")]
)


def run(*command: str, given: str | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(  # noqa: S603
        command, input=given, capture_output=True, text=True, check=True, cwd=cwd, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("number", range(len(LIBRARY)))
def test_programs_on_the_library_page_run_repeatedly(number: int, tmp_path: Path) -> None:
    assert run(sys.executable, "-c", RUN_TWICE, LIBRARY[number], cwd=tmp_path) == ""


async def test_application_on_the_library_page_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(LIBRARY[-1], namespace)  # noqa: S102 - a page of this repository
    order = {"id": "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10", "event": {"type": "order.placed"}}
    changed = {**order, "event": {"type": "order.cancelled"}}
    bodies = [order, order, changed, {**order, "id": "no uuid"}]

    async def call(scope: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        received = iter(messages)

        async def receive() -> dict[str, Any]:
            return next(received)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await namespace["app"]({"type": scope}, receive, send)
        return sent

    async def session() -> list[int]:
        statuses = []
        await namespace["log"].__aenter__()
        for body in bodies:
            sent = await call("http", {"type": "http.request", "body": json.dumps(body).encode()})
            statuses.append(sent[0]["status"])
        await call("lifespan", {"type": "lifespan.shutdown"})
        return statuses

    assert await session() == [200, 200, 409, 400]


def test_every_limit_is_documented_with_its_default() -> None:
    page = (ROOT / "docs/guides/library.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert named == set(oncelog.Limits.__struct_fields__)


def test_retry_time_of_followers_is_documented() -> None:
    page = (ROOT / "docs/guides/library.md").read_text(encoding="utf-8")
    assert f"After {FAILED_POLLS_MAX} failed polls in a row (five seconds by default)," in " ".join(page.split())
    assert FAILED_POLLS_MAX * oncelog.Limits().poll_ms == 5000


def test_every_exit_status_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    rows = {int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    statuses = {value for name, value in vars(terminal).items() if name.isupper() and type(value) is int}
    assert rows == {0, *statuses}


def test_every_option_of_a_command_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for name, command in root.commands.items():
        inner = command.commands.values() if isinstance(command, TyperGroup) else [command]
        for parameter in (parameter for one in inner for parameter in one.params):
            for option in parameter.opts:
                assert not option.startswith("--") or option in page, (name, option)


def test_every_field_of_a_policy_is_documented() -> None:
    page = (ROOT / "docs/guides/policies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)) == set(Policy.__struct_fields__)


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for name, command in root.commands.items():
        inner = [f"{name} {one}" for one in command.commands] if isinstance(command, TyperGroup) else [name]
        for one in inner:
            assert f"`oncelog {one}" in page


def test_every_make_target_has_a_line_of_help() -> None:
    shown = run("make", "--no-print-directory", "help")
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    targets = set(phony[1].split()) - {"new-venv", "node-and-browser"}
    assert targets >= {"run", "test", "lint", "bench", "soak", "help"}
    for target in targets:
        assert re.search(rf"^  make {target} ", shown, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[float]:
    """Return the numbers in a cell or line, rounded to three digits."""
    return [float(f"{float(number.replace(',', '')):.3g}") for number in NUMBER.findall(text)]


def test_sizing_figures_match_the_results() -> None:
    page = (ROOT / "docs/guides/operators.md").read_text(encoding="utf-8")
    section = page.partition("\n## Sizing\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) > 20
    old = []
    for what, *cells, source in rows:
        (target,) = re.findall(r"\((?:\.\./)+(bench/results/\w+\.md)\)", source)
        figures = numbers(" ".join(cells))
        assert figures, what
        # All numbers of a row must be in one line of the results. Otherwise numbers from different lines could match.
        lines = (ROOT / target).read_text(encoding="utf-8").splitlines()
        if not any(line.startswith("|") and set(figures) <= set(numbers(line)) for line in lines):
            old.append((what.strip(), figures, target))
    assert old == []


@pytest.mark.rule("CO-43")
def test_every_act_is_documented() -> None:
    acts = {value for name, value in vars(audit).items() if value == name.lower() and name.isupper()}
    assert {"erase", "member_added", "read_only_off"} <= acts
    table = (ROOT / "docs/guides/audit.md").read_text().partition("## Recorded acts")[2].partition("\n\nWithout")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(acts)


@pytest.mark.rule("LG-19")
def test_ledger_client_page_awaits_every_coroutine() -> None:
    page = (ROOT / "docs/guides/ledger-client.md").read_text(encoding="utf-8")
    coroutines = {name for name, _ in inspect.getmembers(LedgerClient, inspect.iscoroutinefunction)}
    named = coroutines.intersection(re.findall(r"(?:`|ledger\.)(\w+)\(", page))
    assert {"pending", "write"} <= named
    assert named <= set(re.findall(r"await ledger\.(\w+)\(", page))


def test_files_on_the_architecture_page_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = {path for path in re.findall(r"`([a-z_/]+\.py)`", page) if "/<api>/" not in path}
    source = ROOT / "src/oncelog"
    places = (source, source / "storage", ROOT)
    assert [path for path in sorted(named) if not any((place / path).exists() for place in places)] == []
    assert len(named) > 20


def test_public_names_are_defined_once() -> None:
    assert all(hasattr(oncelog, name) for name in oncelog.__all__)
    assert len(set(oncelog.__all__)) == len(oncelog.__all__)


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    directory = ROOT / "docs/decisions"
    pages = sorted(directory.glob("0*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for number, page in zip(numbers, pages, strict=True):
        assert page.read_text(encoding="utf-8").startswith(f"# {number} "), page.name
    index = (directory / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\d{4})\]", index, re.MULTILINE) == numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_mentions_a_local_machine(page: Path) -> None:
    assert not re.search(r"/(home|root|work|tmp)/", page.read_text(encoding="utf-8"))


def test_narrated_example_prints_all_outcomes() -> None:
    output = run(sys.executable, "examples/narrated.py")
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
        assert words in output


def test_log_of_the_embedded_example_survives_the_end_of_its_worker(tmp_path: Path) -> None:
    output = run(sys.executable, str(ROOT / "examples/embedded.py"), cwd=tmp_path)
    assert "the file has 40 orders" in output
    assert "40 were known, 60 are new" in output
    assert "the file has 100 orders, each once" in output
    for command in re.findall(r"\.venv/bin/oncelog ((?:verify|show|stats) .*)", output):
        assert run(sys.executable, "-m", "oncelog", *command.split(), cwd=tmp_path)
    readme = (ROOT / "examples/proof/README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"\.venv/bin/oncelog (proof tour\.db .*) > proof\.json", readme)
    (tmp_path / "proof.json").write_text(run(sys.executable, "-m", "oncelog", *command.split(), cwd=tmp_path))
    verified = run("node", str(ROOT / "examples/proof/verify.mjs"), "proof.json", cwd=tmp_path)
    assert verified.startswith("proven; block hash ")
