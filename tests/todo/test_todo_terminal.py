"""Terminals of examples/todo against a real server: shared edits, offline work, and one order."""

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import model
from cli import server_process as processes
from databases import BOTH_STORES
from deadlines import WAIT_S
from oncelog.client import Client
from oncelog.errors import StoreInUseError
from server.running_server import serving
from todo.screens import Screen, places, screen

LIST: Final = "project/home"
PROGRAM: Final = Path(__file__).parents[2] / "examples/todo/terminal.py"


async def wait_for_all(screens: list[Screen], *lines: str) -> None:
    """Wait until all terminals show this list, and assert that items and positions agree."""
    for one in screens:
        await one.wait_for_items(*lines)
    assert all(order == places(screens)[0] for order in places(screens))


@pytest.mark.rule("EV-17")
async def test_terminals_see_each_others_changes(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        screen(served.url, "ann", tmp_path) as ann,
        screen(served.url, "bob", tmp_path) as bob,
    ):
        await ann.wait_for_status("● live")
        await bob.wait_for_status("● live")
        await ann.add("milk", "q and o")
        await wait_for_all([ann, bob], "milk", "q and o")
        await bob.toggle("milk")
        await wait_for_all([ann, bob], "x milk", "q and o")
        await bob.add("bread")
        await ann.toggle("milk")
        await ann.remove("q and o")
        await wait_for_all([ann, bob], "milk", "bread")
        await ann.wait_for_status("● live · event 6")
        assert ann.drawn_lines == ["· milk  ann", "· bread  bob"]


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_terminals_agree_on_one_order_after_offline_edits(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        screen(served.url, "ann", tmp_path) as ann,
        screen(served.url, "bob", tmp_path) as bob,
    ):
        await ann.add("milk", "eggs")
        await wait_for_all([ann, bob], "milk", "eggs")
        await ann.press("o")
        await bob.press("o")
        await ann.wait_for_status("○ switched off")
        await ann.add("tea")
        await ann.toggle("milk")
        await bob.add("salt", "rice")
        await bob.toggle("rice")
        await bob.remove("milk")
        await ann.wait_for_status("· 2 waiting")
        await ann.wait_for_lines(("milk", True, True), ("eggs", False, False), ("tea", False, True))
        await bob.wait_for_lines(("eggs", False, False), ("salt", False, True), ("rice", True, True))
        assert "not sent yet" in ann.drawn_lines[0]

        await bob.press("o")
        await wait_for_all([bob], "eggs", "salt", "x rice")
        await ann.press("o")  # Ann's change to the milk comes after its removal and has no effect.
        await wait_for_all([ann, bob], "eggs", "salt", "x rice", "tea")
        await ann.wait_for_status("● live · event 8")
        await bob.wait_for_status("● live · event 8")


@pytest.mark.rule("EV-17")
async def test_pending_changes_survive_restarts_of_terminal_and_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        port = served.port
        async with screen(served.url, "ann", tmp_path) as ann:
            await ann.add("milk")
            await ann.wait_for_items("milk")
            await ann.press("o")
            await ann.toggle("milk")
            await ann.add("bread")
            await ann.quit()
    url = f"http://127.0.0.1:{port}"
    async with screen(url, "ann", tmp_path) as ann:  # The terminal starts without a server.
        await ann.wait_for_lines(("milk", True, True), ("bread", False, True))
        await ann.wait_for_status("○ offline · event 1 · 2 waiting")
        async with serving(tmp_path, port=port):
            await ann.wait_for_items("x milk", "bread")
            async with screen(url, "bob", tmp_path) as bob:
                await wait_for_all([ann, bob], "x milk", "bread")


async def test_terminal_without_access_shows_the_refusal(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served, screen(served.url, "ann", tmp_path) as ann:
        await ann.add("milk")
        await ann.wait_for_status("✗ refused · event 0 · 1 waiting · ")
        assert ann.lines == [("milk", False, True)]


RULES: Final = """
def check(event):
    if event.body["payload"].get("text") == "beer":
        raise ValueError("no beer")
"""


async def test_terminal_shows_rejected_changes_until_dismissed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "todo_test_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    async with (
        serving(tmp_path, validate="todo_test_rules:check") as served,
        screen(served.url, "ann", tmp_path) as ann,
    ):
        await ann.add("milk", "beer")
        await ann.wait_for_status("· 1 rejected")
        await ann.wait_for_items("milk")
        assert ann.drawn_lines[0] == "· milk  ann"
        assert ann.drawn_lines[1].startswith("✗ beer  validation_failed")
        assert "no beer" in ann.drawn_lines[1]
        await ann.press("end", "space", "d")
        await ann.wait_for_status("● live · event 1")
        assert ann.drawn_lines == ["· milk  ann"]


async def test_new_log_resets_the_list_and_keeps_pending_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        port = served.port
        async with screen(served.url, "ann", tmp_path) as ann:
            await ann.add("milk")
            await ann.wait_for_items("milk")
            await ann.press("o")
            await ann.add("bread")
    async with screen(f"http://127.0.0.1:{port}", "ann", tmp_path) as ann:
        await ann.wait_for_status("○ offline")
        async with serving(tmp_path, port=port, store=str(tmp_path / "other.db")):
            await ann.wait_for_items("bread")


async def test_foreign_events_and_control_characters_are_shown_safely(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        screen(served.url, "ann", tmp_path) as ann,
        Client(served.url, path=":memory:", partitions=[LIST]) as other,
    ):
        await other.submit({"type": "todo.added", "text": "of another kind"})
        evil = {"item": "e", "text": "\x1b[2J[red]\n\0", "by": "[/]"}
        await other.submit({"type": "todo.added", "schemaVersion": 1, "payload": evil, "meta": {}})
        await ann.add("[b]milk[/b")
        await ann.wait_for_items("\x1b[2J[red]\n\0", "[b]milk[/b")
        assert ann.drawn_lines == ["· �[2J[red]��  [/]", "· [b]milk[/b  ann"]


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_program_runs_in_a_real_terminal_and_quits_cleanly(key: str, tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
        milk = json.dumps(model.build_event(model.ADDED, "1", "bob", "milk"))
        assert processes.oncelog("submit", "--url", served.url, "--partition", LIST, milk).returncode == 0
        command = [sys.executable, str(PROGRAM), "--name", "ann", "--url", served.url]
        with run_in_terminal(command, tmp_path) as (process, output):
            output.until("● live · event 1")
            output.until("milk")
            output.type(key)
            output.until("\x1b[?1049l")  # The escape sequence leaves the alternate screen.
            assert process.wait(WAIT_S) == 0
        assert "Traceback" not in output.text
    table = model.Table(str(tmp_path / "todo-ann.db"))
    assert [(item.text, item.by) for item in table.items()] == [("milk", "bob")]
    table.close()


class TerminalOutput:
    """The output of a program in a terminal, and its keyboard input."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.text = ""

    def until(self, words: str) -> None:
        """Wait until the program has written the words."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.text:
            ready, _, _ = select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, self.text[-1000:]
            try:
                self.text += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # the program has exited
                raise AssertionError(self.text[-1000:]) from None

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())


@contextmanager
def run_in_terminal(command: list[str], directory: Path) -> Iterator[tuple["subprocess.Popen[bytes]", TerminalOutput]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = {**processes.ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(  # noqa: S603
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, TerminalOutput(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


async def test_second_terminal_on_the_same_file_is_refused(tmp_path: Path) -> None:
    async with screen("http://127.0.0.1:9", "ann", tmp_path):
        with pytest.raises(StoreInUseError):
            async with screen("http://127.0.0.1:9", "ann", tmp_path):
                pass
        command = [sys.executable, str(PROGRAM), "--name", "ann", "--store", str(tmp_path / "ann.db")]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert done.returncode == 1
        assert "another client has" in done.stderr


def test_invalid_list_name_is_refused() -> None:
    command = [sys.executable, str(PROGRAM), "--name", "ann", "--list", "a/b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)  # noqa: S603
    assert done.returncode == 2
    assert "lower-case letters" in done.stderr
