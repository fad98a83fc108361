"""`oncelog key` prints one answer for each line of standard input."""

import json
import os
import re
import signal
import subprocess
import sys
from hashlib import sha256
from typing import Any

import pytest

from cli.processes import Command
from cli.runner import COMMAND, RUNNER
from cli.server_process import oncelog, start_command, wait_for_exit
from core import vectors
from oncelog.cli.line_input import LINE_BYTES_MAX

COMMANDS = ["jcs", "args", "fingerprint", "delta", "run"]


def answers(command: str, *lines: bytes | str, end: str = "\n") -> list[dict[str, Any]]:
    """Run a command with `lines` as standard input, and return its answers."""
    texts = [line if isinstance(line, str) else line.decode(errors="surrogateescape") for line in lines]
    done = oncelog("key", command, given="".join(text + end for text in texts))
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.rstrip("\n").split("\n")]
    assert len(found) == len(lines)
    return found


@pytest.mark.rule("CO-1")
def test_jcs_prints_the_canonical_form_and_its_hash() -> None:
    first, second = answers("jcs", '{"b": 1.0, "a": [-0, 1e0, "é"]}', '"x"')
    form = '{"a":[0,1,"é"],"b":1}'
    assert first == {"canonical": form, "sha256": sha256(form.encode()).hexdigest()}
    assert second["canonical"] == '"x"'


@pytest.mark.rule("RU-3", "RU-4")
def test_key_args_matches_the_vectors() -> None:
    loaded = vectors.load("run_args_canonical")
    for vector, answer in zip(loaded, answers("args", *(one["input_json"] for one in loaded)), strict=True):
        if vector.get("refused"):
            assert answer.keys() == {"error", "path"}, vector["name"]
        else:
            form = vector["canonical"]
            assert answer == {"canonical": form, "sha256": sha256(form.encode()).hexdigest()}, vector["name"]


@pytest.mark.rule("DE-2")
def test_key_delta_matches_the_vectors() -> None:
    loaded = vectors.load("delta_ids")
    found = answers("delta", *(json.dumps(one["input"]) for one in loaded))
    assert found == [{"deltaId": one["deltaId"]} for one in loaded]


@pytest.mark.rule("RU-1", "RU-2")
def test_key_run_matches_the_vectors() -> None:
    loaded = vectors.load("run_keys_v2")
    found = answers("run", *(json.dumps(one["input"]) for one in loaded))
    assert found == [{"key": one["key_hex"]} for one in loaded]


@pytest.mark.rule("EV-6")
def test_fingerprint_ignores_the_id_and_the_order_of_partitions() -> None:
    first, second, third = answers(
        "fingerprint",
        '{"partitions":["b","a","b"],"event":{"type":"x","n":1}}',
        '{"event":{"n":1.0,"type":"x"},"partitions":["a","b"],"id":"any"}',
        '{"partitions":["a"],"event":{"type":"x","n":1}}',
    )
    assert first == {"fingerprint": sha256(b'{"event":{"n":1,"type":"x"},"partitions":["a","b"]}').hexdigest()}
    assert second == first
    assert third != first


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("command", COMMANDS)
def test_refused_line_is_reported_and_the_next_one_is_read(command: str) -> None:
    bad: list[tuple[bytes | str, str]] = [
        ("", "$"),
        ("{", "$"),
        (b'"\xff"', "$"),
        (b"\x00", "$"),
        ("[" * 100_000, "$"),
        ('{"a":1,"a":2}', "$.a"),
        ('{"a":[{"b":NaN}]}', "$.a[0].b"),
        ("9" * 5000, "$"),
    ]
    good = {
        "jcs": "1",
        "args": "1",
        "fingerprint": '{"partitions":[],"event":1}',
        "delta": '{"clientId":"","hlc":"0","table":"","rowId":"","columns":[]}',
        "run": '{"campaign_id":1,"event_type":""}',
    }[command]
    *refused, last = answers(command, *(line for line, _ in bad), good)
    for (line, path), answer in zip(bad, refused, strict=True):
        assert answer.keys() == {"error", "path"}, line
        assert answer["path"] == path, line
        assert answer["error"]
    assert "error" not in last


@pytest.mark.rule("CO-30")
def test_line_above_the_size_limit_is_refused_and_the_next_one_is_read() -> None:
    fits = b'"' + b"x" * (LINE_BYTES_MAX - 2) + b'"'
    first, second, third, fourth = answers("jcs", fits, fits + b" ", fits * 3, b"4")
    assert first["sha256"] == sha256(fits).hexdigest()
    assert second == third == {"error": f"line longer than {LINE_BYTES_MAX} bytes", "path": "$"}
    assert fourth["canonical"] == "4"


def test_windows_line_ends_and_an_unterminated_last_line_are_accepted() -> None:
    assert [one["canonical"] for one in answers("jcs", "1", "2", end="\r\n")] == ["1", "2"]
    done = oncelog("key", "jcs", given="1\n2")
    assert [json.loads(line)["canonical"] for line in done.stdout.splitlines()] == ["1", "2"]


def test_each_line_is_answered_before_the_next_one_is_read() -> None:
    with start_command("key", "jcs") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["canonical"] == str(number)


def test_closed_output_pipe_ends_the_command_silently() -> None:
    with start_command("key", "jcs") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("1\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        process.stdin.write("2\n")
        status, _, errors = wait_for_exit(process)
    assert (status, errors) == (128 + signal.SIGPIPE, "")


def test_full_disk_is_reported() -> None:
    with open("/dev/full", "wb") as full, Command("key", "jcs", stdout=full) as process:  # noqa: PTH123
        _, errors = process.communicate("1\n")
    assert (process.returncode, errors) == (74, "oncelog: cannot continue: No space left on device\n")


@pytest.mark.parametrize(("closed", "name"), [("<&-", "input"), (">&-", "output")])
def test_closed_standard_stream_is_reported(closed: str, name: str) -> None:
    command = f"'{sys.executable}' -m oncelog key jcs {closed}"
    process = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False)  # noqa: S603, S607
    assert process.returncode == 74
    assert process.stderr.decode() == f"oncelog: standard {name} must be open\n"


def test_non_blocking_pipe_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with Command("key", "jcs", stdin=reader) as process:
        os.close(reader)
        assert process.stdout is not None
        os.write(writer, b"1\n")
        assert json.loads(process.stdout.readline())["canonical"] == "1"
        os.write(writer, b"2\n")
        os.close(writer)
        output, _ = process.communicate()
    assert json.loads(output)["canonical"] == "2"


@pytest.mark.parametrize("command", COMMANDS)
def test_example_in_the_help_works(command: str) -> None:
    shown = RUNNER.invoke(COMMAND, ["key", command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0
    example = re.search(r"Example:\s+echo '(.*)' \| oncelog key (\w+)", shown.stdout)
    assert example is not None
    assert example[2] == command
    (answer,) = answers(command, example[1])
    assert "error" not in answer
