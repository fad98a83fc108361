"""Every command has examples, JSON output, documented exit statuses and the same rules for colours and Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup

from cli import sample_log
from cli.runner import COMMAND, RUNNER
from cli.server_process import ENVIRONMENT, oncelog, serving, start_command, wait_for_exit
from deadlines import WAIT_S
from oncelog.cli.terminal import EXIT_STATUSES

REFERENCE = Path(__file__).parents[2] / "docs/reference/cli.md"
PROGRAM = Path(sys.executable).with_name("oncelog")
ESCAPE = "\x1b["
WITHOUT_DATA = {"serve", "completion"}
"""Commands that print no data."""


def find_commands(group: TyperGroup, *path: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from find_commands(command, *path, name)
        else:
            assert isinstance(command, TyperCommand)
            yield " ".join([*path, name]), command


ROOT = typer.main.get_command(COMMAND)
assert isinstance(ROOT, TyperGroup)
COMMANDS = dict(find_commands(ROOT))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str) -> None:
    done = RUNNER.invoke(COMMAND, [*name.split(), "--help"], env={"COLUMNS": "300"})
    assert done.exit_code == 0
    assert re.search(rf"Examples?:.*oncelog {name}\b", done.stdout, re.DOTALL)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_DATA])
def test_command_that_prints_data_accepts_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert "--json" in options


def test_exit_statuses_are_in_the_help_and_in_the_reference() -> None:
    documented = re.findall(r"^\| (\d+) \|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert list(map(int, documented)) == list(EXIT_STATUSES)
    shown = RUNNER.invoke(COMMAND, ["--help"], env={"COLUMNS": "300"}).stdout
    for status, meaning in EXIT_STATUSES.items():
        assert f"{status}  {meaning}" in shown


def test_commands_for_a_server_share_their_options() -> None:
    shared = {"--url", "--token", "--token-file", "--profile"}
    using = {name for name, command in COMMANDS.items() if {"--url"} <= {o for p in command.params for o in p.opts}}
    assert using == {
        *("submit", "tail", "load", "show", "stats", "audit", "doctor"),
        *(name for name in COMMANDS if name.startswith("deltas ")),
    }
    for name in using:
        assert shared <= {option for parameter in COMMANDS[name].params for option in parameter.opts}


# --- colours ----------------------------------------------------------------------------------------------


def run_on_terminal(*arguments: str, **environment: str) -> str:
    """Run a command whose standard output is a terminal, and return what it prints."""
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm", **environment}
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "oncelog", *arguments], stdin=subprocess.DEVNULL, stdout=theirs, env=variables
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the process has closed the terminal
            break
        if not part:
            break
        printed += part
    os.close(ours)
    assert process.wait(WAIT_S) == 0
    return printed.decode()


def test_colours_are_for_terminals_without_no_color(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    sample_log.make_log(Path(log), rounds=1)
    colored = run_on_terminal("stats", log)
    assert ESCAPE in colored
    plain = run_on_terminal("stats", log, NO_COLOR="1")
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert ESCAPE not in run_on_terminal("stats", log, TERM="dumb")
    piped = oncelog("stats", log, NO_COLOR="").stdout
    assert piped == plain.replace("\r\n", "\n")
    assert json.loads(run_on_terminal("stats", log, "--json"))["policies"]


# --- Ctrl-C -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["key", "jcs"], ["submit", "--partition", "a", "-"]])
def test_interrupt_prints_no_traceback(command: list[str], tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        options = ["--url", server.url] if command[0] == "submit" else []
        given = '{"type":"x"}\n'
        with start_command(*command, *options) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(given)
            process.stdin.flush()
            assert process.stdout.readline()  # the command runs, and waits for more input
            process.send_signal(signal.SIGINT)
            status, _, errors = wait_for_exit(process)
    assert status == 130
    assert "Traceback" not in errors


def test_interrupt_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    # The module `orjson` of the test waits for a signal, as if its import were slow.
    (tmp_path / "orjson.py").write_text(
        "import os, sys\nos.write(1, b'importing\\n')\nsys.stdin.read()\n", encoding="utf-8"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(  # noqa: S603
        [PROGRAM, "--version"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


# --- empty input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (["submit", "--partition", "a"], "event"),
        (["submit", "--partition", "a", "-"], "event"),
        (["deltas", "push", "shop", "-"], "delta"),
        (["key", "jcs"], "JSON value"),
    ],
)
def test_empty_input_is_an_error(arguments: list[str], content: str) -> None:
    done = oncelog(*arguments, given="")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"contains no {content}" in done.stderr


def test_input_of_empty_lines_is_an_error() -> None:
    done = oncelog("submit", "--partition", "a", "-", given="\n\n")
    assert (done.returncode, done.stderr) == (2, "oncelog: the input contains no event; nothing was sent\n")
