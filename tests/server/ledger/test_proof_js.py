"""examples/proof/verify.mjs follows docs/reference/proofs.md: it accepts genuine proofs and refuses forged ones
(LG-18).
"""

import json
import shutil
import subprocess
import uuid
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import oncelog
from core.proof_samples import prove_alone
from databases import BOTH_STORES, log_at
from deadlines import WAIT_S
from oncelog.core.operations import Relate, SetEntity
from oncelog.core.proof import Proof, encode_record_header, hash_leaf, hash_node
from oncelog.core.transactions import ledger_scope, transaction
from oncelog.core.values import Committed, Record, Submission
from oncelog.errors import ProofError
from oncelog.proof import decode, encode, proof_document, verify

VERIFIER = Path(__file__).parents[3] / "examples" / "proof" / "verify.mjs"
LINES_MAX = 99
PAGE = """
const { parse: whole, verify } = await import(process.argv[1]);
const parse = process.argv[2] === "rounding" ? JSON.parse : whole;
const { createInterface } = await import("node:readline");
for await (const line of createInterface({ input: process.stdin })) {
  const data = Buffer.from(line, "base64");
  let answer = "no";
  try {
    const json = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
    answer = (await verify(parse(json))).isErased ? "header" : "yes";
  } catch { }
  console.log(answer);
}
"""
"""Verifies one document per line with the module, as a web page would."""


def node() -> str:
    """Return the path of node. If node is missing, the tests fail instead of being skipped."""
    found = shutil.which("node")
    if found is None:
        pytest.fail("node is missing: `make test` installs it, as does apt-get install nodejs")
    return found


def run(file: Path | str, script: Path = VERIFIER) -> tuple[int, str, str]:
    command = [node(), str(script), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)  # noqa: S603
    return done.returncode, done.stdout, done.stderr


def verify_in_javascript(documents: Sequence[bytes], parser: str = "whole") -> list[str]:
    """Return the JavaScript verifier's result for each document: yes, header (no body) or no."""
    lines = b"".join(b64encode(one) + b"\n" for one in documents)
    command = [node(), "--input-type=module", "-e", PAGE, VERIFIER.as_uri(), parser]
    done = subprocess.run(command, input=lines, capture_output=True, check=True, timeout=WAIT_S)  # noqa: S603
    results = done.stdout.decode().split()
    assert len(results) == len(documents)
    return results


def verify_in_python(data: bytes) -> str:
    """Return the result of `oncelog.proof` for the document."""
    try:
        result = verify(decode(data))
    except ProofError:
        return "no"
    return "no" if not result.is_valid else "header" if result.is_erased else "yes"


# --- documents -------------------------------------------------------------------------------------------

UINT64_MAX = 2**64 - 1


def build_document(record: Record, index: int, count: int) -> bytes:
    """Return the proof document of a record at the given index of a block with other records."""
    return encode(proof_document(prove_alone(record, index, count)))


LARGE = Record(
    lane=2**32 - 1,
    position=UINT64_MAX,
    sequence=UINT64_MAX - 1,
    log_time_ms=2**53 + 1,
    height=2**63 + 1,
    policy="notes",
    scope='a "b" \\ \u2028 \U0001f600 17',
    key=b"\x00\xff",
    fingerprint=b"",
    actor="user:zoë",
    client="\0",
    client_sequence=UINT64_MAX - 2,
    partitions=("größe", "日本", "\U0001f600"),
    body=bytes(range(256)),
)
SMALL = replace(LARGE, lane=1, position=500, sequence=1, log_time_ms=1, height=1, client_sequence=1)


def build_event(number: int) -> Submission:
    partitions = ["größe", "orders/7", "日本"][: 1 + number % 3]
    return oncelog.event(uuid.UUID(int=number), {"type": "tick", "n": number, "text": "Grüße \U0001f600"}, partitions)


def build_transaction(number: int) -> Submission:
    operations = (SetEntity(f"größe:{number}", bytes([number])), Relate("doc:1", "owner", "zoë"))
    return transaction(ledger_scope("acme ä"), "till-ü", number, operations, actor="user:日本")


def documents_of(log: str) -> list[bytes]:
    """Return the proofs of a log with blocks of several sizes. The second record of each block, if any, is erased."""
    with oncelog.open_blocking(log) as run_server:
        receipts, number = [], 0
        for size in (1, 2, 3, 7, 8, 9, 64):
            for make in (build_event, build_transaction):
                verdicts = run_server.submit_many([make(one) for one in range(number + 1, number + size + 1)])
                receipts += [one.receipt for one in verdicts if isinstance(one, Committed)]
            number += size
            if size > 1:
                run_server.erase(key=uuid.UUID(int=number - size + 2))
        assert len(receipts) == 2 * number
        return [encode(proof_document(run_server.prove(receipt))) for receipt in receipts]


@BOTH_STORES
@pytest.mark.rule("LG-18", "CO-41")
def test_javascript_verifier_agrees_on_every_record_of_a_log(tmp_path: Path) -> None:
    documents = documents_of(log_at(tmp_path / "log.db"))
    results = verify_in_javascript(documents)
    assert results == [verify_in_python(one) for one in documents]
    assert (results.count("header"), results.count("no"), len(results)) == (6, 0, 188)


@pytest.mark.rule("LG-18")
def test_verifier_runs_on_a_file_and_reports_the_error(tmp_path: Path) -> None:
    documents = documents_of(str(tmp_path / "log.db"))
    path = tmp_path / "größe a%20b.json"
    whole, erased = (next(one for one in documents if verify_in_python(one) == kind) for kind in ("yes", "header"))
    for document, words in ((whole, "proven"), (erased, "proven, without a body")):
        path.write_bytes(document)
        assert run(path) == (0, f"{words}; block hash {decode(document).block.hash}\n", "")
    path.write_bytes(json.dumps(json.loads(whole), indent=2, ensure_ascii=True).encode())
    assert run(path)[0] == 0
    document = json.loads(whole)
    path.write_text(json.dumps({**document, "record": {**document["record"], "actor": "user:eve"}}))
    assert run(path) == (1, "", "not proven: $.path: does not lead to the block's Merkle root\n")
    path.write_text(json.dumps({**document, "\x1b[2J": 1}))
    assert run(path) == (1, "", "not proven: $: has an unknown member\n")
    path.write_text("\x1b[2J")
    status, out, complaint = run(path)
    assert (status, out) == (1, "")
    assert complaint.rstrip("\n").isprintable()
    assert run(tmp_path / "none.json")[0] == 1
    done = subprocess.run([node(), str(VERIFIER)], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (1, "not proven: usage: node verify.mjs FILE\n")


def test_verifier_runs_through_a_symbolic_link(tmp_path: Path) -> None:
    """A verifier that runs under a different name must not exit with status 0 without verifying."""
    link = tmp_path / "größe link.mjs"
    link.symlink_to(VERIFIER)
    path = tmp_path / "proof.json"
    path.write_bytes(b"{}")
    assert run(path, link)[0] == 1
    path.write_bytes(build_document(LARGE, 0, 1))
    assert run(path, link)[0] == 0


@pytest.mark.rule("LG-18")
def test_proof_is_valid_only_at_its_own_index_in_blocks_of_every_size() -> None:
    record = replace(LARGE, position=5000, body=b"")
    places = [(index, count) for count in (*range(1, 18), 31, 32, 33) for index in range(count)]
    places += [(index, 1000) for index in (0, 1, 511, 512, 998, 999)]
    documents = [build_document(record, *place) for place in places]
    assert set(verify_in_javascript(documents)) == {"yes"}
    # A different index or count, or a longer or shorter path, is refused.
    parsed = [json.loads(one) for one in documents]
    elsewhere = [{**one, "index": (one["index"] + 1) % one["count"]} for one in parsed if one["count"] > 1]
    elsewhere += [{**one, "count": one["count"] + 1} for one in parsed]
    elsewhere += [{**one, "path": one["path"][1:]} for one in parsed if one["path"]]
    elsewhere += [{**one, "path": [*one["path"], "00" * 32]} for one in parsed]
    assert set(verify_in_javascript([json.dumps(one).encode() for one in elsewhere])) == {"no"}


@pytest.mark.rule("LG-18")
def test_proof_with_a_changed_byte_is_refused(tmp_path: Path, is_soak: bool) -> None:
    flips = (1, 2, 0x20, 0x80)
    real = documents_of(str(tmp_path / "log.db"))
    erased = next(one for one in real if verify_in_python(one) == "header")
    transferred = next(one for one in real if verify_in_python(one) == "yes" and b'"ledger"' in one)
    for document in (build_document(LARGE, 4, 7), erased, transferred):
        changed = [
            document[:place] + bytes([byte ^ change]) + document[place + 1 :]
            for place, byte in enumerate(document)
            for change in (flips if is_soak else flips[place % 4 :][:1])
        ]
        results = verify_in_javascript(changed)
        wrong = [one for one, answer in zip(changed, results, strict=True) if answer != "no"]
        assert wrong == []


def tampered_documents(document: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a tampered document for each kind of error, with a description."""
    record, block = document["record"], document["block"]
    changes: list[tuple[str, Any]] = [
        ("salt of 15 bytes", {"salt": document["salt"][2:]}),
        ("salt of 17 bytes", {"salt": document["salt"] + "00"}),
        ("a salt without a body", {"body": None}),
        ("a body without a salt", {"salt": None}),
        ("a different body", {"body": "AAAA"}),
        ("base64 with unused bits set", {"body": "AB=="}),
        ("base64 with a space", {"body": document["body"][:4] + " " + document["body"][4:]}),
        ("body hash of 31 bytes", {"body_hash": document["body_hash"][2:]}),
        ("a hash in upper case", {"body_hash": document["body_hash"].upper()}),
        ("a path hash of 31 bytes", {"path": [document["path"][0][2:], *document["path"][1:]]}),
        ("a reversed path", {"path": document["path"][::-1]}),
        ("no path", {"path": []}),
        ("a path that is not a list", {"path": {}}),
        ("an index beyond the block", {"index": document["count"]}),
        ("a negative index", {"index": -1}),
        ("a string as index", {"index": str(document["index"])}),
        ("a count of 0", {"count": 0}),
        ("a different count", {"count": document["count"] + 1, "block": {**block, "count": block["count"] + 1}}),
        ("an unknown member", {"more": 1}),
        ("an unknown member of the record", {"record": {**record, "more": 1}}),
        ("the name of an inherited member", {"record": {**record, "__proto__": {}}}),
        ("a fingerprint with an odd number of digits", {"record": {**record, "fingerprint": "0"}}),
        ("joined partitions", {"record": {**record, "partitions": ["".join(record["partitions"])]}}),
        ("partitions in a different order", {"record": {**record, "partitions": record["partitions"][::-1]}}),
        ("a lone surrogate", {"record": {**record, "actor": "\ud800"}}),
        ("no record", {"record": None}),
    ]
    for part in ("record", "block"):
        for name, value in document[part].items():
            if isinstance(value, int):
                others: list[Any] = [value + 1, value - 1, value ^ 256, value + 2**32, value + 2**64, -value - 1]
                others += [str(value), float(value), value + 0.5, None, True, [value], {"": value}]
                changes += [(f"{part}.{name} is {one}", {part: {**document[part], name: one}}) for one in others]
    for name in ("previous_hash", "merkle_root", "hash"):
        for one in ("00" * 32, block[name][2:], block[name] + "00", block[name].upper(), None):
            changes.append((f"block.{name} is {one}", {"block": {**block, name: one}}))
    for name in document:
        changes.append((f"{name} is missing", {name: ...}))
    return changes


@pytest.mark.rule("LG-18")
def test_tampered_document_is_refused(tmp_path: Path) -> None:
    document = json.loads(build_document(LARGE, 4, 7))
    changes = tampered_documents(document)
    documents = []
    for _, change in changes:
        whole = {name: value for name, value in {**document, **change}.items() if value is not ...}
        documents.append(json.dumps(whole).encode())
    results = verify_in_javascript(documents)
    assert [what for (what, _), answer in zip(changes, results, strict=True) if answer != "no"] == []
    assert {verify_in_python(one) for one in documents} == {"no"}
    path = tmp_path / "proof.json"
    path.write_bytes(documents[0])
    assert run(path) == (1, "", "not proven: $.salt: must have 16 bytes\n")


@pytest.mark.rule("LG-18")
def test_lone_surrogate_differs_from_the_replacement_character() -> None:
    """An encoder replaces a lone surrogate with U+FFFD, which would produce the hash of another document."""
    document = build_document(replace(LARGE, actor="\ufffd"), 0, 1)
    assert verify_in_javascript([document, document.replace("\ufffd".encode(), b"\\ud800")]) == ["yes", "no"]


@pytest.mark.rule("LG-18")
def test_large_integers_are_not_rounded() -> None:
    """JSON.parse reads 2^53 and 2^53 + 1 as the same number."""
    record = replace(LARGE, client_sequence=2**53)
    document = build_document(record, 0, 1)
    assert b'"client_sequence":9007199254740992' in document
    other = document.replace(b'"client_sequence":9007199254740992', b'"client_sequence":9007199254740993')
    assert verify_in_javascript([document, other]) == ["yes", "no"]
    spelled = [document.replace(b"9007199254740992", one) for one in (b"9007199254740992.0", b"09007199254740992")]
    assert verify_in_javascript(spelled) == ["no", "no"]
    # A document that the caller has parsed with JSON.parse does not verify if a number was rounded.
    assert verify_in_javascript([build_document(replace(SMALL, client_sequence=2**53 - 1), 0, 1)], "rounding") == [
        "yes"
    ]
    rounded = build_document(replace(SMALL, client_sequence=2**53), 0, 1).replace(
        b"9007199254740992", b"9007199254740993"
    )
    assert verify_in_javascript([rounded], "rounding") == ["no"]


def forged_documents() -> list[bytes]:
    """Return forged documents: their hashes are consistent, but their members contradict each other."""
    found = prove_alone(SMALL, 4, 7)
    leaf = hash_leaf(encode_record_header(SMALL), found.body_hash)
    beside = bytes(32)
    alone = replace(found.block, first_position=SMALL.position, count=1)
    made = [
        replace(found, block=replace(found.block, lane=4)),
        replace(found, block=replace(found.block, height=4)),
        replace(found, block=replace(found.block, log_time_ms=4)),
        replace(found, block=replace(found.block, first_position=4)),
        # An index beyond the block, a path that is too long, and a path that is too short.
        replace(found, proof=Proof(1, 1, ()), block=replace(alone, first_position=SMALL.position - 1, root=leaf)),
        replace(found, proof=Proof(0, 1, (beside,)), block=replace(alone, root=hash_node(beside, leaf))),
        replace(found, proof=Proof(0, 1, (beside,)), block=replace(alone, root=hash_node(leaf, beside))),
        replace(found, proof=Proof(0, 3, ()), block=replace(alone, count=3, root=leaf)),
        replace(found, proof=Proof(0, 0, ()), block=replace(alone, count=0, root=leaf)),
    ]
    return [encode(proof_document(one)) for one in made]


@pytest.mark.rule("LG-18")
def test_contradictory_block_is_refused() -> None:
    documents = forged_documents()
    assert verify_in_javascript([build_document(SMALL, 4, 7), *documents]) == ["yes", *["no"] * len(documents)]
    assert [verify_in_python(one) for one in documents] == ["no"] * len(documents)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
numbers = st.integers(0, UINT64_MAX) | st.integers(0, 300)
any_record = st.builds(
    Record,
    lane=st.integers(0, 2**32 - 1),
    position=st.integers(100, UINT64_MAX),
    sequence=numbers,
    log_time_ms=numbers,
    height=numbers,
    policy=st.just("notes"),
    scope=names,
    key=st.binary(max_size=16),
    fingerprint=st.binary(max_size=32),
    actor=names,
    client=names,
    client_sequence=numbers,
    partitions=st.lists(names, max_size=3).map(tuple),
    body=st.binary(max_size=50),
)
places = st.integers(1, 70).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count)))


@pytest.mark.rule("LG-18")
@settings(
    max_examples=min(8, settings().max_examples // 25), phases=[Phase.generate]
)  # shrinking starts a process for each attempt
@given(st.lists(st.tuples(any_record, places, st.integers(0), st.binary(max_size=3)), min_size=30, max_size=60))
def test_both_verifiers_agree_on_generated_documents(drawn: list[tuple[Record, tuple[int, int], int, bytes]]) -> None:
    documents = []
    for record, place, where, inserted in drawn:
        document = build_document(record, *place)
        cut = where % len(document)
        documents += [document, document[:cut] + inserted + document[cut + len(inserted) :]]
    results = verify_in_javascript(documents)
    assert set(results[::2]) == {"yes"}
    assert results == [verify_in_python(one) for one in documents]


def test_verifier_is_short_and_has_no_imports() -> None:
    lines = VERIFIER.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES_MAX
    assert max(map(len, lines)) <= 120
    assert not [line for line in lines if line.startswith("import ") or "require(" in line]
