"""After `oncelog restore` and `oncelog epoch --renew`, no number is assigned a second time."""

import json
import sqlite3
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER
from cli.server_process import serving
from cli.test_epoch import run_postgres_tool
from core.item_builders import DAY_MS, event, message, transaction
from databases import BOTH_STORES, POSTGRES, address_of, is_postgres, log_at, query, server_address
from oncelog.core.chat import format_message_id
from oncelog.core.policy import EVENTS, LEDGER, RESTORE_POLICY
from oncelog.core.rules.leaps import LEAP_MIN
from oncelog.core.transactions import format_tx_id
from oncelog.core.values import Committed, Item, Receipt, Request, SetMember, Settings
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from server.cli_commands import oncelog as run_command

CHAT_1, LEDGER_1 = "chat/1", "ledger/acme"


def run(*arguments: object) -> str:
    done = RUNNER.invoke(COMMAND, [*map(str, arguments)])
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return done.stdout


def submit(log: str, items: Sequence[Item]) -> list[Receipt]:
    with oncelog.open_blocking(log) as opened:
        verdicts = opened.submit_many(items)
    return [verdict.receipt for verdict in verdicts if isinstance(verdict, Committed)]


def history(first: int, count: int) -> list[Item]:
    """Return `count` events, `count` messages and `count` transactions, numbered from `first`."""
    numbers = range(first, first + count)
    return [
        *(event(number, f"e{number}", partitions=("orders",), body=b'{"type":"tick"}') for number in numbers),
        *(message(number, f"m{number}", scope=CHAT_1) for number in numbers),
        *(transaction(number, number, scope=LEDGER_1, content=f"t{number}") for number in numbers),
    ]


def restore_to_backup(log: str, tmp_path: Path, lost: Sequence[Item], *renew: str) -> list[Receipt]:
    """Back up the log, commit the `lost` items, and restore. Return the receipts of the lost commits."""
    if not is_postgres():
        run("backup", log, tmp_path / "backup.db")
        receipts = submit(log, lost)
        run("restore", tmp_path / "backup.db", log, "--force", *renew)
        return receipts
    schema, dump = log.rpartition("=")[2], tmp_path / "log.dump"
    run_postgres_tool(
        "pg_dump", "--format=custom", f"--schema={schema}", f"--file={dump}", f"--dbname={server_address()}"
    )
    receipts = submit(log, lost)
    query(log, f"DROP SCHEMA {schema} CASCADE")
    run_postgres_tool("pg_restore", f"--dbname={server_address()}", str(dump))
    run("epoch", log, "--renew", *renew)
    return receipts


def numbers(receipts: Sequence[Receipt]) -> set[Any]:
    """Return every number that callers may have stored from the receipts."""
    found: set[Any] = set()
    for one in receipts:
        found |= {("position", one.lane, one.position), ("height", one.lane, one.height)}
        found |= {("tx", format_tx_id(one.lane, one.position)), ("message", format_message_id(one.lane, one.position))}
        found |= {("sequence", one.lane, one.sequence)} if one.sequence else set()
    return found


@pytest.mark.rule("CO-12", "EV-3", "CH-2")
@BOTH_STORES
def test_numbers_of_the_lost_history_are_not_reused(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    earlier = submit(log, [SetMember(CHAT_1, "user:ann"), *history(1, 14)])
    assert [one.position for one in earlier[:14]] == [*range(1, 15)]
    lost = restore_to_backup(log, tmp_path, history(15, 5))
    assert [one.position for one in lost[:5]] == [*range(15, 20)]
    new = submit(log, history(15, 5))
    assert len(new) == len(lost) == 15
    assert not numbers(new) & numbers([*lost, *earlier])
    assert min(one.position for one in new) > LEAP_MIN
    assert [one.client_sequence for one in new[10:]] == [*range(15, 20)]
    with oncelog.open_blocking(log) as opened:
        # A client that has read the lost events and sends no epoch still receives every event after the restore.
        seen = [record for record in opened.read(after=19).records if record.policy == EVENTS.name]
    assert [record.position for record in seen] == [one.position for one in new[:5]]
    assert json.loads(run("verify", log, "--json"))["ok"]


@pytest.mark.rule("CO-12", "EV-3")
def test_reader_of_the_server_without_an_epoch_gets_the_events_after_a_restore(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    submit(log, [SetMember(CHAT_1, "user:ann"), *history(1, 14)])
    restore_to_backup(log, tmp_path, history(15, 5), "--above=5000")
    submit(log, history(15, 2))
    with serving(tmp_path) as server:
        with urllib.request.urlopen(f"{server.url}/v1/events?partition=orders&since=19&limit=1") as answer:  # noqa: S310
            page = json.load(answer)
        assert [one["committed_id"] for one in page["events"]] == [5002]
        assert page["has_more"]
        since = page["next_since_committed_id"]
        with urllib.request.urlopen(f"{server.url}/v1/events?partition=orders&since={since}") as answer:  # noqa: S310
            page = json.load(answer)
        assert ([one["committed_id"] for one in page["events"]], page["has_more"]) == ([5003], False)


@pytest.mark.rule("CO-12")
def test_second_restore_continues_above_the_log_that_it_replaces(tmp_path: Path) -> None:
    log, backup = tmp_path / "log.db", tmp_path / "backup.db"
    submit(str(log), [event(1, "e1")])
    run("backup", log, backup)
    assigned = [one.position for one in submit(str(log), [event(2, "e2")])]
    first = replaced = run("epoch", log).strip()
    for number, above in enumerate(((), (), ("--above=50000000",), (), ()), 3):
        run("restore", backup, log, "--force", *above)
        with oncelog.open_blocking(log) as opened:
            assert set(opened._portal.call(opened._log.previous_epochs)) == {first, replaced}
        replaced = run("epoch", log).strip()
        assigned += [one.position for one in submit(str(log), [event(number, f"e{number}")])]
    assert assigned == sorted(set(assigned))
    refused = RUNNER.invoke(COMMAND, ["restore", str(backup), str(log), "--force", "--above=2000000"])
    assert refused.exit_code == 2
    assert f"above must be at least {assigned[-1]}" in refused.stderr
    assert json.loads(run("verify", log, "--json"))["ok"]


@pytest.mark.rule("CO-12")
@BOTH_STORES
def test_record_counts_exclude_skipped_positions(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    sample_log.make_log(log if is_postgres() else Path(log), rounds=3)
    before = json.loads(run("stats", log, "--json"))
    run("epoch", log, "--renew", "--above=1000000")
    run("epoch", log, "--renew", "--above=2000000")
    after = json.loads(run("stats", log, "--json"))
    assert (after["records"], after["blocks"]) == (before["records"] + 10, before["blocks"] + 10)
    lags = {one["name"]: one["lag"] for one in before["consumers"]}
    assert {one["name"]: one["lag"] for one in after["consumers"]} == {**lags, "mailer": lags["mailer"] + 2}
    verified = json.loads(run("verify", log, "--json"))
    assert verified["records"] == after["records"]
    assert verified["restore_records"] == after["restore_records"] == 10
    audited = before["audit_records"]
    words = f"{before['records'] - audited} records and 10 restore records and {audited} audit records in "
    assert run("verify", log).startswith(f"ok: {words}5 lanes, ")
    assert f" {words}{after['blocks']} blocks, " in run("stats", log)


@pytest.mark.rule("CO-12", "LG-15")
@BOTH_STORES
async def test_verify_finds_the_last_eviction_before_a_leap(tmp_path: Path) -> None:
    log, clock, settings = log_at(tmp_path / "log.db"), ManualClock(), Settings(lanes=1, eviction_interval=10)
    store: Store = (
        PostgresStore(log, settings, clock=clock) if is_postgres() else SqliteStore(log, settings, clock=clock)
    )
    await store.open()
    try:
        await store.declare([LEDGER])
        await store.commit([Request((transaction(1, 1),))])
        clock.advance(2 * DAY_MS)
        await store.commit([Request(tuple(transaction(number, number, client="other") for number in range(1, 10)))])
        await store.renew_epoch(95)
        # The client was forgotten at position 10. Position 90, the last multiple of the interval, has no record.
        decided = await store.commit([Request((transaction(1, 1),))])
        assert isinstance(decided.verdicts[0][0], Committed)
    finally:
        await store.close()
    verified = await run_command("verify", log)
    assert verified.exit_code == 0, verified.output


@pytest.mark.rule("CO-12")
def test_backup_of_a_restored_log_is_restored_again(tmp_path: Path) -> None:
    log, again = tmp_path / "log.db", tmp_path / "again.db"
    sample_log.make_log(log, rounds=3)
    run("epoch", log, "--renew", "--above=1000000")
    records = json.loads(run("stats", log, "--json"))["records"]
    assert run("backup", log, tmp_path / "backup.db").startswith(f"{records} records,")
    output = run("restore", tmp_path / "backup.db", again, "--full", "--above=7000000")
    assert "numbers continue above 7000000\n" in output
    assert json.loads(run("verify", again, "--json"))["records"] == records + 5


@pytest.mark.rule("CO-12")
@pytest.mark.stores(POSTGRES)
def test_restored_log_is_moved_with_its_leaps_and_floors(tmp_path: Path) -> None:
    log, target = tmp_path / "log.db", address_of(tmp_path / "target")
    submit(str(log), [SetMember(CHAT_1, "user:ann"), *history(1, 3)])
    run("epoch", log, "--renew", "--above=1000")
    submit(str(log), history(4, 1)[:1])
    records = json.loads(run("stats", log, "--json"))["records"]
    assert run("move", log, target).startswith(f"{records} records ")
    assert json.loads(run("verify", target, "--json"))["records"] == records
    sequences = [one.sequence for one in submit(target, history(4, 1)[1:])]
    assert sequences == [1001, 1001]
    assert json.loads(run("verify", target, "--json"))["ok"]


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE oncelog_state SET leaps = NULL", "is missing (the next one has height 1001)"),
        ("UPDATE oncelog_state SET leaps = '[1000,2000]'", "has 1 restore records, but the log has 2 leaps"),
        ("UPDATE oncelog_state SET leaps = '[1000,900]'", "are not in ascending order"),
        ("DELETE FROM oncelog_floors", "has no floor"),
        ("UPDATE oncelog_floors SET floor = floor - 1", "but the last leap is 1000"),
        ("INSERT INTO oncelog_floors SELECT lane, scope || 'x', floor FROM oncelog_floors", "in the table of streams"),
        ("UPDATE oncelog_records SET actor = 'user:eve' WHERE policy = 'oncelog.restore'", "has the actor 'user:eve'"),
        ("UPDATE oncelog_records SET policy = 'events' WHERE policy = 'oncelog.restore'", "position of a restore"),
        ("UPDATE oncelog_records SET scope = 'x' WHERE policy = 'oncelog.restore'", "has a scope, a key"),
    ],
)  # fmt: skip
def test_gap_is_valid_only_at_a_restore_record(statement: str, finding: str, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    submit(str(log), [SetMember(CHAT_1, "user:ann"), *history(1, 2)])
    run("epoch", log, "--renew", "--above=1000")
    assert json.loads(run("verify", log, "--json"))["ok"]
    with closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute(statement)
    done = RUNNER.invoke(COMMAND, ["verify", str(log)])
    assert done.exit_code == 1
    assert finding in done.stdout


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE oncelog_lanes SET position = position + 10", "begins at position"),
        ("UPDATE oncelog_lanes SET height = height + 10", "is missing"),
        (
            "INSERT INTO oncelog_floors SELECT lane, scope, 5000 FROM oncelog_streams",
            "sequence 5001 of 'chat/1' follows",
        ),
        ("UPDATE oncelog_streams SET sequence = sequence + 1", "sequence 1003 of 'chat/1' follows 1001"),
    ],
)
def test_gap_at_another_record_is_found_despite_correct_hashes(statement: str, finding: str, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    submit(str(log), [SetMember(CHAT_1, "user:ann"), *history(1, 2)])
    run("epoch", log, "--renew", "--above=1000")
    submit(str(log), history(3, 1))
    with closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute(statement)
    submit(str(log), history(4, 1))
    done = RUNNER.invoke(COMMAND, ["verify", str(log)])
    assert done.exit_code == 1
    assert finding in done.stdout


@pytest.mark.rule("CO-12")
def test_proof_and_show_report_positions_that_a_restore_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    submit(str(log), history(1, 3)[:3])
    run("epoch", log, "--renew", "--above=1000")
    done = RUNNER.invoke(COMMAND, ["proof", str(log), "0:500"])
    assert (done.exit_code, "a restore skipped lane 0, positions 4 to 1000" in done.stderr) == (1, True)
    done = RUNNER.invoke(COMMAND, ["show", str(log), "0:500"])
    assert (done.exit_code, "a restore skipped lane 0, positions 4 to 1000" in done.stdout) == (1, True)
    assert run("show", log, "0:1001").startswith("committed: the log was restored: its numbers continue above 1000\n")
    document = json.loads(run("proof", log, "0:1001"))
    assert document["record"]["policy"] == RESTORE_POLICY
    (tmp_path / "proof.json").write_text(json.dumps(document))
    (tmp_path / "head.json").write_text(run("head", log))
    assert "proven" in run("proof", "--check", tmp_path / "proof.json", "--head", tmp_path / "head.json")
