"""Test the documentation pages of the events client and the page for all clients."""

import re
from pathlib import Path

from cli.server_process import serving
from client.pages import limits_of, programs_of, run_program
from oncelog.client import ClientLimits, ConnectionState
from oncelog.client.runtime.values import BaseStatus

GUIDES = Path(__file__).parents[3] / "docs/guides"
PAGE = (GUIDES / "client.md").read_text(encoding="utf-8")
COMMON_PAGE = (GUIDES / "clients.md").read_text(encoding="utf-8")


def test_programs_on_the_page_run(tmp_path: Path) -> None:
    first, blocking, with_apply = programs_of(PAGE)
    with serving(tmp_path) as server:
        first, blocking = (one.replace("http://127.0.0.1:7171", server.url) for one in (first, blocking))
        output = run_program(first, tmp_path)
        assert re.fullmatch(r"Committed\(committed_id=1, .*\)\n1 {'text': 'milk', 'type': 'todo.added'}\n", output)
        assert run_program(blocking, tmp_path).startswith("Committed(committed_id=2, ")
        assert len(run_program(first, tmp_path).splitlines()) == 4  # an outcome, and all events
    assert run_program(with_apply, tmp_path) == ""


def test_page_lists_every_limit_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(ClientLimits(), name) for name in ClientLimits.__struct_fields__}


def test_program_on_the_common_page_runs(tmp_path: Path) -> None:
    (program,) = programs_of(COMMON_PAGE)
    with serving(tmp_path) as server:
        output = run_program(program.replace("http://127.0.0.1:7171", server.url), tmp_path)
    assert re.fullmatch(r"Committed\(committed_id=1, .*\)\nConnectionState.LIVE\n", output)


def test_common_page_lists_every_state_and_every_field_of_the_status() -> None:
    status = COMMON_PAGE.partition("\n## Status\n")[2].partition("\n## ")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", status, re.MULTILINE))
    assert names == {state.name for state in ConnectionState} | set(BaseStatus.__struct_fields__)
