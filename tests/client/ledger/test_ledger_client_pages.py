"""The page and the example of the ledger's client say what is so."""

import re
import subprocess
import sys
from pathlib import Path

from client.ledger.ledgers import server_process
from oncelog.client.ledger import LedgerLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/ledger-client.md").read_text(encoding="utf-8")


def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with server_process(str(tmp_path / "events.db")) as (_, address):
        command = [sys.executable, str(ROOT / "examples/ledger_client.py"), address]
        for _ in range(2):  # it may be run again
            told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
            assert "killed by signal 9" in told
            assert "10 bills are paid, the sequence is 10" in told
            assert "KEY_EXISTS" in told


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    programs = [
        one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if one.startswith(("import", "from"))
    ]
    assert len(programs) == 2
    with server_process(str(tmp_path / "events.db")) as (_, address):
        for program in programs:
            command = [sys.executable, "-c", program.replace("127.0.0.1:7271", address)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
            assert re.match(r"transaction [0-9a-f]{16}, version 1|Written\(", done.stdout), done.stdout


def test_every_limit_is_on_the_page_with_its_default() -> None:
    rows = {
        name: value
        for names, value in re.findall(r"^\| (`[a-z_`, ]+`) \| ([\d, MiB]+) \|", PAGE, re.MULTILINE)
        for name, value in zip(re.findall(r"`(\w+)`", names), re.split(r", (?=\d)", value), strict=True)
    }
    told = {name: _number(value) for name, value in rows.items()}
    assert told == {name: getattr(LedgerLimits(), name) for name in LedgerLimits.__struct_fields__}


def _number(text: str) -> int:
    digits, _, unit = text.replace(",", "").partition(" ")
    return int(digits) * (2**20 if unit == "MiB" else 1)
