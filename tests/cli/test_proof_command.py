"""`oncelog proof` prints and checks proof documents of logs in files and databases."""

import hashlib
import json
import os
import shlex
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import oncelog
from cli import sample_log
from cli.runner import COMMAND, RUNNER, Result
from cli.server_process import oncelog as oncelog_process
from core.item_builders import key
from databases import BOTH_STORES, log_at, query
from oncelog.cli import files
from oncelog.core.operations import DeleteEntity, Operation, Relate, SetEntity
from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.transactions import format_tx_id, ledger_scope, transaction
from oncelog.core.values import Committed, Receipt, Submission
from oncelog.file_modes import open_new
from oncelog.proof import decode, encode, proof_document, verify
from oncelog.storage.metadata import DAMAGE_HINT

SIZES = (1, 2, 3, 7, 8, 9, 64)
SCOPE = ledger_scope("acme", "größe")
PLACE = ["--lane", "0", "--position", "1"]


def invoke(*arguments: str, given: bytes | None = None) -> Result:
    return RUNNER.invoke(COMMAND, ["proof", *arguments], input=given)


def print_proof(*arguments: str) -> bytes:
    """Return the document that the command prints."""
    done = invoke(*arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert done.stdout.count("\n") == 1
    return done.stdout.encode()


def expect_refusal(*arguments: str, given: bytes | None = None, status: int = 2) -> str:
    """Return the one-line error of the command."""
    done = invoke(*arguments, given=given)
    assert done.exit_code == status, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("oncelog: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("oncelog: ").rstrip("\n")


def check_document(data: bytes, *arguments: str) -> tuple[int, str]:
    done = invoke("--check", "-", *arguments, given=data)
    assert done.stderr == ""
    return done.exit_code, done.stdout


def build_event(number: int) -> Submission:
    partitions = ["größe", "orders/7"][: 1 + number % 2]
    return oncelog.event(uuid.UUID(int=number), {"type": "tick", "n": number, "text": "Grüße"}, partitions)


def build_transaction(number: int, *, with_key: bool = True) -> Submission:
    operations: list[Operation] = [SetEntity(f"balance:{number}", b"\xff" * number), Relate("doc:1", "owner", "zoë")]
    if number % 2:
        operations.append(DeleteEntity("old"))
    return transaction(SCOPE, "till-ä", number, operations, key=key(number) if with_key else b"", actor="user:zoë")


def commit_batches(log: str, *batches: list[Submission]) -> list[list[Receipt]]:
    """Commit each batch together and return the receipts."""
    receipts = []
    with oncelog.open_blocking(log) as opened:
        for batch in batches:
            verdicts = opened.submit_many(batch)
            assert all(isinstance(one, Committed) for one in verdicts)
            receipts.append([one.receipt for one in verdicts if isinstance(one, Committed)])
    return receipts


# --- documents of logs --------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("LG-18")
def test_records_of_blocks_of_any_size_are_proven(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    batches, number = list[list[Submission]](), 0
    for size in SIZES:
        numbers = range(number + 1, number + size + 1)
        batches += [
            [build_event(one) for one in numbers],
            [build_transaction(one, with_key=one % 4 > 0) for one in numbers],
        ]
        number += size
    receipts = commit_batches(log, *batches)
    head = tmp_path / "head.json"
    head.write_text(RUNNER.invoke(COMMAND, ["head", log]).stdout)
    newest = {one["lane"]: one["block_hash"] for one in json.loads(head.read_text())["lanes"]}
    for batch, submissions in zip(receipts, batches, strict=True):
        # First, second, middle and last record. The core's tests cover every index.
        for index in sorted({0, 1, len(batch) // 2, len(batch) - 1} & set(range(len(batch)))):
            receipt, submission = batch[index], submissions[index]
            data = print_proof(log, "--lane", str(receipt.lane), "--position", str(receipt.position))
            if submission.policy is oncelog.LEDGER:
                assert print_proof(log, format_tx_id(receipt.lane, receipt.position)) == data
            document = decode(data)
            assert (document.index, document.count) == (index, len(batch))
            assert (document.record.height, document.body) == (receipt.height, submission.body)
            assert document.record.partitions == submission.partitions
            assert verify(document).is_valid
        is_newest = document.block.hash == newest[receipt.lane]
        assert check_document(data, "--head", str(head))[0] == (0 if is_newest else 1)
        assert is_newest is (len(batch) == SIZES[-1])


@BOTH_STORES
def test_proof_command_and_library_return_the_same_document(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    [[first, second]] = commit_batches(log, [build_event(1), build_transaction(1)])
    with oncelog.open_blocking(log) as opened:
        for receipt in (first, second):
            data = encode(proof_document(opened.prove(receipt)))
            assert print_proof(log, f"{receipt.lane}:{receipt.position}") == data + b"\n"


@BOTH_STORES
@pytest.mark.rule("LG-18", "CO-41")
def test_erased_record_has_a_proof_without_its_body(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    [receipts] = commit_batches(log, [build_event(number) for number in (1, 2, 3)])
    before = decode(print_proof(log, "0:2"))
    with oncelog.open_blocking(log) as opened:
        assert opened.erase(key=uuid.UUID(int=2)) == 1
    data = print_proof(log, "0:2")
    after = decode(data)
    assert (after.salt, after.body) == (None, None)
    assert (after.record, after.body_hash, after.path, after.block) == (
        *(before.record, before.body_hash, before.path, before.block),
    )
    status, output = check_document(data, "--block-hash", after.block.hash)
    assert status == 0
    assert "body:           erased: only the header and the body hash are proven" in output
    # The other records of the block keep their bodies and proofs.
    assert verify(decode(print_proof(log, "0:1"))).is_valid
    assert decode(print_proof(log, "0:3")).body == build_event(3).body
    assert len(receipts) == 3


@BOTH_STORES
def test_proof_does_not_change_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    log = log_at(path)
    commit_batches(log, [build_event(1), build_transaction(1)])

    def state() -> Any:
        if log == str(path):
            return hashlib.sha256(path.read_bytes()).digest(), sorted(one.name for one in tmp_path.iterdir())
        tables = [
            name for (name,) in query(log, "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()")
        ]
        return [query(log, f"SELECT t::text, xmin::text FROM {table} t ORDER BY 1") for table in sorted(tables)]  # noqa: S608

    before = state()
    assert print_proof(log, *PLACE)
    assert print_proof(log, str(uuid.UUID(int=1)), "--policy", "events")
    assert state() == before


@BOTH_STORES
def test_records_of_an_open_log_can_be_proven(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    with oncelog.open_blocking(log) as opened:
        opened.submit(build_event(1))
        assert verify(decode(print_proof(log, *PLACE))).is_valid
        opened.submit(build_event(2))
        assert verify(decode(print_proof(log, "0:2"))).is_valid


@BOTH_STORES
def test_proof_finds_a_record_by_its_key(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    notes = oncelog.Policy(
        name="notes",
        key_bytes=(1, 64),
        order=oncelog.Order.LANE,
        on_reuse=oncelog.OnReuse.REPLAY,
        retention=oncelog.FOREVER,
    )
    note = Submission(policy=notes, scope="", key=b"12345678", fingerprint=b"", body=b"text")
    commit_batches(log, [build_event(1), build_transaction(1), note, replace(note, key=uuid.UUID(int=1).bytes)])
    event = print_proof(log, "0:1")
    assert print_proof(log, str(uuid.UUID(int=1)), "--policy", "events") == event
    assert print_proof(log, uuid.UUID(int=1).hex.upper(), "--policy", "events") == event
    done = invoke(log, uuid.UUID(int=1).hex)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "oncelog: ambiguous: 3 writes have this key. Choose one with these options:",
        "  --policy events --scope ''",
        f"  --policy ledger --scope {shlex.quote(SCOPE)} --client {shlex.quote('till-ä')}",
        "  --policy notes --scope ''",
    ]
    mine = decode(print_proof(log, key(1).hex(), "--scope", SCOPE, "--client", "till-ä"))
    assert (mine.record.policy, mine.record.client_sequence) == ("ledger", 1)
    other_client = expect_refusal(log, key(1).hex(), "--scope", SCOPE, "--client", "c", status=1)
    assert other_client.startswith("no record: it was never committed here")
    assert "for the client 'c'" in other_client
    assert expect_refusal(log, "abcd", status=1).startswith("no record: it was never committed here")
    assert "has no policy 'nonsense'" in expect_refusal(log, "abcd", "--policy", "nonsense")
    # Sixteen digits may be a transaction id or a key. The transaction id takes precedence.
    digits = b"12345678".hex()
    assert decode(print_proof(log, digits)).record.key == digits
    assert decode(print_proof(log, "12345678", "--text", "--policy", "notes")).record.key == digits


@BOTH_STORES
def test_proof_of_a_missing_record_is_refused(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.db")
    commit_batches(log, [build_event(1), build_transaction(1)])
    assert expect_refusal(log, "--lane", "0", "--position", "2", status=1) == "no record: lane 0 has positions 1 to 1"
    assert expect_refusal(log, "0:0", status=1) == "no record: lane 0 has positions 1 to 1"
    for lane in ("99", str(2**70)):
        assert f"lane {lane} does not exist" in expect_refusal(log, "--lane", lane, "--position", "1", status=1)
    assert "the record there has the policy 'events'; to see it, use the ID 0:1" in expect_refusal(
        log, format_tx_id(0, 1), status=1
    )
    assert "As the id of a transaction: no record: lane 65535 " in expect_refusal(log, "f" * 16, status=1)


WRONG: list[tuple[list[str], str]] = [
    ([], "give a log and a record in it, or a document with --check"),
    (["log.db"], "which record?"),
    (["log.db", "--lane", "0"], "--lane and --position must be given together"),
    (["log.db", "--position", "1"], "--lane and --position must be given together"),
    (["log.db", "0:1", *PLACE], "--lane and --position identify a record by its place"),
    (["log.db", *PLACE, "--scope", "s"], "--lane and --position identify a record by its place"),
    (["log.db", "0:1", "--client", "c"], "0:1 is the place of a record"),
    (["log.db", "nonsense", "--hex"], "'nonsense' is neither a UUID nor a key in hex"),
    (["log.db", "msg_1"], "'msg_1' is not the id of a message"),
    (["log.db", "0:1", "--all"], "0:1 is the place of a record: --all needs a key"),
    (["log.db", *PLACE, "--text"], "--lane and --position identify a record by its place"),
    (["--check", "x", "--hex"], "--hex cannot be combined with --check"),
    (["log.db", "0:1", "--block-hash", "00"], "--block-hash cannot be combined with a log"),
    (["log.db", "0:1"], "log.db does not exist."),
    (["log.db", "--check", "x"], "LOG cannot be combined with --check"),
    (["--check", "x", "--output", "y"], "--output cannot be combined with --check"),
    (["--check", "x", *PLACE], "--lane cannot be combined with --check"),
    (["--check", "x", "--scope", "s"], "--scope cannot be combined with --check"),
    (["--check", "x"], "x cannot be read: No such file or directory"),
    (["--check", "."], ". cannot be read: Is a directory"),
    (["--check", "x", "--block-hash", "00"], "--block-hash must have 64 hexadecimal digits"),
    (["--check", "x", "--block-hash", "g" * 64], "--block-hash must have 64 hexadecimal digits"),
    (["postgresql://ann:se[secret@host/orders", "0:1"], "the address cannot be parsed"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(one)[:50] for one, _ in WRONG])
def test_invalid_arguments_are_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in expect_refusal(*arguments)
    assert list(tmp_path.iterdir()) == []


@BOTH_STORES
def test_damaged_record_is_not_proven(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    log = log_at(path)
    commit_batches(log, [build_event(number) for number in (1, 2, 3)])

    def change(statement: str) -> None:
        if log != str(path):
            query(log, statement)
            return
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    change("UPDATE oncelog_records SET actor = 'another' WHERE height = 1 AND actor = ''")
    assert expect_refusal(log, "0:2") == f"lane 0, position 2: the record does not match its block; {DAMAGE_HINT}"
    change("UPDATE oncelog_records SET actor = ''")
    assert verify(decode(print_proof(log, "0:2"))).is_valid
    change("UPDATE oncelog_blocks SET count = 2")
    assert expect_refusal(log, "0:2") == f"lane 0, position 2: the record does not match its block; {DAMAGE_HINT}"
    assert expect_refusal(log, "0:3") == f"lane 0, position 3: the record is not in its block; {DAMAGE_HINT}"
    change("DELETE FROM oncelog_blocks")
    assert expect_refusal(log, "0:2") == f"lane 0, position 2: its block is missing; {DAMAGE_HINT}"
    change("DELETE FROM oncelog_records")
    assert expect_refusal(log, "0:2") == f"lane 0, position 2: the record is missing; {DAMAGE_HINT}"


@pytest.mark.parametrize("change", ["client_sequence = -1", "partitions = '{'", "actor = CAST(x'ff' AS TEXT)"])
def test_invalid_column_values_are_reported(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.db"
    commit_batches(str(path), [build_event(number) for number in (1, 2, 3)])
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE oncelog_records SET {change} WHERE place = 1")  # noqa: S608
    connection.commit()
    connection.close()
    for place in ("0:1", "0:2"):
        assert expect_refusal(str(path), place)


def test_missing_log_and_unreachable_database_are_refused(database: str) -> None:
    assert "contains no log" in expect_refusal(database, "0:1")
    assert "cannot be reached" in expect_refusal("postgresql://ann:secret@127.0.0.1:1/orders", "0:1")
    assert "secret" not in expect_refusal("postgresql://ann:secret@127.0.0.1:1/orders", "0:1")


@BOTH_STORES
def test_records_of_every_policy_and_lane_are_proven(tmp_path: Path) -> None:
    """The sample log also contains erased records."""
    log = log_at(tmp_path / "log.db")
    sample_log.make_log(Path(log) if log.endswith(".db") else log, rounds=3)
    heads = json.loads(RUNNER.invoke(COMMAND, ["head", log]).stdout)["lanes"]
    policies = set()
    for one in heads:
        for position in range(1, one["position"] + 1):
            document = decode(print_proof(log, f"{one['lane']}:{position}"))
            policies.add(document.record.policy)
            # The only error, because the sample's transactions have invented fingerprints.
            findings = [found for found in verify(document).findings if "not a ledger transaction" not in found]
            assert not [found for found in findings if "fingerprint" not in found]
    assert policies == {"events", "ledger", "deltas", "runs", "chat", "notes", AUDIT_POLICY}


# --- output -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("proof") / "log.db")
    commit_batches(
        path,
        [build_event(number) for number in (1, 2, 3)],
        [build_transaction(1), build_transaction(2)],
        [build_event(4)],
    )
    return path


@pytest.fixture
def document(log: str) -> bytes:
    return print_proof(log, "0:2")


def test_output_file_must_not_exist(log: str, document: bytes, tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    done = invoke(log, "0:2", "--output", str(path))
    assert (done.exit_code, done.output) == (0, "")
    assert path.read_bytes() == document
    assert invoke("--check", str(path)).exit_code == 0
    before = Path(log).read_bytes()
    for there in (log, str(path)):
        assert expect_refusal(log, "0:1", "--output", there) == f"{there} already exists."
    assert Path(log).read_bytes() == before
    assert path.read_bytes() == document
    nowhere = str(tmp_path / "no" / "proof.json")
    assert expect_refusal(log, "0:1", "--output", nowhere) == f"{nowhere} cannot be written: No such file or directory"


def test_missing_record_creates_no_output_file(log: str, tmp_path: Path) -> None:
    assert expect_refusal(log, "0:99", "--output", str(tmp_path / "proof.json"), status=1)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_no_partial_document(log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_full(path: Path, flags: int) -> int:
        os.close(open_new(path, flags))
        return os.open("/dev/full", flags)

    monkeypatch.setattr(files, "open_new", open_full)
    path = tmp_path / "proof.json"
    assert "No space left on device" in expect_refusal(log, "0:1", "--output", str(path), status=74)
    assert not path.exists()


def test_document_is_checked_from_a_pipe(log: str) -> None:
    made = oncelog_process("proof", log, "0:1")
    done = oncelog_process("proof", "--check", "-", given=made.stdout)
    assert (made.returncode, done.returncode) == (0, 0)
    assert done.stdout.startswith("the record is in the document's block\n")


# --- checking a document ------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_check_prints_the_proven_content(log: str, tmp_path: Path) -> None:
    with oncelog.open_blocking(log) as opened:
        lane = max(opened.heads())
    data = print_proof(log, format_tx_id(lane, 2))
    found = decode(data)
    size = len(found.body or b"")
    path = tmp_path / "proof.json"
    path.write_bytes(data)
    done = invoke("--check", str(path), "--block-hash", found.block.hash.upper())
    assert (done.exit_code, done.stderr) == (0, "")
    for line in (
        "proven: the record is in the block",
        f"place:          lane {lane}, position 2",
        f"sequence:       2 of {SCOPE}",
        "policy:         ledger",
        f"key:            {key(2).hex()}",
        "actor:          user:zoë",
        "client:         till-ä, sequence 2",
        f"body:           {size} bytes, as committed; the operations match the fingerprint",
        f"block:          height 1, {found.block.hash}",
        "                it has the given hash",
    ):
        assert line in done.stdout.splitlines()
    status, output = check_document(data)
    assert status == 0
    assert output.startswith("the record is in the document's block\n")
    assert "not compared: compare its hash with one from a trusted source (--block-hash, --head)" in output
    assert "partitions:     größe, orders/7" in check_document(print_proof(log, "0:3"))[1]


@pytest.mark.rule("LG-18")
def test_document_with_a_different_block_hash_is_not_proven(document: bytes) -> None:
    status, output = check_document(document, "--block-hash", "ab" * 32)
    found = json.loads(document)["block"]["hash"]
    assert (status, output) == (1, f"not proven:\n- the block has the hash {found}, not {'ab' * 32}\n")


@pytest.mark.rule("LG-18")
def test_exported_head_confirms_the_newest_block_of_its_lane(log: str, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    head.write_text(RUNNER.invoke(COMMAND, ["head", log]).stdout)
    newest, older = print_proof(log, "0:4"), print_proof(log, "0:1")
    status, output = check_document(newest, "--head", str(head))
    assert status == 0
    assert output.startswith("proven: ")
    assert "it is the head's block" in output
    status, output = check_document(older, "--head", str(head))
    assert status == 1
    assert "proven: " not in output
    words = "it is older than the head's block, and only the chain between the two can connect them (heights 1 and 2)"
    assert f"not confirmed: {words}" in output
    exported = json.loads(head.read_text())
    mark = exported["lanes"][0]
    for change, words in (
        ({"block_hash": "ab" * 32}, f"not proven:\n- the block has the hash {mark['block_hash']}, not {'ab' * 32}"),
        ({"height": 1}, "not confirmed: it is newer than the head's block, which has height 1"),
        ({"lane": 77}, "not confirmed: the head has no lane 0"),
    ):
        head.write_text(json.dumps({**exported, "lanes": [{**mark, **change}]}))
        status, output = check_document(newest, "--head", str(head))
        assert status == 1
        assert words in output
    head.write_text("{}")
    assert expect_refusal("--check", "-", "--head", str(head), given=newest).startswith(
        f"{head} is not an exported head: "
    )
    assert "--head: each identifies" in expect_refusal(
        "--check", "-", "--head", str(head), "--block-hash", "00" * 32, given=newest
    )
    missing = invoke("--check", "-", "--head", str(tmp_path / "none.json"), given=newest)
    assert missing.exit_code == 2


@pytest.mark.rule("LG-18")
def test_changed_document_is_not_proven(document: bytes) -> None:
    decoded = json.loads(document)
    changed = json.dumps({**decoded, "record": {**decoded["record"], "actor": "user:eve"}}).encode()
    words = "the path does not lead from the record to the block's Merkle root"
    assert check_document(changed) == (1, f"not proven:\n- {words}\n")
    status, output = check_document(json.dumps({**decoded, "count": 9, "body": ""}).encode())
    assert (status, output.count("\n- ")) == (1, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "$: Input data was truncated"),
        (b"{}", "$: Object missing required field `record`"),
        (b'{"\x9b":1}', "$: is not UTF-8"),
        (b'{"record":{"lane":-1}}', "$.record: Object missing required field `position`"),
    ],
)
def test_malformed_document_is_refused(data: bytes, words: str) -> None:
    expected = f"standard input is not a proof: {words}; `oncelog proof` prints one"
    assert expect_refusal("--check", "-", given=data) == expected


def test_check_escapes_control_characters_of_a_document(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    commit_batches(path, [replace(build_event(1), actor="\x1b[2Jzoë", partitions=("a\u202eb",))])
    output = check_document(print_proof(path, "0:1"))[1]
    assert "\x1b" not in output
    assert "actor:          \\u001b[2Jzoë" in output
    assert "partitions:     a\\u202eb" in output


def test_help_of_proof_has_examples() -> None:
    output = " ".join(invoke("--help").stdout.split())
    for example in ("oncelog proof ledger.db 0003000000000011 > proof.json", "oncelog proof --check proof.json --head"):
        assert example in output
