"""`oncelog submit` with running servers: single events, lines, retries with the same id, and errors."""

import json
import re
import signal
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from cli.scripted_server import SHUTDOWN_POLL_S, answer, scripted
from cli.server_process import NO_TOKEN, ONE_ATTEMPT, ServerProcess, oncelog, serving, start_command, wait_for_exit
from databases import BOTH_STORES

ID = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
COMMITTED = re.compile(r"committed (\d+) ([0-9a-f-]{36})")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("submit")) as served:
        yield served


def submit(url: str, *arguments: str, given: str | None = None) -> tuple[int, list[str], list[str]]:
    done = oncelog("submit", "--url", url, *arguments, given=given)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def events_of(url: str, partition: str, count: int) -> list[dict[str, Any]]:
    done = oncelog("tail", "--url", url, "--partition", partition, "--limit", str(count), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- one event ----------------------------------------------------------------------------------------


def test_repeated_id_gets_the_same_answer(server: ServerProcess) -> None:
    status, [line], errors = submit(server.url, "--partition", "one", '{"type":"x"}')
    assert (status, errors) == (0, [])
    found = COMMITTED.fullmatch(line)
    assert found is not None
    assert UUID(found[2]).version == 4
    again = submit(server.url, "--partition", "one", "--id", found[2], '{"type":"x"}')
    assert again == (0, [line], [])


def test_submit_with_several_partitions_a_client_and_json_output(server: ServerProcess) -> None:
    options = ["--partition", "b2", "--partition", "a2", "--id", ID.upper(), "--client-id", "till", "--json"]
    status, [line], errors = submit(server.url, *options, '{"type":"y","n":1.0}')
    assert (status, errors) == (0, [])
    result = json.loads(line)
    assert (result["id"], result["status"]) == (ID.upper(), "committed")
    [event] = events_of(server.url, "a2", 1)
    assert event == {
        "id": ID,
        "client_id": "till",
        "actor": "user:developer",
        "partitions": ["a2", "b2"],
        "committed_id": result["committed_id"],
        "event": {"type": "y", "n": 1},
        "status_updated_at": result["status_updated_at"],
    }


def test_rejected_event_exits_with_1_and_prints_the_reason(server: ServerProcess) -> None:
    id_text = str(UUID(int=1))
    assert submit(server.url, "--partition", "r", "--id", id_text, '{"type":"x"}')[0] == 0
    status, lines, [error] = submit(server.url, "--partition", "r", "--id", id_text, '{"type":"other"}')
    assert (status, lines) == (1, [f"rejected validation_failed {id_text}"])
    assert error.startswith(f"oncelog: {id_text} was rejected: validation_failed: ")
    status, [line], [error] = submit(server.url, "--partition", "r", "--json", '{"type":""}')
    assert (status, json.loads(line)["status"]) == (1, "rejected")
    assert "event.type: " in error


def test_expected_committed_id_is_checked(server: ServerProcess) -> None:
    _, [line], _ = submit(server.url, "--partition", "e", '{"type":"x"}')
    newest = line.split()[1]
    assert submit(server.url, "--partition", "e", "--expected-committed-id", newest, '{"type":"x"}')[0] == 0
    status, _, [error] = submit(server.url, "--partition", "e", "--expected-committed-id", newest, '{"type":"x"}')
    assert status == 1
    assert "expected_committed_id: " in error


def test_event_is_sent_unchanged(server: ServerProcess) -> None:
    status, _, [error] = submit(server.url, "--partition", "raw", '{"type":"x","n":1,"n":2}')
    assert status == 1  # the repeated name reaches the server
    assert "validation_failed" in error


# --- lines --------------------------------------------------------------------------------------------


def test_lines_are_submitted_in_their_order_as_events_or_items(server: ServerProcess) -> None:
    ids = [str(UUID(int=number)) for number in (100, 101)]
    lines = [
        '{"type":"bare"}',
        "",
        json.dumps({"id": ids[0], "partitions": ["own"], "event": {"type": "full"}}),
        json.dumps({"event": {"type": "half"}, "id": ids[1], "committed_id": 7, "expected_committed_id": None}),
        '  {"type":"last, without an end of line"}',
    ]
    status, output, errors = submit(server.url, "--partition", "lines", "-", given="\n".join(lines))
    assert (status, errors) == (0, [])
    found = [COMMITTED.fullmatch(line) for line in output]
    assert [one[2] for one in found[1:3] if one] == ids
    numbers = [int(one[1]) for one in found if one]
    assert len(numbers) == 4
    assert numbers == sorted(numbers)
    assert [one["event"]["type"] for one in events_of(server.url, "lines", 3)] == ["bare", "half", lines[4][11:-2]]
    assert [one["event"]["type"] for one in events_of(server.url, "own", 1)] == ["full"]


def test_lines_with_repeated_ids_are_submitted_in_batches(server: ServerProcess) -> None:
    items = [
        json.dumps({"id": str(UUID(int=1000 + n % 150)), "event": {"type": "n", "n": n % 150}}) for n in range(300)
    ]
    given = "\n".join(items) + "\n"
    status, lines, errors = submit(server.url, "--partition", "many", "--batch", "200", given=given)
    assert (status, errors) == (0, [])
    assert len(lines) == 300
    assert lines[:150] == lines[150:]
    assert [one["event"]["n"] for one in events_of(server.url, "many", 150)] == list(range(150))


def test_malformed_line_is_reported_and_earlier_lines_are_committed(server: ServerProcess) -> None:
    for bad, sentence in [
        ("nonsense", "line 3: is not JSON: "),
        ("[1]", "line 3: must be an object"),
        ('{"name":"x"}', 'line 3: must be an event with a "type", or have the members id, partitions and event'),
        ('{"id":"x","event":{"type":"x"}}', "line 3: $.id: must be a UUID"),
        ('{"id":7,"event":{"type":"x"}}', "line 3: $.id: "),
        ('{"partitions":"a","event":{"type":"x"}}', "line 3: $.partitions: must be an array"),
        ('{"expected_committed_id":"7","event":{"type":"x"}}', "line 3: $.expected_committed_id: must be a whole"),
    ]:
        given = f'{{"type":"x"}}\n\n{bad}\n{{"type":"y"}}\n'
        status, [line], [error] = submit(server.url, "--partition", "bad", "-", given=given)
        assert status == 2
        assert COMMITTED.fullmatch(line)
        assert error.startswith(f"oncelog: {sentence}")


def test_rejected_line_is_reported_and_other_lines_are_committed(server: ServerProcess) -> None:
    given = '{"type":"x"}\n{"type":""}\n{"type":"z"}\n'
    status, lines, [error] = submit(server.url, "--partition", "some", "-", given=given)
    assert status == 1
    assert [line.split()[0] for line in lines] == ["committed", "rejected", "committed"]
    assert error.startswith(f"oncelog: line 2: {lines[1].split()[2]} was rejected: validation_failed: ")


def test_line_is_answered_before_the_next_one_is_written(server: ServerProcess) -> None:
    with start_command("submit", "--url", server.url, "--partition", "typed", "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            process.stdin.write(f'{{"type":"x","n":{number}}}\n')
            process.stdin.flush()
            assert COMMITTED.fullmatch(process.stdout.readline().strip())
        assert wait_for_exit(process) == (0, "", "")


def test_output_of_tail_can_be_submitted_to_a_different_log(server: ServerProcess, tmp_path: Path) -> None:
    given = "".join(f'{{"type":"x","n":{number}}}\n' for number in range(5))
    assert submit(server.url, "--partition", "copied", given=given)[0] == 0
    events = events_of(server.url, "copied", 5)
    with serving(tmp_path) as other:
        given = "".join(json.dumps(one) + "\n" for one in events)
        for _ in range(2):
            status, lines, _ = submit(other.url, "-", given=given)
            assert (status, [line.split()[1] for line in lines]) == (0, ["1", "2", "3", "4", "5"])
        copied = events_of(other.url, "copied", 5)
    assert [(one["id"], one["event"]) for one in copied] == [(one["id"], one["event"]) for one in events]


# --- retries ------------------------------------------------------------------------------------------


def busy(handler: BaseHTTPRequestHandler, _: int = 0, *, retry_after_ms: int = 1) -> None:
    details = {"retry_after_ms": retry_after_ms}
    answer(handler, 503, {"error": {"code": "server_busy", "message": "too much", "details": details}})


def test_submit_retries_the_same_request_until_it_is_answered() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt == 1:
            busy(handler)
        elif attempt == 2:
            handler.close_connection = True  # close without an answer
        elif attempt == 3:
            answer(handler, 502, b"a proxy's own words")
        else:
            answer(handler, 200, {"results": [{"id": "x", "status": "committed", "committed_id": 17}]})

    with scripted(handle) as (url, received):
        status, [line], errors = submit(url, "--partition", "a", '{"type":"x"}')
    assert status == 0
    assert received == [received[0]] * 4
    assert line == f"committed 17 {received[0]['events'][0]['id']}"
    assert errors == ["oncelog: server_busy: too much; retrying"]


def test_submit_gives_up_after_the_timeout_and_prints_the_id() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        busy(handler, retry_after_ms=1 if attempt == 1 else 3_600_000)

    with scripted(handle) as (url, received):
        status, lines, errors = submit(url, "--partition", "a", "--timeout", "600", '{"type":"x"}')
    assert (status, lines, len(received)) == (2, [], 2)
    assert errors[1:] == [
        "oncelog: gave up after 600 s: server_busy: too much",
        f"oncelog: the outcome is unknown; send it again under the same id: {received[0]['events'][0]['id']}",
    ]


def test_submit_to_a_silent_server_gives_up_after_the_timeout() -> None:
    asked, is_over = threading.Event(), threading.Event()

    def handle(_: BaseHTTPRequestHandler, __: int) -> None:
        asked.set()
        is_over.wait()

    given = '{"type":"x"}\n{"type":"y"}\n'
    with scripted(handle) as (url, received):
        try:
            for timeout in ("0.5", "5", "60"):  # a slow machine needs longer to send the request
                status, _, errors = submit(url, "--partition", "a", "--timeout", timeout, given=given)
                if asked.is_set():
                    break
        finally:
            is_over.set()
    assert (status, asked.is_set()) == (2, True)
    assert errors[0] == f"oncelog: gave up after {timeout} s: {url} did not respond in time"
    ids = [one["id"] for one in received[0]["events"]]
    assert [error.rpartition(" ")[2] for error in errors[1:]] == ids
    assert errors[2].startswith("oncelog: line 2: the outcome is unknown")


def test_submit_interrupted_during_retries_prints_the_id() -> None:
    with (
        scripted(busy) as (url, received),
        start_command("submit", "--url", url, "--partition", "a", '{"type":"x"}') as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline() == "oncelog: server_busy: too much; retrying\n"
        process.send_signal(signal.SIGINT)
        status, output, errors = wait_for_exit(process)
    assert (status, output) == (130, "")
    assert received[0]["events"][0]["id"] in errors


def test_submit_to_an_unreachable_server_reports_that_nothing_was_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        done = oncelog("submit", "--url", served.url, "--partition", "a", '{"type":"x"}', program=ONE_ATTEMPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == ["oncelog: nothing was sent"]


@BOTH_STORES
def test_submit_waits_for_a_restarting_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        with start_command("submit", "--url", served.url, "--partition", "a", '{"type":"x"}') as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            says = "cannot be reached: Connection refused (is the server running at this URL?)"
            assert line == f"oncelog: {served.url} {says}; retrying\n"
            served.start()
            status, output, errors = wait_for_exit(process)
        assert (status, errors) == (0, "")
        assert output.startswith("committed 1 ")


def test_malformed_answer_is_reported() -> None:
    with scripted(lambda handler, _: answer(handler, 200, b"<html>")) as (url, _):
        status, lines, [error] = submit(url, "--partition", "a", '{"type":"x"}')
    assert (status, lines) == (2, [])
    assert "does not answer like an Oncelog server" in error
    with scripted(lambda handler, _: answer(handler, 200, {"results": []})) as (url, _):
        status, lines, [error] = submit(url, "--partition", "a", '{"type":"x"}')
    assert (status, lines) == (2, [])
    assert "answered 1 events with 0 results" in error


@pytest.mark.parametrize("status", [404, 405, 501])
def test_server_without_the_api_is_reported_at_once(status: int) -> None:
    with scripted(lambda handler, _: answer(handler, status, b"<html>")) as (url, received):
        done = submit(url, "--partition", "a", '{"type":"x"}')
    error = f"oncelog: bad_request: no Oncelog server at {url} (HTTP status {status}): check the URL"
    assert (done, len(received)) == ((2, [], [error]), 1)


def test_server_that_does_not_speak_http_is_reported_at_once() -> None:
    connections = []

    def answer_grpc(connection: socketserver.BaseRequestHandler) -> None:
        connections.append(connection.request.recv(65536))
        connection.request.sendall(b"\0\0\0\4\0\0\0\0\0")  # the SETTINGS frame of HTTP/2

    handler = type("Handler", (socketserver.BaseRequestHandler,), {"handle": answer_grpc})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(SHUTDOWN_POLL_S,)).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert submit(url, "--partition", "a", '{"type":"x"}') == (
                2,
                [],
                [f"oncelog: {url} did not answer with HTTP; is it the gRPC port?"],
            )
        finally:
            server.shutdown()
    assert len(connections) == 1


def test_https_to_a_server_without_tls_is_explained() -> None:
    with scripted(lambda handler, _: answer(handler, 200, {})) as (url, _):
        secure = url.replace("http://", "https://")
        reason = "the server does not use TLS at this port: use http://"
        assert submit(secure, "--partition", "a", '{"type":"x"}') == (
            2,
            [],
            [f"oncelog: {secure} cannot be used: {reason}"],
        )


# --- authorization and errors -------------------------------------------------------------------------


def test_token_is_read_from_option_file_or_environment(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create = ["apikey", "create", str(keys), "--client-id", "till", "--name", "n", "--write", "a", "--read", "a"]
    key = oncelog(*create).stdout.strip()
    file = tmp_path / "key.txt"
    file.write_text(f"{key}\n")
    file.chmod(0o600)
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        command = ["submit", "--url", served.url, "--partition"]
        event = '{"type":"x"}'
        assert oncelog(*command, "a", "--token", key, event).returncode == 0
        assert oncelog(*command, "a", "--token-file", str(file), event, ONCELOG_TOKEN="wrong").returncode == 0  # noqa: S106
        assert oncelog(*command, "a", event, ONCELOG_TOKEN=key).returncode == 0
        done = oncelog(*command, "a", event)
        assert (done.returncode, done.stderr) == (2, f"oncelog: auth_failed: {NO_TOKEN}\n")
        done = oncelog(*command, "a", "--token", key, "--client-id", "other", event)
        assert (done.returncode, done.stdout) == (2, "")
        hint = "the token is invalid, or belongs to a client other than 'other' (--client-id)"
        assert done.stderr == f"oncelog: auth_failed: {hint}\n"
        lines = json.dumps({"partitions": ["a"], "event": {}})
        done = oncelog("submit", "--url", served.url, "-", given=lines)
        place = " (the request began with line 1)"
        assert (done.returncode, done.stderr) == (2, f"oncelog: auth_failed: {NO_TOKEN}{place}\n")
        done = oncelog(*command, "b", "--token", key, event)
        assert done.returncode == 1
        assert "rejected: forbidden: partitions: the credential has no write access to some of them" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (['{"type":"x"}'], "the event: $.partitions: is missing; --partition sets it for all events"),
        (["--partition", "a", "{"], "the event: is not JSON: "),
        (["--partition", "a", "--id", "7", '{"type":"x"}'], "the event: $.id: must be a UUID"),
        (["--partition", "a", "--id", ID, "-"], "--id and --expected-committed-id are for a single event"),
        (
            ["--id", ID, f'{{"id":"{ID}","partitions":["a"],"event":{{}}}}'],
            "the event: --id: the event already has an id",
        ),
        (["--url", "ftp://x", "--partition", "a", "{}"], "--url must be http://HOST:PORT or https://HOST:PORT"),
        (["--url", "http://u:secret@x", "--partition", "a", "{}"], "--url must be http://HOST:PORT"),
        (["--url", "http://x:99999", "--partition", "a", "{}"], "--url must be http://HOST:PORT"),
        (["--partition", "\udcff", '{"type":"x"}'], "--partition is not UTF-8"),
        (
            ["--token", "a", "--token-file", "b", "--partition", "a", "{}"],
            "--token cannot be combined with --token-file",
        ),
        (["--token-file", "/dev/null", "--partition", "a", "{}"], "/dev/null is empty: it contains no token"),
        (["--token-file", "nowhere", "--partition", "a", "{}"], "nowhere cannot be read: No such file or directory"),
        (["--token", "ä", "--partition", "a", "{}"], "the token has invalid characters"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], sentence: str) -> None:
    done = oncelog("submit", *arguments, given="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"oncelog: {sentence}")
    assert len(done.stderr.splitlines()) == 1
