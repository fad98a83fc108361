"""The page and the example of the client of chats say what is so."""

import re
import subprocess
import sys
from pathlib import Path

from client.chat.chatting import server_process
from client.pages import limits_of, programs_of
from oncelog.client.chat import ChatLimits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/chat-client.md").read_text(encoding="utf-8")


def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with server_process(str(tmp_path / "events.db")) as (_, url):
        command = [sys.executable, str(ROOT / "examples/chat_client.py"), url]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout  # noqa: S603
        assert "killed by signal 9" in told
        assert "the file has 2 messages that no server knows of" in told
        assert "1: user:bob says 'Tea at five.'" in told
        assert "Ann sees: ['delivered', 'delivered', 'delivered']" in told


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    programs = programs_of(PAGE)
    assert len(programs) == 2
    with server_process(str(tmp_path / "events.db")) as (_, url):
        told = []
        for program in programs:
            command = [sys.executable, "-c", program.replace("http://127.0.0.1:7171", url)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
            told.append(done.stdout)
    assert re.fullmatch(r"Sent\(message_id='msg_\w+', sequence=1, .*\)\n1 user:ann hello\n", told[0])
    assert told[1] == "1 user:ann hello\n2\n"


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^\$ cat > chat.py\n(.*?)^\$ ", readme, re.DOTALL | re.MULTILINE)
    with server_process(str(tmp_path / "events.db")) as (_, url):
        command = [sys.executable, "-c", program.replace("http://127.0.0.1:7171", url)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
    assert done.stdout == "1\n"


def test_every_limit_is_on_the_page_with_its_default() -> None:
    assert limits_of(PAGE) == {name: getattr(ChatLimits(), name) for name in ChatLimits.__struct_fields__}
