"""The offsets, labels and example in docs/reference/proofs.md match the code."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from core.independent_verifier import (
    RECORD_FRAMES,
    RECORD_NUMBERS,
    independent_block_header,
    independent_header,
    independent_leaf,
)
from core.proof_samples import SAMPLES, independent_accepts
from oncelog.core.proof import (
    Block,
    Proof,
    compute_root,
    encode_record_header,
    hash_body,
    hash_leaf,
    hash_node,
    prove,
    verify,
)
from oncelog.core.values import Record

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "proofs.md").read_text(encoding="utf-8")


def read_fenced_block(name: str) -> str:
    """Return the fenced block of the document with that name."""
    found = re.findall(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, name
    return str(found[0])


def documented_bytes(name: str) -> bytes:
    """Decode the hexadecimal at the start of each line; the rest of the line is a comment."""
    return bytes.fromhex("".join(line.split()[0] for line in read_fenced_block(name).splitlines()))


def documented_hashes() -> dict[str, bytes]:
    rows = re.findall(r"^\| ([^|]+) \| `([0-9a-f]{64})` \|$", DOCUMENT, re.MULTILINE)
    return {name: bytes.fromhex(value) for name, value in rows}


def documented_offsets(heading: str) -> dict[str, tuple[int, int]]:
    """Return offset and width of each field from the table of a section."""
    chapter = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", chapter, re.MULTILINE)
    return {name: (int(offset), int(width)) for offset, width, name in rows}


def documented_records() -> list[tuple[Record, bytes]]:
    found = []
    for fields in json.loads(read_fenced_block("records")):
        salt = bytes.fromhex(fields.pop("salt"))
        raw = {name: bytes.fromhex(fields[name]) for name in ("key", "fingerprint")}
        rest = {"body": fields["body"].encode(), "partitions": tuple(fields["partitions"])}
        found.append((Record(**{**fields, **raw, **rest}), salt))
    return found


def documented_block() -> Block:
    fields = json.loads(read_fenced_block("block"))
    return Block(**{**fields, **{name: bytes.fromhex(fields[name]) for name in ("previous", "root")}})


def documented_proofs() -> list[Proof]:
    found = json.loads(read_fenced_block("proofs"))
    return [Proof(one["index"], one["count"], tuple(map(bytes.fromhex, one["path"]))) for one in found]


def assemble(offsets: Mapping[str, tuple[int, int]], values: Mapping[str, Any]) -> bytes:
    """Assemble bytes from values according to a table of offsets."""
    header = bytearray(max(at + width for at, width in offsets.values()))
    for name, (at, width) in offsets.items():
        value = values[name]
        header[at : at + width] = value if isinstance(value, bytes) else value.to_bytes(width, "big")
    return bytes(header)


@pytest.mark.rule("LG-18")
def test_documented_offsets_match_the_bytes() -> None:
    numbers = {name: 1001 + place for place, name in enumerate(RECORD_NUMBERS)}
    numbers_of_record = assemble(documented_offsets("Record header"), {"version": 1, **numbers})
    header = encode_record_header(replace(SAMPLES[0][0], **numbers))
    assert header.startswith(numbers_of_record + b"policy")
    assert f"starts with {len(numbers_of_record)} bytes of numbers" in DOCUMENT
    block = Block(1001, 1002, 1003, 1004, 1005, previous=b"p" * 32, root=b"r" * 32)
    block_header = assemble(documented_offsets("Block header"), {"version": 1, **asdict(block)})
    assert sha256(b"\x02" + block_header).digest() == block.hash
    assert f"Its header has {len(block_header)} bytes" in DOCUMENT


@pytest.mark.rule("LG-18")
def test_documented_labels_match_the_frames() -> None:
    chapter = DOCUMENT.split("\n## Record header\n")[1].split("\n## ")[0]
    labels = re.findall(r"^\| `(\w+)` \| ", chapter, re.MULTILINE)
    assert labels == [*RECORD_FRAMES, "partition"]
    place = -1
    written = documented_bytes("header of record 2")
    for label in labels:
        place = written.index(label.encode() + b"\x00\x00\x00", place + 1)


@pytest.mark.rule("LG-18")
def test_documented_example_matches_the_code() -> None:
    hashes_by_name, block, leaves = documented_hashes(), documented_block(), []
    for index, (record, salt) in enumerate(documented_records()):
        header = encode_record_header(record)
        assert header == independent_header(asdict(record)) == documented_bytes(f"header of record {index}")
        assert re.search(rf"\b{len(header)} bytes[.:]", DOCUMENT)
        salted = hash_body(salt, record.body)
        assert salted == hashes_by_name[f"body hash of record {index}"]
        leaves.append(hash_leaf(header, salted))
        assert leaves[-1] == independent_leaf(asdict(record), salted) == hashes_by_name[f"leaf {index}"]
    assert hash_node(*leaves[:2]) == hashes_by_name["node of leaf 0 and leaf 1"]
    assert compute_root(leaves) == hashes_by_name["root: node of that node and leaf 2"] == block.root
    assert independent_block_header(asdict(block)) == documented_bytes("header of the block")
    assert block.hash == hashes_by_name["block hash"]
    assert documented_proofs() == [prove(leaves, index) for index in range(3)]
    assert len(hashes_by_name) == 9


@pytest.mark.rule("LG-18")
def test_documented_example_verifies() -> None:
    block, trusted = documented_block(), documented_hashes()["block hash"]
    for (record, salt), proof in zip(documented_records(), documented_proofs(), strict=True):
        assert verify(record, salt, proof, block)
        assert independent_accepts(record, salt, proof, block, trusted)
        assert not independent_accepts(record, salt, proof, block, bytes(32))
