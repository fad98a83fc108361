"""`oncelog tail` with running servers: existing events, new events, and server restarts."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from msgspec import Raw

from cli.load_programs import BY_TICKS
from cli.server_process import NO_TOKEN, ServerProcess, oncelog, serving, start_command, wait_for_exit
from databases import BOTH_STORES
from deadlines import wait_until
from oncelog.cli.tail import PAGE_EVENTS, _format_line
from oncelog.testing.clock import ManualClock
from server.auth.auth_material import NOW_MS, token
from server.running_server import item
from server.running_server import serving as running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("tail")) as served:
        yield served


def submit(url: str, partition: str, *numbers: int) -> list[int]:
    """Submit numbered events and return their committed ids."""
    given = "".join(f'{{"type":"n","n":{number}}}\n' for number in numbers)
    done = oncelog("submit", "--url", url, "--partition", partition, "-", given=given)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line.split()[1]) for line in done.stdout.splitlines()]


def numbers_of(lines: str | list[str]) -> list[int]:
    texts = lines.splitlines() if isinstance(lines, str) else lines
    return [json.loads(line)["event"]["n"] for line in texts]


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics") as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_tail_prints_all_pages_after_since_in_order(server: ServerProcess) -> None:
    numbers = list(range(2 * PAGE_EVENTS + 10))
    committed = submit(server.url, "pages", *numbers)
    command = ["tail", "--url", server.url, "--partition", "pages"]
    done = oncelog(*command, "--limit", str(len(numbers)))
    assert (done.returncode, done.stderr) == (0, "")
    assert numbers_of(done.stdout) == numbers
    done = oncelog(*command, "--since", str(committed[PAGE_EVENTS]), "--limit", "3")
    assert numbers_of(done.stdout) == numbers[PAGE_EVENTS + 1 : PAGE_EVENTS + 4]


def test_tail_prints_events_of_several_partitions_unchanged(server: ServerProcess) -> None:
    [first], [second] = submit(server.url, "p1", 1), submit(server.url, "p2", 2)
    done = oncelog("tail", "--url", server.url, "--partition", "p1", "--partition", "p2", "--limit", "2")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["committed_id"] for one in events] == [first, second]
    assert events[0].keys() == {"id", "client_id", "actor", "partitions", "committed_id", "event", "status_updated_at"}


def test_tail_follows_new_events(server: ServerProcess) -> None:
    submit(server.url, "live", 1)
    with start_command("tail", "--url", server.url, "--partition", "live", "--limit", "4") as process:
        assert process.stdout is not None
        assert numbers_of([process.stdout.readline()]) == [1]
        for number in (2, 3, 4):
            submit(server.url, "live", number)
            assert numbers_of([process.stdout.readline()]) == [number]
        assert wait_for_exit(process) == (0, "", "")


def test_tail_since_now_skips_existing_events(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "now", 1, 2)
        with start_command(
            "tail", "--url", served.url, "--partition", "now", "--since", "now", "--limit", "1"
        ) as process:
            wait_until(lambda: metric(served.url, "oncelog_frames_received_total") >= 2)  # its `connect` and its `sync`
            submit(served.url, "now", 3)
            status, output, errors = wait_for_exit(process)
    assert (status, numbers_of(output), errors) == (0, [3], "")


@BOTH_STORES
def test_tail_reconnects_to_a_killed_server_without_gaps(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1, 2)
        with start_command("tail", "--url", served.url, "--partition", "a", "--limit", "8") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert numbers_of([process.stdout.readline(), process.stdout.readline()]) == [1, 2]
            for number in (3, 6):
                served.kill()
                assert process.stderr.readline().endswith("; retrying\n")
                served.start()
                submit(served.url, "a", number, number + 1, number + 2)
                shown = numbers_of([process.stdout.readline() for _ in range(3)])
                assert shown == [number, number + 1, number + 2]
                assert f"reconnected; continuing after {number - 1}" in process.stderr.readline()
            assert wait_for_exit(process) == (0, "", "")


def test_slow_tail_misses_no_event(tmp_path: Path) -> None:
    limits = ["--set", "limits.outbox_bytes_max=100000", "--set", "limits.outbox_frames_max=100"]
    with serving(tmp_path, "--development", "--quiet", *limits) as served:
        with start_command("tail", "--url", served.url, "--partition", "load/0") as process:
            assert process.stdout is not None
            options = ["--seconds", "6", "--partitions", "1", "--connections", "4", "--size", "4000", "--json"]
            done = oncelog("load", "--url", served.url, *options, program=BY_TICKS)  # The output of `tail` is not read.
            assert done.returncode == 0, done.stderr
            count = json.loads(done.stdout)["events"]
            shown = [json.loads(process.stdout.readline())["committed_id"] for _ in range(count)]
        assert shown == list(range(1, count + 1))


def test_tail_reconnects_to_a_stopped_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1)
        with start_command("tail", "--url", served.url, "--partition", "a", "--limit", "2") as process:
            assert process.stdout is not None
            assert numbers_of([process.stdout.readline()]) == [1]
            assert served.stop() == 0
            served.start()
            submit(served.url, "a", 2)
            status, output, _ = wait_for_exit(process)
    assert (status, numbers_of(output)) == (0, [2])


def test_tail_ends_with_an_error_when_the_epoch_changes(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1)
        with start_command("tail", "--url", served.url, "--partition", "a") as process:
            assert process.stdout is not None
            assert numbers_of([process.stdout.readline()]) == [1]
            backup = str(tmp_path / "backup.db")
            assert oncelog("backup", served.store, backup).returncode == 0
            served.kill()
            restored = oncelog("restore", "--force", backup, served.store)
            assert restored.returncode == 0
            epochs = re.findall(r"^(?:old|new) epoch: (\w+)$", restored.stdout, re.MULTILINE)
            assert len(epochs) == 2
            served.start()
            status, output, errors = wait_for_exit(process)
        assert (status, output) == (2, "")
        last = errors.splitlines()[-1]
        assert "the log's history has changed" in last
        assert all(epoch in last for epoch in epochs)
        command = ["tail", "--url", served.url, "--partition", "a", "--limit", "1", "--epoch"]
        assert oncelog(*command, epochs[1]).returncode == 0
        done = oncelog(*command, epochs[0])
        assert (done.returncode, done.stdout) == (2, "")


def test_tail_since_beyond_the_log_is_refused(server: ServerProcess) -> None:
    done = oncelog("tail", "--url", server.url, "--partition", "a", "--since", "9000000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("oncelog: the cursor 9000000 belongs to a different history: history_changed: ")


def test_tail_ends_when_its_output_pipe_is_closed(server: ServerProcess) -> None:
    submit(server.url, "head", 1, 2)
    with start_command("tail", "--url", server.url, "--partition", "head") as process:
        assert process.stdout is not None
        assert numbers_of([process.stdout.readline()]) == [1]
        process.stdout.close()
        process.stdout = None
        assert wait_for_exit(process)[0] == 141


def test_interrupted_tail_exits_with_130(server: ServerProcess) -> None:
    submit(server.url, "interrupted", 1)
    with start_command("tail", "--url", server.url, "--partition", "interrupted") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert wait_for_exit(process) == (130, "", "")


def test_unauthorized_tail_is_refused(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    key = oncelog("apikey", "create", keys, "--client-id", "c", "--name", "n", "--read", "a").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        command = ["tail", "--url", served.url, "--partition"]
        done = oncelog(*command, "b", "--client-id", "c", ONCELOG_TOKEN=key)
        assert (done.returncode, done.stdout) == (2, "")
        hint = "the credential has no read access to some of them; its grants must include them"
        refused = f"oncelog: forbidden: partitions: {hint}\n"
        assert done.stderr == refused
        done = oncelog(*command, "a", "--client-id", "c", ONCELOG_TOKEN="wrong")  # noqa: S106
        assert (done.returncode, done.stdout) == (2, "")
        hint = "the token is invalid, or belongs to a client other than 'c' (--client-id)"
        assert done.stderr == f"oncelog: auth_failed: {hint}\n"
        done = oncelog(*command, "b", ONCELOG_TOKEN=key)  # the key's client
        assert (done.returncode, done.stderr) == (2, refused)
        done = oncelog(*command, "a")
        assert (done.returncode, done.stderr) == (2, f"oncelog: auth_failed: {NO_TOKEN}\n")
        done = oncelog("stats", "--url", served.url)
        assert (done.returncode, done.stderr) == (2, f"oncelog: auth_failed: {NO_TOKEN}\n")
        done = oncelog("audit", "--url", served.url, ONCELOG_TOKEN="wrong")  # noqa: S106
        hint = "the token is invalid: check it; the server's log says why"
        assert (done.returncode, done.stderr) == (2, f"oncelog: auth_failed: {hint}\n")


async def test_token_that_expires_during_tail_is_reported_as_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.server.app.RENEW_S", 0.01)
    expires_s = NOW_MS // 1000 + 60
    credential = token("HS256", sub="ada", client_id="ada", exp=expires_s, grants={"read": ["a"], "write": ["a"]})
    async with running(tmp_path, tokens=True) as served:
        served.credential = credential
        await served.commit(item(1))
        assert isinstance(served.clock, ManualClock)
        command = ["tail", "--url", served.url, "--partition", "a", "--client-id", "ada", "--token", credential]
        with start_command(*command) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) != ""
            served.clock.advance(3_600_000)
            done = await asyncio.to_thread(wait_for_exit, process)
    assert done == (2, "", "oncelog: auth_failed: the token has expired, or its rights have changed\n")


def test_tail_waits_for_a_server_that_has_not_started(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1)
        served.kill()
        with start_command("tail", "--url", served.url, "--partition", "a", "--limit", "1") as process:
            assert process.stderr is not None
            problem = f"{served.url} cannot be reached: Connection refused (is the server running at this URL?)"
            assert process.stderr.readline() == f"oncelog: {problem}; retrying\n"
            served.start()
            status, output, errors = wait_for_exit(process)
    assert (status, numbers_of(output), errors) == (0, [1], "oncelog: connected\n")


def test_tail_of_an_unknown_host_is_refused() -> None:
    done = oncelog("tail", "--url", "http://oncelog.invalid", "--partition", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be reached" in done.stderr
    assert done.stderr.endswith("(check the host name)\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--partition must be given at least once"),
        (["--partition", "a", "--since", "-1"], "--since must be a committed_id or 'now', not '-1'"),
        (["--partition", "a", "--since", "then"], "--since must be a committed_id or 'now', not 'then'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], sentence: str) -> None:
    done = oncelog("tail", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oncelog: {sentence}\n")


def format_pretty(event: str, partitions: str = '["orders","ä"]', time_ms: int = 43_391_000) -> str:
    text = f'{{"committed_id":17,"partitions":{partitions},"event":{event},"status_updated_at":{time_ms},"id":"x"}}'
    return _format_line(Raw(text.encode())).decode()


def test_pretty_line_shows_time_partitions_type_and_members() -> None:
    assert format_pretty('{"type":"order.placed","n":1.0,"a b":[null]}') == (
        '17  12:03:11  -  orders,ä  order.placed  {"n":1.0,"a b":[null]}\n'
    )
    assert format_pretty('{"type":"x"}') == "17  12:03:11  -  orders,ä  x  {}\n"
    assert format_pretty("null") == "17  12:03:11  -  orders,ä  (erased)\n"
    assert format_pretty("null", time_ms=2**53) == "17  --:--:--  -  orders,ä  (erased)\n"


def test_pretty_line_escapes_control_characters() -> None:
    line = format_pretty('{"type":"\\u001b[2J","a":"\u202e\x9b\\n"}', '["\\u001b]0;"]')
    assert line == '17  12:03:11  -  \\u001b]0;  \\u001b[2J  {"a":"\\u202e\\u009b\\n"}\n'
