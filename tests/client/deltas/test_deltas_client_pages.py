"""The page and the example of the client of rows say what is so."""

import re
import subprocess
import sys
from pathlib import Path

from client.deltas.deltas_clients import server_process
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
    programs = [
        one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if one.startswith(("import", "from"))
    ]
    assert len(programs) == 2
    with server_process(str(tmp_path / "events.db")) as (_, url):
        told = []
        for program in programs:
            command = [sys.executable, "-c", program.replace("http://127.0.0.1:7171", url)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
            told.append(done.stdout)
        assert told == ["p1 {'name': 'Tea', 'price': 4}\n", "{'name': 'Coffee'}\n"]


def test_every_limit_is_on_the_page_with_its_default() -> None:
    rows = {
        name: value
        for names, value in re.findall(r"^\| (`[a-z_`, ]+`) \| ([\d, MiB]+) \|", PAGE, re.MULTILINE)
        for name, value in zip(re.findall(r"`(\w+)`", names), re.split(r", (?=\d)", value), strict=True)
    }
    told = {name: _number(value) for name, value in rows.items()}
    assert told == {name: getattr(DeltasLimits(), name) for name in DeltasLimits.__struct_fields__}


def _number(text: str) -> int:
    digits, _, unit = text.replace(",", "").partition(" ")
    return int(digits) * (2**20 if unit == "MiB" else 1)
