"""The page and the example of the client of rows say what is so."""

import subprocess
import sys
from pathlib import Path

from client.deltas.deltas_clients import server_process
from client.pages import limits_of, programs_of
from oncelog.client.deltas import DeltasLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/deltas-client.md").read_text(encoding="utf-8")


def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with server_process(str(tmp_path / "events.db")) as (_, url):
        command = [sys.executable, str(ROOT / "examples/deltas_client.py"), url]
        for _ in range(2):  # it may be run again
            told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
            assert "killed by signal 9" in told
            assert "the file has 2 edits that no gateway knows of" in told
            assert "both tills have {'tea': {'name': 'Green tea', 'price': 4}}" in told


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    programs = programs_of(PAGE)
    assert len(programs) == 2
    with server_process(str(tmp_path / "events.db")) as (_, url):
        told = []
        for program in programs:
            command = [sys.executable, "-c", program.replace("http://127.0.0.1:7171", url)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
            told.append(done.stdout)
        assert told == ["p1 {'name': 'Tea', 'price': 4}\n", "{'name': 'Coffee'}\n"]


def test_every_limit_is_on_the_page_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(DeltasLimits(), name) for name in DeltasLimits.__struct_fields__}
