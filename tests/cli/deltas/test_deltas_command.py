"""`oncelog deltas` with running servers: push, pull, rows, snapshot and compaction."""

import csv
import json
import re
import signal
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.gateway_reader import newest_sequence, rows_of
from cli.scripted_server import answer, scripted
from cli.server_process import NO_TOKEN, ONE_ATTEMPT, ServerProcess, oncelog, serving, start_command, wait_for_exit
from databases import BOTH_STORES
from oncelog.cli import remote
from oncelog.cli.deltas.pull import _format_line
from oncelog.cli.server_options import Remote
from oncelog.client.runtime.backoff import Pauses
from oncelog.core.identity import delta_id_from_json
from oncelog.errors import LostError

PUSHED = re.compile(r"(committed|duplicate) (\d+) ([0-9a-f]{64})")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("deltas")) as served:
        yield served


def deltas(command: str, url: str, *arguments: str, given: str | None = None) -> tuple[int, list[str], list[str]]:
    done = oncelog("deltas", command, *arguments, "--url", url, given=given)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def change(row_id: str, op: str = "INSERT", **columns: Any) -> str:
    listed = [{"column": name, "value": value} for name, value in columns.items()]
    return json.dumps({"op": op, "table": "t", "rowId": row_id, "columns": listed})


def changes(numbers: Sequence[int]) -> str:
    return "".join(change(f"r{number}", n=number) + "\n" for number in numbers)


def push(url: str, gateway: str, *numbers: int) -> None:
    status, _, errors = deltas("push", url, gateway, "--client-id", "c", given=changes(numbers))
    assert (status, errors) == (0, [])


def numbers_of(lines: str | Sequence[str]) -> list[int]:
    texts = lines.splitlines() if isinstance(lines, str) else lines
    return [json.loads(line)["columns"][0]["value"] for line in texts]


# --- push ---------------------------------------------------------------------------------------------


def test_push_stamps_changes_and_later_lines_win(server: ServerProcess) -> None:
    given = change("a", n=1) + "\n\n" + change("a", "UPDATE", n=2) + "\n" + change("b", n=-0.0)
    status, lines, errors = deltas("push", server.url, "stamped", "--client-id", "till", given=given)
    assert (status, errors) == (0, [])
    found = [PUSHED.fullmatch(line) for line in lines]
    assert [(one[1], one[2]) for one in found if one] == [("committed", "1"), ("committed", "2"), ("committed", "3")]
    assert rows_of(server.url, "stamped", "t") == {"a": {"n": 2}, "b": {"n": 0}}
    _, pulled, _ = deltas("pull", server.url, "stamped")
    whole = [json.loads(line) for line in pulled]
    assert [one["clientId"] for one in whole] == ["till"] * 3
    clocks = [int(one["hlc"]) for one in whole]
    assert clocks == sorted(set(clocks))
    assert [one["deltaId"] for one in whole] == [line.split()[2] for line in lines]


def test_output_of_pull_can_be_pushed_to_the_same_and_other_gateways(server: ServerProcess) -> None:
    push(server.url, "from", 1, 2, 3)
    _, pulled, _ = deltas("pull", server.url, "from")
    given = "\n".join(pulled)
    status, lines, errors = deltas("push", server.url, "from", given=given)
    assert (status, errors) == (0, [])
    assert [line.split()[:2] for line in lines] == [["duplicate", "1"], ["duplicate", "2"], ["duplicate", "3"]]
    status, lines, _ = deltas("push", server.url, "to", "--json", given=given)
    results = [json.loads(line) for line in lines]
    assert [(one["sequence"], one["duplicate"]) for one in results] == [(1, False), (2, False), (3, False)]
    _, copied, _ = deltas("pull", server.url, "to")
    assert copied == pulled


def test_push_accepts_one_json_text_on_one_or_several_lines(server: ServerProcess, tmp_path: Path) -> None:
    whole = {"deltas": [json.loads(change(f"r{number}", n=number)) for number in range(3)]}
    for gateway, text in (("text1", json.dumps(whole)), ("text2", json.dumps(whole, indent=2) + "\n")):
        file = tmp_path / gateway
        file.write_text(text)
        status, lines, errors = deltas("push", server.url, gateway, str(file), "--client-id", "c")
        assert (status, len(lines), errors) == (0, 3, [])
        assert len(rows_of(server.url, gateway, "t")) == 3


def test_push_keeps_the_clock_and_client_of_a_line(server: ServerProcess) -> None:
    own = {**json.loads(change("a", n=1)), "clientId": "own", "hlc": "65536"}
    for word in ("committed", "duplicate"):
        status, [line], _ = deltas("push", server.url, "kept", "--client-id", "c", given=json.dumps(own))
        assert (status, line) == (0, f"{word} 1 {delta_id_from_json(own).hex()}")


def test_stamped_deltas_are_saved_before_they_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "stamped.jsonl"
    seen: list[str] = []

    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        seen.append(file.read_text())
        answer(handler, 400, {"error": "body: no", "code": "BAD_REQUEST"})

    command = ["g", "--client-id", "c", "--batch", "2", "--stamped", str(file)]
    with scripted(handle) as (url, received):
        assert deltas("push", url, *command, given=changes(range(5)))[0] == 2
        assert len(received) == 1
        lines = seen[0].splitlines()
        assert len(lines) == 5  # includes the deltas of later requests
        assert received[0]["deltas"] == [json.loads(line) for line in lines[:2]]
        status, _, [error] = deltas("push", url, *command, given=changes(range(5)))
        assert (status, len(received)) == (2, 1)
        assert error == f"oncelog: {file} already exists: push that file, or choose another name"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_malformed_line_is_reported_and_earlier_lines_are_committed(server: ServerProcess) -> None:
    for number, (bad, sentence) in enumerate(
        [
            ("nonsense", "line 2: is not JSON: "),
            ("{", "line 2: is not JSON: "),
            ("[1]", 'line 2: must be a delta or {"deltas": […]}'),
            ('{"deltas": 7}', 'line 2: must be a delta or {"deltas": […]}'),
            ('{"deltas": [7]}', "line 2, deltas[0]: must be an object"),
            ('{"op":"INSERT","table":"t","rowId":"a"}', "line 2: $.columns: is missing"),
            (change("a", "MERGE"), "line 2: $.op: must be one of INSERT, UPDATE, DELETE"),
            (change("a", n=1).replace('"n"', '"a b"'), "line 2: $.columns[0].column: must be an identifier"),
            (change("a", n=2**53 + 1), "line 2: $.columns[0].value: integer that would become 9007199254740992 "),
            ('{"op":"INSERT","op":"INSERT"}', "line 2: "),
            (json.dumps({**json.loads(change("a")), "hlc": "007"}), "line 2: $.hlc: must be a decimal string"),
            (json.dumps({**json.loads(change("a")), "deltaId": "0" * 64}), "line 2: $.clientId: is missing"),
        ]
    ):
        given = f"{change('good')}\n{bad}\n{change('after')}\n"
        status, [line], [error] = deltas("push", server.url, f"bad{number}", "--client-id", "c", given=given)
        assert (status, error[:9]) == (2, "oncelog: "), bad
        assert error.removeprefix("oncelog: ").startswith(sentence), bad
        assert line.startswith("committed 1 ")
    status, lines, [error] = deltas("push", server.url, "bad", given=change("a"))
    assert (status, lines) == (2, [])
    assert error == "oncelog: line 1: $.clientId: is missing; --client-id sets it for all deltas"
    assert deltas("push", server.url, "bad", given='{"deltas": [\n')[2] == [
        "oncelog: the text: is not JSON: unexpected end of data"
    ]


def test_refused_push_names_the_line_and_writes_nothing_of_the_request(tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text('{"shop": {"t": {"n": "integer"}}}')
    options = ["--development", "--quiet", "--set", f"deltas_schemas={schemas}"]
    with serving(tmp_path, *options) as served:
        given = changes([1, 2, 3]) + change("bad", n="x") + "\n" + change("after", n=5)
        status, lines, errors = deltas("push", served.url, "shop", "--client-id", "c", "--batch", "2", given=given)
        assert (status, len(lines)) == (1, 2)
        assert errors[0].startswith("oncelog: line 4: invalid: deltas[1].")
        assert errors[1:] == ["oncelog: no delta from line 3 onwards was written"]
        assert newest_sequence(served.url, "shop") == 2


def test_push_retries_with_the_same_ids_until_it_is_answered() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt == 1:
            answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY", "retryAfterMs": 1})
        elif attempt == 2:
            handler.close_connection = True  # close without an answer
        elif attempt == 3:
            answer(handler, 429, {"error": "slowly", "code": "RATE_LIMITED", "retryAfterMs": 1})
        elif attempt == 4:
            answer(handler, 409, {"error": "ahead", "code": "CLOCK_DRIFT", "retryAfterMs": 10})
        else:
            result = {"deltaId": received[0]["deltas"][0]["deltaId"], "sequence": 7, "duplicate": True}
            answer(handler, 200, {"results": [result]})

    with scripted(handle) as (url, received):
        status, [line], errors = deltas("push", url, "g", "--client-id", "c", given=change("a"))
    assert received == [received[0]] * 5
    assert (status, line) == (0, f"duplicate 7 {received[0]['deltas'][0]['deltaId']}")
    assert errors == ["oncelog: server_busy: busy; retrying"]


def test_push_does_not_wait_for_a_clock_far_ahead() -> None:
    def handle(handler: BaseHTTPRequestHandler, _: int) -> None:
        error = {"error": "deltas[0].hlc: ahead", "code": "CLOCK_DRIFT", "index": 0, "retryAfterMs": 3_600_000}
        answer(handler, 409, error)

    with scripted(handle) as (url, received):
        status, _, errors = deltas("push", url, "g", "--client-id", "c", given=change("a"))
    assert (status, len(received)) == (1, 1)
    assert errors[0] == "oncelog: line 1: clock_drift: deltas[0].hlc: ahead"


async def test_attempt_cut_off_by_the_deadline_does_not_hide_the_earlier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, errors = (
        iter([0, 60]),
        iter([LostError("http://there cannot be reached: Connection refused"), TimeoutError()]),
    )
    monkeypatch.setattr(Pauses, "next_pause_s", lambda *_: next(pauses))

    async def attempt() -> None:
        raise next(errors)

    with pytest.raises(remote.GaveUpError, match=r"gave up after 30 s: .*: Connection refused$"):
        await remote.Retrier(Remote("http://there"), 30).run(attempt)


def test_push_prints_unconfirmed_deltas_when_it_gives_up_or_is_interrupted() -> None:
    later: dict[str, int] = {"retryAfterMs": 60_000}

    def busy(handler: BaseHTTPRequestHandler, _: int) -> None:
        answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY", **later})

    with scripted(busy) as (url, received):
        status, lines, errors = deltas("push", url, "g", "--client-id", "c", given=changes([1, 2]))
        assert (status, lines) == (2, [])
        assert errors[:2] == [
            "oncelog: gave up after 30 s: server_busy: busy",
            "oncelog: the outcome is unknown from line 1 to line 2; push these deltas again unchanged",
        ]
        printed = [json.loads(error.split(": ", 2)[2]) for error in errors[2:]]
        assert printed == received[0]["deltas"]
        later.clear()
        for ending in (signal.SIGINT, signal.SIGTERM):
            received.clear()
            with start_command("deltas", "push", "g", "--client-id", "c", "--url", url) as process:
                assert process.stdin is not None
                assert process.stderr is not None
                process.stdin.write(changes([1]))
                process.stdin.flush()
                assert process.stderr.readline() == "oncelog: server_busy: busy; retrying\n"
                process.send_signal(ending)
                status, output, rest = wait_for_exit(process)
            assert (status, output) == (130, "")
            assert received[0]["deltas"][0]["deltaId"] in rest
            assert "Traceback" not in rest


# --- pull ---------------------------------------------------------------------------------------------


def test_pull_prints_all_pages_with_since_and_limit(server: ServerProcess) -> None:
    push(server.url, "pages", *range(1100))
    status, lines, errors = deltas("pull", server.url, "pages")
    assert (status, numbers_of(lines), errors) == (0, list(range(1100)), [])
    _, lines, _ = deltas("pull", server.url, "pages", "--since", "1000", "--limit", "3", "--json")
    assert [json.loads(line)["sequence"] for line in lines] == [1001, 1002, 1003]
    status, lines, [error] = deltas("pull", server.url, "pages", "--since", "9000")
    assert (status, lines) == (2, [])
    assert error.startswith("oncelog: the cursor 9000 belongs to a different history: history_changed: ")
    assert deltas("pull", server.url, "pages", "--epoch", "other")[0] == 2


def test_pull_follows_new_deltas(server: ServerProcess) -> None:
    push(server.url, "live", *range(600))
    with start_command("deltas", "pull", "live", "--follow", "--limit", "603", "--url", server.url) as process:
        assert process.stdout is not None
        assert numbers_of([process.stdout.readline() for _ in range(600)]) == list(range(600))
        for number in (600, 601, 602):
            push(server.url, "live", number)
            assert numbers_of([process.stdout.readline()]) == [number]
        assert wait_for_exit(process) == (0, "", "")


@BOTH_STORES
def test_pull_reconnects_to_a_killed_server_without_gaps(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        push(served.url, "a", 1, 2)
        with start_command("deltas", "pull", "a", "--follow", "--limit", "5", "--url", served.url) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert numbers_of([process.stdout.readline(), process.stdout.readline()]) == [1, 2]
            served.kill()
            assert process.stderr.readline().endswith("; retrying\n")
            served.start()
            push(served.url, "a", 3, 4, 5)
            status, output, errors = wait_for_exit(process)
        assert (status, numbers_of(output)) == (0, [3, 4, 5])
        assert "reconnected; continuing after 2" in errors


def test_pull_ends_with_an_error_when_the_epoch_changes(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        push(served.url, "a", 1)
        with start_command("deltas", "pull", "a", "--follow", "--url", served.url) as process:
            assert process.stdout is not None
            assert numbers_of([process.stdout.readline()]) == [1]
            served.kill()
            assert oncelog("epoch", served.store, "--renew").returncode == 0
            served.start()
            status, output, errors = wait_for_exit(process)
    assert (status, output) == (2, "")
    assert "the cursor 1 belongs to a different history: history_changed: epoch: " in errors.splitlines()[-1]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_pull_exits_with_130(server: ServerProcess, ending: signal.Signals) -> None:
    push(server.url, f"ended{ending}", 1)
    with start_command("deltas", "pull", f"ended{ending}", "--follow", "--url", server.url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(ending)
        assert wait_for_exit(process) == (130, "", "")


def test_pull_ends_when_its_output_pipe_is_closed(server: ServerProcess) -> None:
    push(server.url, "head", 1, 2)
    with start_command("deltas", "pull", "head", "--follow", "--url", server.url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        assert wait_for_exit(process)[0] == 141


def test_unreachable_server_is_reported(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        for arguments in (["pull", "g"], ["rows", "g", "t"]):
            done = oncelog("deltas", *arguments, "--url", served.url, program=ONE_ATTEMPT)
            assert (done.returncode, done.stdout) == (2, "")
            says = f"{served.url} cannot be reached: Connection refused (is the server running at this URL?)"
            assert says in done.stderr.splitlines()[-1]


def test_push_to_an_unreachable_server_reports_that_nothing_was_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        command = ("deltas", "push", "g", "--client-id", "c", "--url", served.url)
        done = oncelog(*command, given=changes([1, 2]), program=ONE_ATTEMPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == ["oncelog: nothing was sent from line 1 to line 2"]


def test_pretty_line_escapes_control_characters() -> None:
    raw: Any = (
        b'{"sequence":17,"op":"INSERT","table":"t","rowId":"\\u001b[2J","clientId":"c","deltaId":"d","hlc":"1",'
        b'"columns":[{"column":"a","value":"\xe2\x80\xae"},{"column":"b","value":null}]}'
    )
    assert _format_line(raw) == b'17  INSERT  t  \\u001b[2J  c  {"a":"\\u202e","b":null}\n'


# --- rows, snapshot and compaction --------------------------------------------------------------------


def test_rows_are_printed_in_three_formats(server: ServerProcess) -> None:
    given = [
        change("b", name="Tea, green", price=3.5, tags=["x", 1], gone=None),
        change("a", name='say "hi"\nthere \x1b[2J', is_open=True),
        change("c", name="no more"),
        change("c", "DELETE"),
    ]
    assert deltas("push", server.url, "formats", "--client-id", "c", given="\n".join(given))[0] == 0
    status, lines, errors = deltas("rows", server.url, "formats", "t")
    assert (status, errors) == (0, [])
    assert [json.loads(line)["rowId"] for line in lines] == ["a", "b"]
    done = oncelog("deltas", "rows", "formats", "t", "--format", "csv", "--url", server.url)
    empty = dict.fromkeys(("gone", "is_open", "name", "price", "rowId", "tags"), "")
    assert [dict(sorted(row.items())) for row in csv.DictReader(StringIO(done.stdout))] == [
        {**empty, "rowId": "a", "name": 'say "hi"\nthere \x1b[2J', "is_open": "true"},
        {**empty, "rowId": "b", "name": "Tea, green", "price": "3.5", "tags": '["x",1]'},
    ]
    status, lines, _ = deltas("rows", server.url, "formats", "t", "--format", "table", "--row", "a")
    assert (status, len(lines)) == (0, 2)
    assert "\\u001b[2J" in lines[1]
    assert "\x1b" not in lines[1]
    status, lines, errors = deltas("rows", server.url, "formats", "t", "--row", "c")
    assert (status, lines, errors) == (1, [], ["oncelog: there is no row with this id"])
    assert deltas("rows", server.url, "formats", "no table") == (
        2,
        [],
        ["oncelog: bad_request: table: must be an identifier (letters, digits and _, not starting with a digit)"],
    )


def test_names_with_reserved_url_characters_are_quoted(server: ServerProcess) -> None:
    name, row = "a/b?c=%20&d#e..", "x/../y?&%2f#"
    assert deltas("push", server.url, name, "--client-id", "c", given=change(row, n=1))[0] == 0
    _, [line], _ = deltas("rows", server.url, name, "t", "--row", row)
    assert json.loads(line)["rowId"] == row
    assert len(deltas("pull", server.url, name)[1]) == 1


@BOTH_STORES
def test_compaction_sends_requests_until_everything_is_compacted(tmp_path: Path) -> None:
    count = 10_500  # more than one request can compact
    with serving(tmp_path) as served:
        given = changes(range(count))
        status, lines, _ = deltas("push", served.url, "g", "--client-id", "c", "--batch", "5000", given=given)
        assert (status, len(lines)) == (0, count)
        status, [line], errors = deltas("compact", served.url, "g", "--keep", "5", "--json")
        assert (status, errors) == (0, [])
        assert json.loads(line) == {"compacted": count - 5, "upto": count - 5, "dropped_rows": 0, "held_by": None}
        status, [line], _ = deltas("compact", served.url, "g", "--upto", "100")
        assert (status, line) == (0, f"0 deltas compacted; deltas up to {count - 5} no longer have bodies")
        for options in ([], ["--follow"]):
            status, lines, [error] = deltas("pull", served.url, "g", *options)
            assert (status, lines) == (1, [])
            assert "have been compacted" in error
            assert "`oncelog deltas snapshot g`" in error
        assert len(deltas("pull", served.url, "g", "--since", str(count - 5))[1]) == 5
        status, lines, [hint] = deltas("snapshot", served.url, "g")
        last = json.loads(lines.pop())
        assert (status, len({json.loads(line)["rowId"] for line in lines}), len(lines)) == (0, count, count)
        assert last["cursor"] == count
        assert hint == f"oncelog: continue with `oncelog deltas pull g --since {count} --epoch {last['epoch']}`"
        assert deltas("pull", served.url, "g", "--since", str(count), "--epoch", last["epoch"]) == (0, [], [])
        assert len(deltas("rows", served.url, "g", "t")[1]) == count


def test_compaction_retries_after_a_failure_and_prints_the_total() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt == 2:
            answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY"})
        else:
            answer(handler, 200, {"compacted": 10, "upto": 10 * attempt, "hasMore": attempt < 4})

    with scripted(handle) as (url, received):
        status, [line], _ = deltas("compact", url, "g", "--upto", "99", "--json")
    assert (status, json.loads(line)) == (0, {"compacted": 30, "upto": 40, "dropped_rows": 0, "held_by": None})
    assert received == [{"upto": 99}] * 4


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "must have 1 to 80 characters"),
        ("x" * 81, "must have 1 to 80 characters"),
        ("a\nb", "must not contain control characters"),
        ("a\x7f", "must not contain control characters"),
        ("a\x85", "must not contain control characters"),
        ("..", "must not be . or .."),
        ("e\u0301", "must be in NFC"),
    ],
)
def test_gateway_name_that_every_server_refuses_is_refused_before_a_request(name: str, fault: str) -> None:
    with scripted(lambda handler, _: answer(handler, 500, {})) as (url, received):
        status, _, [error] = deltas("pull", url, name)
    assert (status, received) == (2, [])
    assert fault in error


def test_interrupted_compaction_prints_how_to_resume() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt < 3:
            answer(handler, 200, {"compacted": 10, "upto": 10 * attempt, "hasMore": True})
        else:
            answer(handler, 503, {"error": "busy", "code": "SERVER_BUSY"})

    for ending in (signal.SIGINT, signal.SIGTERM):
        with (
            scripted(handle) as (url, _),
            start_command("deltas", "compact", "g", "--keep", "0", "--url", url) as process,
        ):
            assert process.stderr is not None
            assert process.stderr.readline() == "oncelog: server_busy: busy; retrying\n"
            process.send_signal(ending)
            status, output, errors = wait_for_exit(process)
        assert (status, output) == (130, "")
        assert errors == "oncelog: interrupted; 20 deltas compacted so far. Run the same command again to continue.\n"


# --- authorization and errors -------------------------------------------------------------------------


def test_unauthorized_commands_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create = ["apikey", "create", str(keys), "--client-id", "till", "--name", "n"]
    key = oncelog(*create, "--write", "deltas/shop", "--read", "deltas/shop").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        given = change("a", n=1)
        command = ["deltas", "push", "shop", "--url", served.url, "--client-id"]
        assert oncelog(*command, "till", given=given, ONCELOG_TOKEN=key).returncode == 0
        done = oncelog(*command, "other", given=given, ONCELOG_TOKEN=key)
        assert done.returncode == 1
        assert "line 1: forbidden: deltas[0].clientId: must be the credential's client" in done.stderr
        done = oncelog(*command, "till", given=given)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"auth_failed: {NO_TOKEN}" in done.stderr
        done = oncelog(*command, "till", given=given, ONCELOG_TOKEN="wrong")  # noqa: S106
        assert (done.returncode, done.stdout) == (2, "")
        assert "auth_failed: the token is invalid: check it; the server's log says why" in done.stderr
        done = oncelog("deltas", "compact", "shop", "--keep", "0", "--url", served.url, "--token", key)
        needed = "its grants must include write access to deltas/shop/compact"
        reason = f"the credential may not compact this gateway; {needed}"
        assert (done.returncode, done.stderr) == (2, f"oncelog: forbidden: gateway: {reason}\n")


def test_malformed_answers_are_reported() -> None:
    with scripted(lambda handler, _: answer(handler, 200, b"<html>")) as (url, _):
        for arguments in (
            ["push", "--client-id", "c"],
            ["pull"],
            ["rows", "t"],
            ["snapshot"],
            ["compact", "--upto", "1"],
        ):
            command, *rest = arguments
            status, lines, [error] = deltas(command, url, "g", *rest, given=change("a"))
            assert (status, lines) == (2, [])
            assert "does not answer like an Oncelog server" in error
    with scripted(lambda handler, _: answer(handler, 200, {"results": []})) as (url, _):
        status, _, [error] = deltas("push", url, "g", "--client-id", "c", given=change("a"))
        assert status == 2
        assert "answered 1 deltas with 0 results" in error
    with scripted(lambda handler, _: answer(handler, 404, b"<html>")) as (url, _):
        assert deltas("pull", url, "g", "--follow")[0] == 2


@pytest.mark.parametrize("arguments", [["rows", "t"], ["snapshot"], ["compact", "--upto", "1"]])
def test_server_that_repeats_a_page_is_not_asked_again(arguments: list[str]) -> None:
    page = {"rows": [], "next": "same", "cursor": 1, "epoch": "e", "compacted": 0, "upto": 1, "hasMore": True}
    with scripted(lambda handler, number: answer(handler, 200 if number <= 3 else 404, page)) as (url, received):
        command, *rest = arguments
        status, _, errors = deltas(command, url, "g", *rest)
        assert status == 2
        assert "the server repeats a page of the list at " in errors[0]
        assert len(received) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["push", ""], "GATEWAY must have 1 to 80 characters"),
        (["push", "\udcff"], "GATEWAY is not UTF-8"),
        (["push", "g", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory"),
        (["compact", "g"], "exactly one of --upto and --keep must be given"),
        (["compact", "g", "--upto", "1", "--keep", "1"], "exactly one of --upto and --keep must be given"),
        (["pull", "g", "--url", "ftp://x"], "--url must be http://HOST:PORT or https://HOST:PORT"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], sentence: str) -> None:
    done = oncelog("deltas", *arguments, given="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"oncelog: {sentence}")
    assert len(done.stderr.splitlines()) == 1
