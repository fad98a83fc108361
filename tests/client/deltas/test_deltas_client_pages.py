"""Test the documentation page and the example of the deltas client."""

import subprocess
import sys
from pathlib import Path

from cli.server_process import serving
from client.pages import limits_of, programs_of, run_program
from oncelog.client.deltas import DeltasLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guides/deltas-client.md").read_text(encoding="utf-8")


def test_example_recovers_after_it_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        command = [sys.executable, str(ROOT / "examples/deltas_client.py"), server.url]
        for _ in range(2):  # a second run also succeeds
            output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
            assert "killed by signal 9" in output
            assert "the file has 2 edits that no gateway knows of" in output
            assert "both tills have {'tea': {'name': 'Green tea', 'price': 4}}" in output


def test_programs_on_the_page_run(tmp_path: Path) -> None:
    programs = programs_of(PAGE)
    assert len(programs) == 2
    with serving(tmp_path) as server:
        outputs = []
        for program in programs:
            output = run_program(program.replace("http://127.0.0.1:7171", server.url), tmp_path)
            outputs.append(output)
        assert outputs == ["p1 {'name': 'Tea', 'price': 4}\n", "{'name': 'Coffee'}\n"]


def test_page_lists_every_limit_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(DeltasLimits(), name) for name in DeltasLimits.__struct_fields__}
