"""`oncelog serve`: the commands that it prints, invalid settings, and its exit status."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import curl
from cli.processes import Command
from cli.server_process import ENVIRONMENT, oncelog, wait_for_exit
from deadlines import WAIT_S
from oncelog.cli import serve
from oncelog.cli.server_options import CLIENT_VARIABLES

PROGRAM = Path(sys.executable).parent / "oncelog"


@contextmanager
def running_script(cwd: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a server with the installed script."""
    process = subprocess.Popen(  # noqa: S603
        [PROGRAM, "serve", "--port", "0", "--store", "log.db", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_server(cwd: Path, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a server through the fork server."""
    command = ["serve", "--port", "0", "--store", "log.db", *arguments]
    process = Command(*command, environment={**ENVIRONMENT, **environment}, cwd=cwd)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


CHAT = ("chat", "send", "messages")


def printed_commands(process: "subprocess.Popen[str]") -> dict[str, str]:
    """Return the commands that the server prints, by purpose."""
    assert process.stdout is not None
    names = iter(["post", "page", "stream", "write", "entity", "push", "rows", *CHAT, "tail", "submit", "load"])
    found = {}
    for line in process.stdout:
        if re.match(r"  [^ #]", line):
            found[next(names)] = line.strip()
        if "load" in found:
            return found
    raise AssertionError(found)


def run_in_shell(line: str, cwd: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(  # noqa: S603
        ["/bin/bash", "-c", line], capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until_listening(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "listening" in line:
            return line
    raise AssertionError


@pytest.mark.parametrize("kind", curl.kinds())
def test_commands_printed_in_development_mode_work(tmp_path: Path, kind: str) -> None:
    environment = curl.environment_with(kind, ENVIRONMENT, tmp_path)
    with running_script(tmp_path, "--development") as process:
        lines = printed_commands(process)
        assert [line.split()[0] for line in lines.values()] == [
            *["curl"] * 5,
            *["echo", "curl"],
            *["curl"] * 3,
            *[str(PROGRAM)] * 3,
        ]
        first = json.loads(run_in_shell(lines["post"], tmp_path, environment))["results"][0]
        assert (first["status"], first["committed_id"]) == ("committed", 1)
        assert json.loads(run_in_shell(lines["post"], tmp_path, environment))["results"] == [first]
        page = json.loads(run_in_shell(lines["page"], tmp_path, environment))
        assert [one["id"] for one in page["events"]] == [first["id"]]
        assert re.fullmatch(r"committed 2 [0-9a-f-]{36}\n", run_in_shell(lines["submit"], tmp_path, environment))
        shown = run_in_shell(f"{lines['tail']} --limit 2 --pretty", tmp_path, environment)
        assert re.fullmatch(
            r'1  [\d:]{8}  user:developer  orders  order\.placed  {"order":17}\n'
            r'2  [\d:]{8}  user:developer  orders  order\.placed  {"order":18}\n',
            shown,
        )
        written = json.loads(run_in_shell(lines["write"], tmp_path, environment))
        assert written == json.loads(run_in_shell(lines["write"], tmp_path, environment))
        entity = json.loads(run_in_shell(lines["entity"], tmp_path, environment))["entity"]
        assert entity["version"] == written["version"] == 1
        assert re.fullmatch(r"committed 1 [0-9a-f]{64}\n", run_in_shell(lines["push"], tmp_path, environment))
        (row,) = json.loads(run_in_shell(lines["rows"], tmp_path, environment))["rows"]
        assert (row["rowId"], row["columns"]) == ("tea", {"price": 3.5})
        assert json.loads(run_in_shell(lines["chat"], tmp_path, environment))["chat_id"] == "general"
        sent = [json.loads(run_in_shell(lines["send"], tmp_path, environment)) for _ in range(2)]
        assert [(one["sequence"], one["duplicate"]) for one in sent] == [(1, False), (1, True)]
        (message,) = json.loads(run_in_shell(lines["messages"], tmp_path, environment))["messages"]
        assert (message["sender_id"], message["content"]) == ("user:ann", "Hello, Bob!")
        assert stream_events(lines["stream"], 2, environment) == [1, 2]
        for seconds in ("0.5", "5", "60"):  # a slow machine needs longer to connect
            command = f"{lines['load']} --seconds {seconds} --connections 2 --json"
            if events := json.loads(run_in_shell(command, tmp_path, environment))["events"]:
                break
        assert events > 0
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process)[0] == 0


def stream_events(line: str, count: int, environment: Mapping[str, str]) -> list[int]:
    """Return the numbers of the first `count` events of an endless stream."""
    found: list[int] = []
    command = ["/bin/bash", "-c", f"exec {line}"]
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("data: ") and "committed_id" in (event := json.loads(text[6:])):
                found.append(event["committed_id"])
            if len(found) == count:
                process.kill()
                break
    return found


def test_quiet_server_prints_no_commands(tmp_path: Path) -> None:
    with running_server(tmp_path, "--development", "--quiet") as process:
        wait_until_listening(process)
        process.send_signal(signal.SIGTERM)
        status, output, errors = wait_for_exit(process)
        assert (status, output) == (0, "")
        assert "stopped" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_in_production_prints_only_its_log(tmp_path: Path, number: signal.Signals) -> None:
    created = oncelog("apikey", "create", str(tmp_path / "keys.json"), "--client-id", "c", "--name", "n")
    assert created.returncode == 0
    with running_server(tmp_path, "--set", "api_keys.file=keys.json") as process:
        assert re.search(
            r"INFO oncelog.doors listening urls=http://127.0.0.1:\d+ store=log.db grpc=127.0.0.1:\d+$",
            wait_until_listening(process),
        )
        process.send_signal(number)
        assert wait_for_exit(process)[:2] == (0, "")


def test_server_runs_even_if_its_output_is_not_read(tmp_path: Path) -> None:
    with running_server(tmp_path, "--development") as process:
        assert process.stdout is not None
        process.stdout.close()
        line = wait_until_listening(process)
        url = re.findall(r"urls=(\S+)", line)[0]
        done = oncelog("submit", "--url", url, "--partition", "a", '{"type":"x"}')
        assert (done.returncode, done.stderr) == (0, "")
        process.stdout = None
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process)[0] == 0


def test_server_ignores_the_variables_of_other_commands(tmp_path: Path) -> None:
    variables = dict.fromkeys(CLIENT_VARIABLES, "a secret")
    with running_server(tmp_path, "--development", **variables) as process:
        wait_until_listening(process)
        process.send_signal(signal.SIGTERM)
        status, output, errors = wait_for_exit(process)
        assert status == 0
        assert "a secret" not in output + errors


WRONG: list[tuple[list[str], str]] = [
    ([], "no caller could authenticate: configure tokens"),
    (["--development", "--port", "70000"], "port must be a whole number from 0 to 65535, not 70000"),
    (["--development", "--host", "0.0.0.0"], "host must be a loopback address"),  # noqa: S104
    (["--development", "--set", "limits.frame_bytes"], "--set limits.frame_bytes: must be NAME=VALUE"),
    (["--development", "--set", "no.such=1"], "no.such"),
    (["--development", "--set", "validate=no_such_module:check"], "no_such_module:check cannot be imported"),
    (["--development", "--config", "nowhere.toml"], "nowhere.toml"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=lambda one: " ".join(one) if isinstance(one, list) else ""
)
def test_invalid_settings_are_reported_in_one_line(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = oncelog("serve", "--store", str(tmp_path / "log.db"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("oncelog: ")
    assert not (tmp_path / "log.db").exists()


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = oncelog("serve", "--development", "--store", str(tmp_path / "log.db"), "--port", str(port))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"oncelog: cannot listen on 127.0.0.1:{port}: " in done.stderr
        assert "stop the program that uses it, or set another port" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["metrics_port", "grpc_port"])
def test_other_port_in_use_is_reported_before_the_log_is_created(setting: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = ("--development", "--store", str(tmp_path / "log.db"))
        done = oncelog("serve", *store, "--port", "0", "--set", f"{setting}={port}")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"or set another {setting}" in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        (str(PROGRAM), str(PROGRAM)),
        ("a program that is not there", "oncelog"),
        ("/somewhere/oncelog/__main__.py", f"{sys.executable} -m oncelog"),
    ],
)
def test_printed_commands_use_the_name_under_which_the_program_was_called(
    called: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "serve"])
    printed: Any = serve._format_examples("http://127.0.0.1:7171", "log.db")
    assert f"  {shown} tail --partition orders\n" in printed  # the default URL is omitted
    assert "open it in two windows: http://127.0.0.1:7171/chat\n" in printed
    assert f"  {shown} load --url http://[::1]:80\n" in serve._format_examples("http://[::1]:80", "log.db")
