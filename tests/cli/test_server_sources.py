"""`show`, `stats` and `audit` print the same for a server as for the server's log."""

import json
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from cli.runner import COMMAND, RUNNER
from cli.scripted_server import answer, scripted
from cli.server_process import DEVELOPMENT, ServerProcess, oncelog, serving
from oncelog.server.operator_endpoints import METRICS_GRANT

EVENT = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
MESSAGE = "2d8e6b3a-52a5-4c70-9c2e-5d1f0a7b3c91"
WRITE = "3d8e6b3a-52a5-4c70-9c2e-5d1f0a7b3c91"


def post(url: str, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer ann"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return json.load(response)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("served"), *DEVELOPMENT) as running:
        event = {"id": EVENT, "partitions": ["orders"], "event": {"type": "x", "text": "größe"}}
        post(running.url, "/v1/events", {"events": [event]})
        post(running.url, "/v1/chats", {"chat_id": "general", "members": ["user:bob"]})
        post(running.url, "/v1/chats/general/messages", {"client_message_id": MESSAGE, "content": "Hello"})
        operations = [{"set_entity": {"key": "a", "value": "cGFpZA=="}}]
        write = {"organization": "acme", "client_id": "till", "sequence": 1, "idempotency_key": WRITE}
        post(running.url, "/v1/ledger/write", {**write, "operations": operations})
        delta = {"op": "INSERT", "table": "t", "rowId": "r", "columns": [{"column": "a", "value": 1}]}
        given = json.dumps({**delta, "hlc": "115816896921600009", "clientId": "till-2"})
        done = oncelog("deltas", "push", "shop", "--url", running.url, given=given)
        assert done.returncode == 0, done.stderr
        yield running


def run(*arguments: str, status: int = 0) -> str:
    done = RUNNER.invoke(COMMAND, [*arguments])
    assert done.exit_code == status, (done.stdout, done.stderr)
    return done.stdout


def find_message_id(url: str) -> str:
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/chats/general/messages", headers={"Authorization": "Bearer ann"}
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        message_id: str = json.load(response)["messages"][0]["message_id"]
    return message_id


@pytest.mark.parametrize(
    ("record_id", "options", "scope"),
    [
        (EVENT, ["--partition", "orders"], None),
        (EVENT, ["--partition", "other", "--partition", "orders"], None),
        (MESSAGE, ["--scope", "chat/general", "--token", "ann"], "chat/general"),
        (WRITE, ["--scope", "ledger/acme", "--client", "till"], "ledger/acme"),
    ],
)
def test_record_of_a_server_is_shown_as_that_of_its_log(
    server: ServerProcess, record_id: str, options: list[str], scope: str | None
) -> None:
    local = [server.store, record_id, *([] if scope is None else ["--scope", scope])]
    for form in ([], ["--json"]):
        assert run("show", record_id, "--url", server.url, *options, *form) == run("show", *local, *form)


def test_records_are_found_by_the_other_ids(server: ServerProcess) -> None:
    message_id = find_message_id(server.url)
    chat = ["--scope", "chat/general", "--token", "ann"]
    assert run("show", message_id, "--url", server.url, *chat) == run("show", server.store, message_id)
    pulled = json.loads(oncelog("deltas", "pull", "shop", "--url", server.url).stdout)
    shown = run("show", pulled["deltaId"], "--url", server.url, "--scope", "deltas/shop", "--json")
    assert shown == run("show", server.store, pulled["deltaId"], "--json")
    (written,) = json.loads(run("show", server.store, WRITE, "--json"))
    transaction = f"{written['record']['lane']:04x}{written['record']['position']:012x}"
    shown = run("show", transaction, "--url", server.url, "--scope", "ledger/acme", "--json")
    assert json.loads(shown)[0]["record"] == written["record"]


def test_records_are_found_by_lane_and_position(server: ServerProcess) -> None:
    for record_id, scope in ((EVENT, None), (MESSAGE, "chat/general"), (WRITE, "ledger/acme")):
        selection = [] if scope is None else ["--scope", scope]
        (shown,) = json.loads(run("show", server.store, record_id, *selection, "--json"))
        place = f"{shown['record']['lane']}:{shown['record']['position']}"
        options = ["--token", "ann", *(selection or ["--partition", "none", "--partition", "orders"])]
        (found,) = json.loads(run("show", place, "--url", server.url, *options, "--json"))
        assert found["record"] == shown["record"]


@pytest.mark.parametrize("place", ["0:0", "0:2", "1:1", "0:900"])
def test_place_without_an_event_exits_with_status_1(server: ServerProcess, place: str) -> None:
    assert run("show", place, "--url", server.url, "--partition", "orders", status=1).startswith("unknown: no record")


def test_missing_record_of_a_server_exits_with_status_1(server: ServerProcess) -> None:
    unknown = EVENT.replace("0198", "0199")
    printed = run("show", unknown, "--url", server.url, "--partition", "orders", status=1)
    assert printed.startswith("unknown: no record: it was never committed here")
    (found,) = json.loads(run("show", EVENT, "--url", server.url, "--partition", "none", "--json", status=1))
    assert found["state"] == "unknown"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "ID is missing"),
        (["show", EVENT], "give a LOG, or a server: --url, --profile, ONCELOG_URL or ONCELOG_PROFILE"),
        (["stats"], "give a LOG, or a server"),
        (["show", EVENT, "--url", "{url}"], "a server looks up an event with --partition NAME"),
        (["show", EVENT, "--url", "{url}", "--scope", "runs/1"], "a server looks up an event with --partition NAME"),
        (["show", EVENT, "--url", "{url}", "--partition", "a", "--policy", "events"], "--policy needs a LOG"),
        (["show", EVENT, "--url", "{url}", "--partition", "a", "--all"], "--all needs a LOG"),
        (
            ["show", EVENT, "--url", "{url}", "--partition", "a", "--client", "c"],
            "--client needs the scope of a ledger",
        ),
        (["show", EVENT, "--url", "{url}", "--partition", "a", "--scope", "chat/1"], "cannot be combined with --scope"),
        (
            ["show", "1:2", "--url", "{url}", "--scope", "deltas/shop"],
            "looks up a delta by its id, not by LANE:POSITION",
        ),
        (["show", "no-uuid", "--url", "{url}", "--partition", "a"], "id: must be a UUID"),
        (["show", "log.db", EVENT, "--partition", "a"], "--partition is for a server"),
        (["stats", "log.db", "--url", "{url}"], "--url is for a server and cannot be combined with LOG (log.db)"),
        (["stats", "log.db", "--profile", "a"], "--profile is for a server"),
        (["stats", "{url}"], "for a server, write --url {url}"),
    ],
)
def test_unclear_sources_are_explained(server: ServerProcess, arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(COMMAND, [one.replace("{url}", server.url) for one in arguments])
    assert done.exit_code == 2
    assert message.replace("{url}", server.url) in done.stderr


def test_record_that_does_not_match_its_block_is_refused(server: ServerProcess) -> None:
    request = urllib.request.Request(f"{server.url}/v1/events/{EVENT}?partition=orders")  # noqa: S310
    with urllib.request.urlopen(request) as response:  # noqa: S310
        found = json.load(response)
    found["proof"]["record"]["actor"] = "user:mallory"
    with scripted(lambda handler, _: answer(handler, 200, found)) as (url, _):
        done = RUNNER.invoke(COMMAND, ["show", EVENT, "--url", url, "--partition", "orders"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the record does not match its block" in done.stderr


def test_event_is_shown_without_the_fields_that_the_server_hides(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hidden")
    with serving(path, *DEVELOPMENT, "--set", "show_actors=false") as server:
        post(server.url, "/v1/events", {"events": [{"id": EVENT, "partitions": ["a"], "event": {"type": "x"}}]})
        (found,) = json.loads(run("show", EVENT, "--url", server.url, "--partition", "a", "--json"))
    assert (found["state"], found["record"]["position"], found["record"]["body"]) == ("committed", 1, '{"type":"x"}')
    assert (found["record"]["actor"], found["record"]["block_hash"]) == ("", "")


@pytest.mark.rule("CO-42")
def test_figures_of_a_server_are_those_of_its_log(server: ServerProcess) -> None:
    for form in ([], ["--json"]):
        assert run("stats", "--url", server.url, *form) == run("stats", server.store, *form)


def test_unexpected_figures_are_explained() -> None:
    def handle(handler: BaseHTTPRequestHandler, _: int) -> None:
        answer(handler, 200, {"epoch": 1})

    with scripted(handle) as (url, _):
        done = RUNNER.invoke(COMMAND, ["stats", "--url", url])
    assert done.exit_code == 2
    assert "does not answer like an Oncelog server" in done.stderr


def test_control_characters_of_a_server_do_not_reach_the_terminal(server: ServerProcess) -> None:
    figures = json.loads(run("stats", "--url", server.url, "--json"))
    figures["policies"].append("a\x1b[2J")
    figures["consumers"] = [{"scope": "\x1b[2J", "name": "\x1b[2J", "cursor": 1, "lag": 2}]
    with scripted(lambda handler, _: answer(handler, 200, figures)) as (url, _):
        printed = run("stats", "--url", url)
    assert "\\u001b[2J" in printed
    assert "\x1b" not in printed


def test_grant_for_figures_is_that_of_the_metrics() -> None:
    assert METRICS_GRANT in RUNNER.invoke(COMMAND, ["stats", "--help"], env={"COLUMNS": "300"}).stdout
