"""`oncelog key` as a program uses it: lines in, lines out, over real pipes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from core import vectors
from oncelog.cli.key import LINE_BYTES_MAX

COMMANDS = ["jcs", "args", "fingerprint", "delta", "run"]


def start(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "oncelog", "key", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answers(command: str, *lines: bytes | str, end: bytes = b"\n") -> list[dict[str, Any]]:
    given = end.join(line.encode() if isinstance(line, str) else line for line in lines) + end
    process = start(command)
    output, errors = process.communicate(given)
    assert process.returncode == 0
    assert errors == b""
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) == len(lines)
    return found


@pytest.mark.rule("CO-1")
def test_jcs() -> None:
    first, second = answers("jcs", '{"b": 1.0, "a": [-0, 1e0, "é"]}', '"x"')
    form = '{"a":[0,1,"é"],"b":1}'
    assert first == {"canonical": form, "sha256": sha256(form.encode()).hexdigest()}
    assert second["canonical"] == '"x"'


@pytest.mark.rule("RU-3", "RU-4")
def test_args_passes_the_vectors() -> None:
    loaded = vectors.load("run_args_canonical")
    for vector, answer in zip(loaded, answers("args", *(one["input_json"] for one in loaded)), strict=True):
        if vector.get("refused"):
            assert answer.keys() == {"error", "path"}, vector["name"]
        else:
            form = vector["canonical"]
            assert answer == {"canonical": form, "sha256": sha256(form.encode()).hexdigest()}, vector["name"]


@pytest.mark.rule("DE-2")
def test_delta_passes_the_vectors() -> None:
    loaded = vectors.load("delta_ids")
    found = answers("delta", *(json.dumps(one["input"]) for one in loaded))
    assert found == [{"deltaId": one["deltaId"]} for one in loaded]


@pytest.mark.rule("RU-1", "RU-2")
def test_run_passes_the_vectors() -> None:
    loaded = vectors.load("run_keys_v2")
    found = answers("run", *(json.dumps(one["input"]) for one in loaded))
    assert found == [{"key": one["key_hex"]} for one in loaded]


@pytest.mark.rule("EV-6")
def test_fingerprint() -> None:
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
def test_a_refused_line_says_why_and_the_next_one_is_read(command: str) -> None:
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
def test_a_line_beyond_the_limit_is_refused_without_losing_the_next() -> None:
    fits = b'"' + b"x" * (LINE_BYTES_MAX - 2) + b'"'
    first, second, third, fourth = answers("jcs", fits, fits + b" ", fits * 3, b"4")
    assert first["sha256"] == sha256(fits).hexdigest()
    assert second == third == {"error": f"line longer than {LINE_BYTES_MAX} bytes", "path": "$"}
    assert fourth["canonical"] == "4"


def test_windows_line_ends_and_a_last_line_without_one() -> None:
    assert [one["canonical"] for one in answers("jcs", "1", "2", end=b"\r\n")] == ["1", "2"]
    process = start("jcs")
    output, _ = process.communicate(b"1\n2")
    assert [json.loads(line)["canonical"] for line in output.splitlines()] == ["1", "2"]


@pytest.fixture
def conversation() -> Iterator[subprocess.Popen[bytes]]:
    process = start("jcs")
    yield process
    process.kill()
    process.communicate()


def test_each_line_is_answered_before_the_next_is_read(conversation: subprocess.Popen[bytes]) -> None:
    assert conversation.stdin is not None
    assert conversation.stdout is not None
    for number in range(3):
        conversation.stdin.write(b"%d\n" % number)
        conversation.stdin.flush()
        assert json.loads(conversation.stdout.readline())["canonical"] == str(number)


def test_a_reader_that_has_enough_ends_it_without_a_word(conversation: subprocess.Popen[bytes]) -> None:
    assert conversation.stdin is not None
    assert conversation.stdout is not None
    conversation.stdin.write(b"1\n")
    conversation.stdin.flush()
    conversation.stdout.readline()
    conversation.stdout.close()
    conversation.stdin.write(b"2\n")
    conversation.stdin.close()
    assert conversation.wait() == 128 + signal.SIGPIPE
    assert conversation.stderr is not None
    assert conversation.stderr.read() == b""
    conversation.stdin = conversation.stdout = None


def test_a_full_disk_is_a_clear_error() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        process = subprocess.run(
            [sys.executable, "-m", "oncelog", "key", "jcs"],
            input=b"1\n",
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert process.returncode == 74
    assert process.stderr.decode() == "oncelog: cannot go on: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_is_a_clear_error(closed: str) -> None:
    command = f"'{sys.executable}' -m oncelog key jcs {closed}"
    process = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False)  # noqa: S603, S607
    assert process.returncode == 74
    assert process.stderr.decode() == "oncelog: standard input and standard output must be open\n"


def test_a_pipe_that_does_not_wait_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    process = subprocess.Popen([sys.executable, "-m", "oncelog", "key", "jcs"], stdin=reader, stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.write(writer, b"1\n")
    assert json.loads(process.stdout.readline())["canonical"] == "1"
    os.write(writer, b"2\n")
    os.close(writer)
    output, _ = process.communicate()
    assert json.loads(output)["canonical"] == "2"
    os.close(reader)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_works_when_pasted(command: str) -> None:
    shown = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "oncelog", "key", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "TERM": "dumb"},
    )
    example = re.search(r"Example:\s+echo '(.*)' \| oncelog key (\w+)", shown.stdout)
    assert example is not None
    assert example[2] == command
    (answer,) = answers(command, example[1])
    assert "error" not in answer
