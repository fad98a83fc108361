"""`oncelog audit` prints the acts recorded in files, in databases and by servers, as a table or as JSON lines."""

import json
import os
import pwd
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import oncelog
from cli.runner import COMMAND, RUNNER
from cli.scripted_server import answer, scripted
from cli.server_process import DEVELOPMENT, serving, start_command
from databases import address_of
from deadlines import wait_until
from oncelog.core.values import RecordAct
from oncelog.storage.inspect.factory import create_inspector

pytestmark = pytest.mark.rule("CO-43")


@pytest.fixture(params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "log.db") if request.param == "file" else address_of(tmp_path)


def fill(log: str, *targets: str) -> None:
    with oncelog.open_blocking(log) as opened:
        opened.submit(oncelog.event("0192e4a0-0000-7000-8000-000000000001", {"type": "x"}, ["p"]))
        for number, target in enumerate(targets):
            stream = f"s/{number}" if number else ""
            opened.submit(
                RecordAct(act="erase", actor=f"user:{number}", target=target, scope=stream, time_ms=number + 1)
            )


def run(*arguments: str) -> str:
    done = RUNNER.invoke(COMMAND, ["audit", *arguments])
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return done.stdout


def targets(*arguments: str) -> list[str]:
    return [json.loads(line)["target"] for line in run(*arguments, "--json").splitlines()]


def test_acts_of_all_lanes_are_printed(log: str) -> None:
    fill(log, "a", "b\x1b[2J", "c")
    lines = run(log).splitlines()
    assert lines[0].split() == ["1970-01-01", "00:00:00.001", "UTC", "user:0", "erase", "-", "a"]
    assert "\\u001b[2J" in lines[1]
    assert "\x1b" not in "".join(lines)
    assert len(lines) == 3


def test_empty_trail_is_reported_to_people(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    fill(log)
    for options, message in (
        ([], "oncelog: the log has no audit records\n"),
        (["--act", "erase"], "oncelog: no act was found\n"),
        (["--json"], ""),
    ):
        done = RUNNER.invoke(COMMAND, ["audit", log, *options])
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", message)


def test_acts_are_filtered(log: str) -> None:
    fill(log, "a", "b", "c")
    assert targets(log, "--actor", "user:1") == ["b"]
    assert targets(log, "--stream", "s/2") == ["c"]
    assert targets(log, "--target", "a", "--act", "erase") == ["a"]
    assert targets(log, "--since", "1970-01-01T00:00:00.002") == ["b", "c"]
    assert targets(log, "--until", "1970-01-01T00:00:00.002+00:00") == ["a"]
    assert targets(log, "--since", "24h") == []


def test_restores_are_recorded_as_acts(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    fill(log, "a")
    create_inspector(log).renew_epoch(1_000_000)
    acts = [json.loads(line) for line in run(log, "--act", "restore", "--json").splitlines()]
    assert len(acts) == 17
    assert {one["actor"] for one in acts} == {"system:restore"}, "a library call has no operator"


def test_new_epoch_records_the_command_line_as_its_actor(log: str) -> None:
    fill(log, "a")
    assert RUNNER.invoke(COMMAND, ["epoch", log, "--renew", "--above", "1000000"]).exit_code == 0
    acts = [json.loads(line) for line in run(log, "--actor", "system:cli", "--json").splitlines()]
    assert [one["act"] for one in acts] == ["restore"] * 17
    assert acts[0]["details"].keys() == {"above", "epoch", "previous_epoch", "os_user"}
    assert {one["details"]["os_user"] for one in acts} == {pwd.getpwuid(os.getuid()).pw_name}
    assert RUNNER.invoke(COMMAND, ["verify", log]).exit_code == 0


def test_restored_backup_records_the_command_line_as_its_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, backup, restored = (str(tmp_path / name) for name in ("log.db", "backup.db", "restored.db"))
    fill(log, "a")
    assert RUNNER.invoke(COMMAND, ["backup", log, backup]).exit_code == 0
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # a user without a name
    assert RUNNER.invoke(COMMAND, ["restore", backup, restored]).exit_code == 0
    acts = [json.loads(line) for line in run(restored, "--act", "restore", "--json").splitlines()]
    assert {(one["actor"], one["details"]["os_user"]) for one in acts} == {("system:cli", "4000000000")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a LOG, or a server"),
        (["log.db", "--url", "http://127.0.0.1:1"], "--url is for a server and cannot be combined with LOG"),
        (["log.db", "--since", "yesterday"], "--since must be a time"),
        (["missing.db"], "missing.db"),
        (["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_invalid_audit_arguments_are_explained(arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(COMMAND, ["audit", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_follow_prints_new_acts(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    fill(log, "a")
    with start_command("audit", log, "--follow", "--json") as command:
        assert command.stdout is not None
        assert json.loads(command.stdout.readline())["target"] == "a"
        with oncelog.open_blocking(log) as opened:
            opened.submit(RecordAct(act="erase", actor="user:later", target="later"))
        assert json.loads(command.stdout.readline())["target"] == "later"
        command.kill()


def test_acts_are_read_from_a_server(tmp_path: Path) -> None:
    with serving(tmp_path, *DEVELOPMENT, "--read-only") as server:
        wait_until(lambda: "read_only_on" in run("--url", server.url))
        (line,) = run("--url", server.url, "--json").splitlines()
        assert json.loads(line)["actor"] == "system:server"


def test_busy_server_is_retried_only_with_follow() -> None:
    refusals = ("server_busy", "forbidden")

    def refuse(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer(handler, 503, {"error": {"code": refusals[number - 1], "message": "no", "details": {}}})

    for options, count in ([], 1), (["--follow"], 2):
        with scripted(refuse) as (url, received):
            found = RUNNER.invoke(COMMAND, ["audit", "--url", url, *options])
        assert (found.exit_code, len(received)) == (2, count)
        assert refusals[count - 1] in found.stderr


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_server_that_repeats_a_page_of_acts_is_not_asked_again(options: list[str]) -> None:
    page = {"acts": [], "cursor": "same", "has_more": True}
    with scripted(lambda handler, number: answer(handler, 200 if number <= 3 else 404, page)) as (url, received):
        found = RUNNER.invoke(COMMAND, ["audit", "--url", url, *options])
        assert (found.exit_code, len(received)) == (2, 2)
    assert found.stderr == "oncelog: the server repeats a page of the list at /v1/audit\n"
