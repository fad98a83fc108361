"""Audit records on disk: `verify` checks them, older versions refuse them, and an index lists them."""

import sqlite3
from pathlib import Path

import pytest

import oncelog
from databases import POSTGRES, address_of, query
from oncelog.core.rules.audit import ERASE, READ_ONLY_ON, act_key
from oncelog.core.values import RecordAct
from oncelog.storage.verify.findings import Finding, Inconsistency, VerificationSummary
from oncelog.storage.verify.verification import verify_log

pytestmark = pytest.mark.rule("CO-43")
STREAM = "org/1"


@pytest.fixture(params=["file", POSTGRES])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "log.db") if request.param == "file" else address_of(tmp_path)


def last_finding(log: str) -> Finding:
    return list(verify_log(log))[-1]


def change(log: str, statement: str) -> None:
    if log.startswith("postgresql"):
        query(log, statement)
        return
    with sqlite3.connect(log) as connection:
        connection.execute(statement)
    connection.close()


def record_acts(log: str) -> None:
    with oncelog.open_blocking(log) as opened:
        opened.submit(oncelog.event("0192e4a0-0000-7000-8000-000000000001", {"type": "x"}, ["p"]))
        opened.submit(RecordAct(act=READ_ONLY_ON, actor="user:root", key=act_key("read_only_on", "1")))
        opened.submit(RecordAct(act=ERASE, actor="user:root", scope=STREAM))


def test_verify_counts_audit_records(log: str) -> None:
    record_acts(log)
    passed = last_finding(log)
    assert isinstance(passed, VerificationSummary)
    assert (passed.records, passed.audit_records, passed.restore_records) == (3, 2, 0)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ("actor = ''", "an audit record has no actor"),
        ("actor = 'user:eve'", "does not match its records"),
        ("client = 'c'", "has a client or a partition"),
        ("sequence = 7", "has a sequence"),
        ("scope = 'org/2'", "belongs in another lane|does not match its records"),
        ("policy = 'events'", "belongs in another lane|sequence 0 cannot be|does not match its records"),
    ],
)
def test_verify_finds_a_changed_audit_record(log: str, changes: str, finding: str) -> None:
    record_acts(log)
    change(log, f"UPDATE oncelog_records SET {changes} WHERE policy = 'oncelog.audit' AND scope <> ''")  # noqa: S608
    lie = last_finding(log)
    assert isinstance(lie, Inconsistency)
    assert any(part in lie.message for part in finding.split("|")), lie.message


def test_verify_finds_a_missing_index_of_audit_records(log: str) -> None:
    record_acts(log)
    change(log, "DROP INDEX oncelog_records_internal")
    lie = last_finding(log)
    assert isinstance(lie, Inconsistency)
    assert "oncelog_records_internal" in lie.message


def test_verify_finds_an_act_that_was_recorded_twice(log: str) -> None:
    record_acts(log)
    with oncelog.open_blocking(log) as opened:
        opened.submit(RecordAct(act=READ_ONLY_ON, actor="user:root", key=act_key("read_only_on", "2")))
    key = act_key("read_only_on", "1").hex()
    literal = f"'\\x{key}'" if log.startswith("postgresql") else f"x'{key}'"
    change(log, f"UPDATE oncelog_records SET key = {literal} WHERE policy = 'oncelog.audit' AND scope = ''")  # noqa: S608
    assert isinstance(last_finding(log), Inconsistency)
