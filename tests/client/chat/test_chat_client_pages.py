"""Test the documentation page and the example of the chat client."""

import re
import subprocess
import sys
from pathlib import Path

from cli.server_process import serving
from client.pages import limits_of, programs_of, run_program
from oncelog.client.chat import ChatLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guides/chat-client.md").read_text(encoding="utf-8")


def test_example_recovers_after_it_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        command = [sys.executable, str(ROOT / "examples/chat_client.py"), server.url]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
        assert "killed by signal 9" in output
        assert "the file has 2 messages that no server knows of" in output
        assert "1: user:bob says 'Tea at five.'" in output
        assert "Ann sees: ['delivered', 'delivered', 'delivered']" in output


def test_programs_on_the_page_run(tmp_path: Path) -> None:
    programs = programs_of(PAGE)
    assert len(programs) == 2
    with serving(tmp_path) as server:
        outputs = []
        for program in programs:
            output = run_program(program.replace("http://127.0.0.1:7171", server.url), tmp_path)
            outputs.append(output)
    assert re.fullmatch(r"Sent\(message_id='msg_\w+', sequence=1, .*\)\n1 user:ann hello\n", outputs[0])
    assert outputs[1] == "1 user:ann hello\n2\n"


def test_page_lists_every_limit_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(ChatLimits(), name) for name in ChatLimits.__struct_fields__}
