"""`oncelog tail` against real servers: all that is there, then what comes, across servers that die."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from msgspec import Raw

from cli.served import Served, ended, oncelog, serving, started
from databases import BOTH_STORES
from oncelog.cli.tail import PAGE_EVENTS, _pretty_line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("tail")) as served:
        yield served


def submit(url: str, partition: str, *numbers: int) -> list[int]:
    """The committed ids."""
    given = "".join(f'{{"type":"n","n":{number}}}\n' for number in numbers)
    done = oncelog("submit", "--url", url, "--partition", partition, "-", given=given)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(line.split()[1]) for line in done.stdout.splitlines()]


def counted(lines: str | list[str]) -> list[int]:
    texts = lines.splitlines() if isinstance(lines, str) else lines
    return [json.loads(line)["event"]["n"] for line in texts]


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics") as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_all_pages_in_order_and_only_after_since(server: Served) -> None:
    numbers = list(range(2 * PAGE_EVENTS + 10))
    committed = submit(server.url, "pages", *numbers)
    command = ["tail", "--url", server.url, "--partition", "pages"]
    done = oncelog(*command, "--limit", str(len(numbers)))
    assert (done.returncode, done.stderr) == (0, "")
    assert counted(done.stdout) == numbers
    done = oncelog(*command, "--since", str(committed[PAGE_EVENTS]), "--limit", "3")
    assert counted(done.stdout) == numbers[PAGE_EVENTS + 1 : PAGE_EVENTS + 4]


def test_several_partitions_and_events_as_they_are_on_the_wire(server: Served) -> None:
    [first], [second] = submit(server.url, "p1", 1), submit(server.url, "p2", 2)
    done = oncelog("tail", "--url", server.url, "--partition", "p1", "--partition", "p2", "--limit", "2")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["committed_id"] for one in events] == [first, second]
    assert events[0].keys() == {"id", "client_id", "partitions", "committed_id", "event", "status_updated_at"}


def test_it_goes_on_with_what_comes(server: Served) -> None:
    submit(server.url, "live", 1)
    with started("tail", "--url", server.url, "--partition", "live", "--limit", "4") as process:
        assert process.stdout is not None
        assert counted([process.stdout.readline()]) == [1]
        for number in (2, 3, 4):
            submit(server.url, "live", number)
            assert counted([process.stdout.readline()]) == [number]
        assert ended(process) == (0, "", "")


def test_since_now_shows_nothing_that_was_there(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "now", 1, 2)
        with started("tail", "--url", served.url, "--partition", "now", "--since", "now", "--limit", "1") as process:
            while metric(served.url, "oncelog_frames_received_total") < 2:  # its connect and its sync
                pass
            submit(served.url, "now", 3)
            status, said, errors = ended(process)
    assert (status, counted(said), errors) == (0, [3], "")


@BOTH_STORES
def test_it_comes_back_to_a_server_that_was_killed_and_misses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1, 2)
        with started("tail", "--url", served.url, "--partition", "a", "--limit", "8") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert counted([process.stdout.readline(), process.stdout.readline()]) == [1, 2]
            for number in (3, 6):
                served.kill()
                assert process.stderr.readline().endswith("; trying again\n")
                served.start()
                submit(served.url, "a", number, number + 1, number + 2)
                shown = counted([process.stdout.readline() for _ in range(3)])
                assert shown == [number, number + 1, number + 2]
                assert f"connected again, and going on after {number - 1}" in process.stderr.readline()
            assert ended(process) == (0, "", "")


def test_a_reader_that_is_too_slow_for_the_server_misses_nothing(tmp_path: Path) -> None:
    limits = ["--set", "limits.outbox_bytes_max=100000", "--set", "limits.outbox_frames_max=100"]
    with serving(tmp_path, "--development", "--quiet", *limits) as served:
        with started("tail", "--url", served.url, "--partition", "load/0") as process:
            assert process.stdout is not None
            options = ["--seconds", "2", "--partitions", "1", "--connections", "4", "--size", "4000", "--json"]
            done = oncelog("load", "--url", served.url, *options)  # and nobody reads what `tail` prints meanwhile
            assert done.returncode == 0, done.stderr
            count = json.loads(done.stdout)["events"]
            shown = [json.loads(process.stdout.readline())["committed_id"] for _ in range(count)]
        assert shown == list(range(1, count + 1))


def test_a_server_that_is_stopped_in_order_is_waited_for_too(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1)
        with started("tail", "--url", served.url, "--partition", "a", "--limit", "2") as process:
            assert process.stdout is not None
            assert counted([process.stdout.readline()]) == [1]
            assert served.stop() == 0
            served.start()
            submit(served.url, "a", 2)
            status, said, _ = ended(process)
    assert (status, counted(said)) == (0, [2])


def test_another_history_ends_it_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        submit(served.url, "a", 1)
        with started("tail", "--url", served.url, "--partition", "a") as process:
            assert process.stdout is not None
            assert counted([process.stdout.readline()]) == [1]
            backup = str(tmp_path / "backup.db")
            assert oncelog("backup", served.store, backup).returncode == 0
            served.kill()
            restored = oncelog("restore", "--force", backup, served.store)
            assert restored.returncode == 0
            epochs = re.findall(r"^(?:old|new) epoch: (\w+)$", restored.stdout, re.MULTILINE)
            assert len(epochs) == 2
            served.start()
            status, said, errors = ended(process)
        assert (status, said) == (2, "")
        last = errors.splitlines()[-1]
        assert "the log has another history now" in last
        assert all(epoch in last for epoch in epochs)
        command = ["tail", "--url", served.url, "--partition", "a", "--limit", "1", "--epoch"]
        assert oncelog(*command, epochs[1]).returncode == 0
        done = oncelog(*command, epochs[0])
        assert (done.returncode, done.stdout) == (2, "")


def test_a_cursor_ahead_of_the_log_is_of_another_history(server: Served) -> None:
    done = oncelog("tail", "--url", server.url, "--partition", "a", "--since", "9000000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("oncelog: the log has another history than that of 9000000: history_changed: ")


def test_whoever_reads_has_enough_and_it_ends_before_another_event(server: Served) -> None:
    submit(server.url, "head", 1, 2)
    with started("tail", "--url", server.url, "--partition", "head") as process:
        assert process.stdout is not None
        assert counted([process.stdout.readline()]) == [1]
        process.stdout.close()
        process.stdout = None
        assert ended(process)[0] == 141


def test_interrupted(server: Served) -> None:
    submit(server.url, "interrupted", 1)
    with started("tail", "--url", server.url, "--partition", "interrupted") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "", "")


def test_what_may_not_be_read(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    key = oncelog("apikey", "create", keys, "--client-id", "c", "--name", "n", "--read", "a").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        command = ["tail", "--url", served.url, "--partition"]
        done = oncelog(*command, "b", "--client-id", "c", ONCELOG_TOKEN=key)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "oncelog: forbidden: partitions: not all of them may be read\n"
        done = oncelog(*command, "a", "--client-id", "c", ONCELOG_TOKEN="wrong")  # noqa: S106
        assert (done.returncode, done.stdout) == (2, "")
        hint = "the token is not good, or not of the client 'c' (--client-id)"
        assert done.stderr == f"oncelog: auth_failed: {hint}\n"
        done = oncelog(*command, "a")
        assert (done.returncode, done.stderr) == (2, "oncelog: auth_failed: authentication failed\n")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        done = oncelog("tail", "--url", served.url, "--partition", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"oncelog: {served.url} cannot be reached: Connection refused\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--partition must be given, at least once"),
        (["--partition", "a", "--since", "-1"], "--since must be a committed_id or 'now', not '-1'"),
        (["--partition", "a", "--since", "then"], "--since must be a committed_id or 'now', not 'then'"),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str) -> None:
    done = oncelog("tail", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oncelog: {sentence}\n")


def pretty(event: str, partitions: str = '["orders","ä"]', time_ms: int = 43_391_000) -> str:
    text = f'{{"committed_id":17,"partitions":{partitions},"event":{event},"status_updated_at":{time_ms},"id":"x"}}'
    return _pretty_line(Raw(text.encode())).decode()


def test_a_line_for_people() -> None:
    assert pretty('{"type":"order.placed","n":1.0,"a b":[null]}') == (
        '17  12:03:11  orders,ä  order.placed  {"n":1.0,"a b":[null]}\n'
    )
    assert pretty('{"type":"x"}') == "17  12:03:11  orders,ä  x  {}\n"
    assert pretty("null") == "17  12:03:11  orders,ä  (erased)\n"
    assert pretty("null", time_ms=2**53) == "17  --:--:--  orders,ä  (erased)\n"


def test_a_line_for_people_cannot_write_to_the_terminal() -> None:
    line = pretty('{"type":"\\u001b[2J","a":"\u202e\x9b\\n"}', '["\\u001b]0;"]')
    assert line == '17  12:03:11  \\u001b]0;  \\u001b[2J  {"a":"\\u202e\\u009b\\n"}\n'
