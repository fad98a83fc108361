"""`oncelog show` with only a key searches for the policy, scope and client, in both stores."""

import json
import shlex
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER
from core.item_builders import delta, event, key, message, result, transaction
from databases import address_of
from oncelog.core.chat import format_message_id, parse_message_id
from oncelog.core.policy import RUNS
from oncelog.core.transactions import format_tx_id
from oncelog.core.values import Claim, KeyIdentity, SetMember
from oncelog.storage import key_search
from oncelog.storage.inspect import postgres as postgres_inspecting
from oncelog.storage.inspect import sqlite as sqlite_inspecting
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.key_search import KeyMatches, KeyQuery, search_keys
from oncelog.storage.queries.records import load_heads
from oncelog.storage.verify.findings import StepProgress
from oncelog.storage.verify.side_state import decode_policies

EVENT, PROJECT_EVENT, MESSAGE, WRITE, DELTA, RUN, LEASE = range(101, 108)
SHARED = 120
"""Number of a key that a message, an event and two runs share."""


@pytest.fixture(scope="module", params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    directory = tmp_path_factory.mktemp("search")
    place = directory / "log.db" if request.param == "file" else address_of(directory)
    sample_log.make_log(place, rounds=6)
    sample_log.append(
        place,
        SetMember("chat/g", "user:ann"),
        msgspec.structs.replace(event(EVENT), client="device 1"),
        msgspec.structs.replace(event(PROJECT_EVENT), scope="project/x"),
        message(MESSAGE, scope="chat/g"),
        transaction(WRITE, 1, client="till 1", scope="ledger/acme"),
        msgspec.structs.replace(delta(DELTA), client="till 2"),
        result(RUN, scope="campaign/7"),
        message(SHARED, scope="chat/g"),
        event(SHARED),
        result(SHARED, scope="campaign/7"),
        result(SHARED, scope="it's a campaign"),
        Claim(policy=RUNS, scope="campaign/8", key=key(LEASE), fingerprint=b"", holder="worker"),
    )
    return place


@pytest.fixture(params=["records", "index"])
def search_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search by scanning the records, as in small logs, or with the key index, as in large logs."""
    if request.param == "index":
        monkeypatch.setattr(key_search, "SCAN_RECORDS_MAX", -1)


def show(log: Path | str, *arguments: str) -> tuple[int, str]:
    done = RUNNER.invoke(COMMAND, ["show", str(log), *arguments])
    assert done.stderr == ""
    return done.exit_code, done.stdout


def show_json(log: Path | str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status, output = show(log, *arguments, "--json")
    return status, json.loads(output)


def find_by_proof(log: Path | str, *arguments: str) -> tuple[str, str]:
    """Return the policy and key of the record that `oncelog proof` finds."""
    done = RUNNER.invoke(COMMAND, ["proof", str(log), *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    record = json.loads(done.stdout)["record"]
    return record["policy"], record["key"]


def search(log: Path | str, number: int) -> KeyMatches:
    with create_inspector(str(log)).open_view() as view:
        wanted = KeyQuery((key(number),), tuple(decode_policies(view.iterate_rows("policies")).values()))
        return search_keys(view, wanted, lambda _: None)


@pytest.mark.usefixtures("search_method")
@pytest.mark.parametrize(
    ("given", "policy", "scope", "client"),
    [
        (str(UUID(int=EVENT)), "events", "", ""),
        (str(UUID(int=PROJECT_EVENT)), "events", "project/x", ""),
        (str(UUID(int=MESSAGE)), "chat", "chat/g", ""),
        (key(WRITE).hex(), "ledger", "ledger/acme", "till 1"),
        (str(UUID(int=WRITE)).upper(), "ledger", "ledger/acme", "till 1"),
        (key(DELTA, 32).hex(), "deltas", "gateway/1", ""),
        (key(RUN).hex(), "runs", "campaign/7", ""),
    ],
)
def test_show_finds_a_write_by_its_key_alone(log: Path | str, given: str, policy: str, scope: str, client: str) -> None:
    status, [one] = show_json(log, given)
    assert status == 0
    assert (one["state"], one["policy"], one["scope"], one["client"]) == ("committed", policy, scope, client)
    assert (one["record"]["policy"], one["record"]["scope"]) == (policy, scope)
    assert show_json(log, given, "--all") == (0, [one])
    assert find_by_proof(log, given) == find_by_proof(log, given, "--all") == (policy, one["record"]["key"])


def test_show_and_proof_find_a_ledger_write_by_its_transaction_id(log: Path | str) -> None:
    _, [one] = show_json(log, key(WRITE).hex())
    id_text = format_tx_id(one["record"]["lane"], one["record"]["position"])
    assert show_json(log, id_text) == show_json(log, id_text.upper()) == (0, [one])
    assert find_by_proof(log, id_text) == ("ledger", key(WRITE).hex())
    for reading in ("--hex", "--text"):
        assert show_json(log, id_text, reading)[0] == 1, "the id is treated as a key"
    for other in (format_tx_id(0, 1), "f" * 16):  # an event, and a missing record
        assert show_json(log, other)[1][0]["state"] == "unknown"


def test_show_finds_a_message_by_its_id(log: Path | str) -> None:
    _, [one] = show_json(log, key(MESSAGE).hex())
    id_text = format_message_id(one["record"]["lane"], one["record"]["position"])
    assert show_json(log, id_text) == (0, [one])
    assert find_by_proof(log, id_text) == ("chat", key(MESSAGE).hex())
    done = RUNNER.invoke(COMMAND, ["proof", str(log), format_message_id(0, 1)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no message: the record there has the policy 'events'; to see it, use the ID 0:1" in done.stderr
    status, output = show(log, format_message_id(0, 1))
    assert status == 1
    assert "no message: the record there has the policy 'events'; to see it, use the ID 0:1. " in output
    assert show(log, format_message_id(99, 1))[1].startswith("unknown: no record: lane 99 does not exist; ")
    for wrong in ("msg_", "msg_1", id_text.upper().replace("MSG", "msg") + "0", "msg_" + "g" * 26):
        done = RUNNER.invoke(COMMAND, ["show", str(log), wrong])
        assert done.exit_code == 2
        assert "is not the id of a message" in done.stderr
    done = RUNNER.invoke(COMMAND, ["show", str(log), id_text, "--scope", "chat/g"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{id_text} is the place of a record: --scope needs a key." in done.stderr


@pytest.mark.usefixtures("search_method")
def test_show_lists_all_writes_with_a_key_and_the_options_that_select_one(log: Path | str) -> None:
    status, output = show(log, key(SHARED).hex())
    assert status == 3
    first, *lines = output.splitlines()
    assert first == "ambiguous: 4 writes have this key. Choose one with these options:"
    choices = [shlex.split(line) for line in lines[::2]]
    assert choices == [
        ["--policy", "chat", "--scope", "chat/g"],
        ["--policy", "events", "--scope", ""],
        ["--policy", "runs", "--scope", "campaign/7"],
        ["--policy", "runs", "--scope", "it's a campaign"],
    ]
    assert all(line.startswith("      committed: committed as ") for line in lines[1::2])
    status, listed = show_json(log, key(SHARED).hex())
    assert status == 3
    assert [show_json(log, key(SHARED).hex(), *choice) for choice in choices] == [(0, [one]) for one in listed]
    assert [one["policy"] for one in show_json(log, key(SHARED).hex(), "--policy", "runs")[1]] == ["runs", "runs"]


@pytest.mark.usefixtures("search_method")
def test_show_narrows_the_search_by_scope_or_client_alone(log: Path | str) -> None:
    assert show_json(log, key(SHARED).hex(), "--scope", "chat/g")[1][0]["policy"] == "chat"
    assert show_json(log, key(WRITE).hex(), "--client", "till 1")[0] == 0
    assert show_json(log, key(WRITE).hex(), "--scope", "ledger/acme")[0] == 0
    assert show_json(log, key(WRITE).hex(), "--client", "another")[0] == 1
    assert show_json(log, key(WRITE).hex(), "--scope", "ledger/other")[0] == 1


@pytest.mark.usefixtures("search_method")
def test_show_finds_a_lease_by_its_key_alone(log: Path | str) -> None:
    status, [one] = show_json(log, key(LEASE).hex())
    assert (status, one["policy"], one["scope"]) == (1, "runs", "campaign/8")
    assert one["lease"]["holder"] == "worker"


@pytest.mark.usefixtures("search_method")
def test_show_lists_the_searched_places_for_an_unknown_key(log: Path | str) -> None:
    status, output = show(log, key(999).hex())
    assert status == 1
    with create_inspector(str(log)).open_view() as view:
        records = sum(head.position for head in view.run_query(load_heads).values())
    never = "unknown: no record: it was never committed here, or it was refused, which leaves no trace. "
    everywhere = "under chat, deltas, events, ledger, notes, runs, for the key in hex and the key with this text"
    assert output == f"{never}Searched: all {records} records, and all leases, {everywhere}\n"
    exact = ("--policy", "chat", "--scope", "chat/g", "--hex")
    assert show(log, key(999).hex(), *exact) == (
        1,
        f"{never}Searched: the key index under chat in the scope 'chat/g', for the key in hex\n",
    )


def test_index_and_records_give_the_same_writes(log: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys belong to scopes that the log lists in a table."""
    monkeypatch.setattr(key_search, "SCAN_RECORDS_MAX", -1)
    keys = [key(number) for number in (*range(1, 14), 20, 60, EVENT, MESSAGE, WRITE, RUN, SHARED)]
    with create_inspector(str(log)).open_view() as view:
        policies = tuple(decode_policies(view.iterate_rows("policies")).values())
        for one in (*keys, key(1, 4), key(1, 32)):
            wanted = KeyQuery((one,), policies)
            indexed = search_keys(view, wanted, lambda _: None)
            read = search_keys(view, wanted, lambda _: None, read_all=True)
            assert indexed.identities == read.identities != ()
            assert (indexed.records_read is None, read.records_read is None) == (True, False)


def test_search_scans_all_records_if_too_many_identities_are_known(
    log: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_search, "SCAN_RECORDS_MAX", -1)
    assert search(log, MESSAGE).records_read is None
    monkeypatch.setattr(key_search, "INDEX_IDENTITIES_MAX", 3)
    again = search(log, MESSAGE)
    assert again.records_read is not None
    assert again.identities == (("chat", "chat/g", "", key(MESSAGE)),)


def test_search_queries_the_index_in_batches_and_reads_pages(log: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: tuple[KeyIdentity, ...] = search(log, SHARED).identities
    for module in (sqlite_inspecting, postgres_inspecting):
        monkeypatch.setattr(module, "SCAN_PAGE_RECORDS", 3)
    progress: list[StepProgress] = []
    with create_inspector(str(log)).open_view() as view:
        wanted = KeyQuery((key(SHARED),), tuple(decode_policies(view.iterate_rows("policies")).values()))
        read = search_keys(view, wanted, progress.append)
    assert read.identities == expected
    assert len(progress) > (read.records_read or 0) // 3
    assert [one.done for one in progress] == sorted(one.done for one in progress)
    monkeypatch.setattr(key_search, "SCAN_RECORDS_MAX", -1)
    monkeypatch.setattr(key_search, "_BATCH_IDENTITIES", 2)
    assert search(log, SHARED) == KeyMatches(expected)


def test_search_stops_after_too_many_matches(log: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("oncelog.storage.key_search.MATCHES_MAX", "oncelog.cli.record_lookup.MATCHES_MAX"):
        monkeypatch.setattr(name, 2)
    assert len(search(log, SHARED).identities) > key_search.MATCHES_MAX
    status, output = show(log, key(SHARED).hex())
    assert status == 3
    assert output.startswith("ambiguous: more than 2 writes have this key. Choose one with these options:\n")
    assert output.count("--policy") == 2


def test_show_finds_no_key_in_an_empty_log(tmp_path: Path) -> None:
    for place in (tmp_path / "log.db", address_of(tmp_path)):
        sample_log.make_log(place, rounds=0)
        assert show_json(place, key(999).hex())[0] == 1


@pytest.mark.parametrize(("lane", "position"), [(0, 1), (3, 7), (2**15 - 1, 2**48 - 1)])
def test_show_derives_lane_and_position_from_a_message_id(lane: int, position: int) -> None:
    assert parse_message_id(format_message_id(lane, position)) == (lane, position)


UUID_TEXT = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
ORDER, HEX_LIKE, PLACE_LIKE, MESSAGE_LIKE, LEASED = "order/17 für Zoë", "cafe", "0:1", "msg_1", "order-18"


@pytest.fixture(scope="module", params=["file", "database"])
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """A log with `once` calls under text keys, and writes whose keys are the bytes that two of the texts encode."""
    directory = tmp_path_factory.mktemp("calls")
    place = directory / "log.db" if request.param == "file" else address_of(directory)
    with oncelog.open_blocking(str(place)) as log:

        @oncelog.once(log, name="charge", key=lambda order: order)
        def charge(order: str) -> str:
            return f"charged {order}"

        @oncelog.once(log, name="raw", key=bytes.fromhex)
        def raw(order: str) -> str:
            return f"raw {order}"

        for order in (ORDER, UUID_TEXT, HEX_LIKE, PLACE_LIKE, MESSAGE_LIKE):
            charge(order)
        raw(HEX_LIKE)
        log.submit(event(1))
        work = oncelog.work_of(charge, LEASED)
        log.submit(Claim(policy=work.policy, scope=work.scope, key=work.key, fingerprint=b"", holder="worker"))
    return place


@pytest.mark.usefixtures("search_method")
@pytest.mark.parametrize("given", [[ORDER], [UUID_TEXT], [PLACE_LIKE, "--text"], [MESSAGE_LIKE, "--text"]])
def test_show_finds_a_once_call_by_its_text_key(calls: Path | str, given: list[str]) -> None:
    status, [one] = show_json(calls, *given)
    assert (status, one["state"], one["policy"], one["scope"]) == (0, "committed", "once.charge", "once/charge")
    assert bytes.fromhex(one["record"]["key"]).decode() == given[0]
    assert show_json(calls, given[0], "--text", "--scope", "once/charge") == (0, [one])
    assert f"key as text:    {given[0]}\n" in show(calls, *given)[1]
    assert find_by_proof(calls, *given) == ("once.charge", one["record"]["key"])


@pytest.mark.usefixtures("search_method")
def test_show_finds_the_lease_of_a_once_call_by_its_text_key(calls: Path | str) -> None:
    status, [one] = show_json(calls, LEASED)
    assert (status, one["state"], one["lease"]["holder"]) == (1, "leased", "worker")


@pytest.mark.usefixtures("search_method")
def test_show_lists_a_key_in_hex_and_a_key_with_the_same_text(calls: Path | str) -> None:
    status, output = show(calls, HEX_LIKE)
    assert status == 3
    first, *lines = output.splitlines()
    assert first == "ambiguous: 2 writes have this key. Choose one with these options:"
    choices = [shlex.split(line) for line in lines[::2]]
    assert choices == [
        ["--policy", "once.charge", "--scope", "once/charge", "--text"],
        ["--policy", "once.raw", "--scope", "once/raw", "--hex"],
    ]
    for choice in choices:
        status, [one] = show_json(calls, HEX_LIKE, choice[-1])
        assert (status, one["policy"]) == (0, choice[1])
        assert show_json(calls, HEX_LIKE, *choice) == (0, [one])
        assert find_by_proof(calls, HEX_LIKE, *choice)[0] == choice[1]


def test_show_suggests_an_option_for_a_text_key_that_looks_like_a_position(calls: Path | str) -> None:
    assert show_json(calls, PLACE_LIKE)[1][0]["policy"] == "events"
    status, output = show(calls, "0:99")
    assert (status, output) == (
        1,
        "unknown: no record: lane 0 has positions 1 to 1. If the ID is the text of a key, add --text\n",
    )
    done = RUNNER.invoke(COMMAND, ["show", str(calls), MESSAGE_LIKE])
    assert done.exit_code == 2
    assert done.stderr.endswith("If it is the text of a key, add --text.\n")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["not hex", "--hex"], "'not hex' is neither a UUID nor a key in hex, as --hex requires."),
        (["k" * 256], "the ID cannot be a key: a key must have 1 to 255 bytes, not 256."),
        (["ab" * 200, "--text"], "the ID cannot be a key: a key must have 1 to 255 bytes, not 400."),
        ([""], "the ID cannot be a key: a key must have 1 to 255 bytes, not 0."),
    ],
)
def test_show_refuses_an_id_that_cannot_be_a_key(calls: Path | str, given: list[str], error: str) -> None:
    done = RUNNER.invoke(COMMAND, ["show", str(calls), *given])
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"oncelog: {error}\n")
