"""Test the documentation page and the example of the ledger client."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

from cli.server_process import serving
from client.pages import limits_of, programs_of, run_program
from oncelog.client.ledger import BlockingLedgerClient, LedgerClient, LedgerLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guides/ledger-client.md").read_text(encoding="utf-8")


def test_example_recovers_after_it_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, grpc=True) as server:
        command = [sys.executable, str(ROOT / "examples/ledger_client.py"), server.rpc_address]
        for _ in range(2):  # a second run also succeeds
            output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
            assert "killed by signal 9" in output
            assert "10 bills are paid, the sequence is 10" in output
            assert "KEY_EXISTS" in output


def test_programs_on_the_page_run(tmp_path: Path) -> None:
    programs = programs_of(PAGE)
    assert len(programs) == 2
    with serving(tmp_path, grpc=True) as server:
        for program in programs:
            output = run_program(program.replace("127.0.0.1:7271", server.rpc_address), tmp_path)
            assert re.match(r"transaction [0-9a-f]{16}, version 1|Written\(", output), output


def test_page_lists_every_limit_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(LedgerLimits(), name) for name in LedgerLimits.__struct_fields__}


def test_page_awaits_every_method_that_must_be_awaited() -> None:
    named = {
        name for name in re.findall(r"(\w+)\(", PAGE) if inspect.iscoroutinefunction(getattr(LedgerClient, name, None))
    }
    assert {"pending", "recovered", "resume", "write"} <= named
    assert {name for name in named if f"await ledger.{name}(" not in PAGE} == set()
    assert not any(inspect.iscoroutinefunction(getattr(BlockingLedgerClient, name, None)) for name in named)
