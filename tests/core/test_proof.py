"""Hashes, trees, chains and proofs (LG-18, CO-41), and docs/proofs.md, which says how to check them elsewhere."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import SetEntity
from oncelog.core.plan import plan
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, RUNS
from oncelog.core.proof import (
    NO_HASH,
    SALT_BYTES,
    Block,
    Proof,
    body_hash,
    leaf_hash,
    node_hash,
    prove,
    record_header,
    root_of,
    seal,
    verify,
    verify_header,
    verify_inclusion,
)
from oncelog.core.values import Claim, Item, Record, Request, SetMember, Settings, Snapshot, Submission
from oncelog.stores.memory import MemoryLog

DOCUMENT = (Path(__file__).parents[2] / "docs" / "proofs.md").read_text(encoding="utf-8")

# --- a stranger's verifier -----------------------------------------------------------------------------
# Written from docs/proofs.md alone: it uses nothing of ours, not even a type. Records and blocks are mappings with
# the field names of the document. Where it and our code disagree, one of them or the document is wrong.

Fields = Mapping[str, Any]
RECORD_NUMBERS = {"lane": 4, "position": 8, "sequence": 8, "log_time_ms": 8, "height": 8, "client_sequence": 8}
RECORD_FRAMES = ("policy", "scope", "key", "fingerprint", "actor", "client")
BLOCK_NUMBERS = {"lane": 4, "height": 8, "first_position": 8, "count": 4, "log_time_ms": 8}


def stranger_hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def stranger_frame(label: str, value: str | bytes) -> bytes:
    data = value.encode("utf-8") if isinstance(value, str) else value
    return label.encode("ascii") + len(data).to_bytes(4, "big") + data


def stranger_header(record: Fields) -> bytes:
    header = b"\x01"
    for name, width in RECORD_NUMBERS.items():
        header += record[name].to_bytes(width, "big")
    for label in RECORD_FRAMES:
        header += stranger_frame(label, record[label])
    for partition in record["partitions"]:
        header += stranger_frame("partition", partition)
    return header


def stranger_reads_header(header: bytes) -> dict[str, Any]:
    """The header read back, field by field."""
    assert header[0] == 1
    place, record, partitions = 1, dict[str, Any](), list[str]()
    for name, width in RECORD_NUMBERS.items():
        record[name] = int.from_bytes(header[place : place + width], "big")
        place += width
    for label in RECORD_FRAMES:
        value, place = stranger_reads_frame(label, header, place)
        record[label] = value if label in {"key", "fingerprint"} else value.decode("utf-8")
    while place < len(header):
        value, place = stranger_reads_frame("partition", header, place)
        partitions.append(value.decode("utf-8"))
    return {**record, "partitions": tuple(partitions)}


def stranger_reads_frame(label: str, header: bytes, place: int) -> tuple[bytes, int]:
    start = place + len(label) + 4
    assert header[place : place + len(label)] == label.encode("ascii")
    end = start + int.from_bytes(header[start - 4 : start], "big")
    assert end <= len(header)
    return header[start:end], end


def stranger_leaf(record: Fields, salted: bytes) -> bytes:
    return stranger_hash(b"\x00" + stranger_header(record) + salted)


def stranger_root(leaves: Sequence[bytes]) -> bytes:
    """The definition of the document, and of RFC 9162, section 2.1.1: from the top down."""
    if len(leaves) == 1:
        return leaves[0]
    split = largest_power_of_two_below(len(leaves))
    return stranger_hash(b"\x01" + stranger_root(leaves[:split]) + stranger_root(leaves[split:]))


def largest_power_of_two_below(number: int) -> int:
    power = 1
    while power * 2 < number:
        power *= 2
    return power


def stranger_block_header(block: Fields) -> bytes:
    header = b"\x01"
    for name, width in BLOCK_NUMBERS.items():
        header += block[name].to_bytes(width, "big")
    return header + bytes(block["previous"]) + bytes(block["root"])


def stranger_block_hash(block: Fields) -> bytes:
    return stranger_hash(b"\x02" + stranger_block_header(block))


def stranger_verifies(record: Fields, salt: bytes, proof: Fields, block: Fields, trusted: bytes) -> bool:
    if len(salt) != 16:
        return False
    return stranger_verifies_erased(record, stranger_hash(salt + record["body"]), proof, block, trusted)


def stranger_verifies_erased(record: Fields, salted: bytes, proof: Fields, block: Fields, trusted: bytes) -> bool:
    return (
        stranger_block_hash(block) == trusted
        and len(salted) == 32
        and record["lane"] == block["lane"]
        and record["height"] == block["height"]
        and record["log_time_ms"] == block["log_time_ms"]
        and len(block["previous"]) == len(block["root"]) == 32
        and record["position"] == block["first_position"] + proof["index"]
        and proof["count"] == block["count"]
        and stranger_arrives(stranger_leaf(record, salted), proof, block["root"])
    )


def stranger_arrives(leaf: bytes, proof: Fields, root: bytes) -> bool:
    """Steps 6 to 9."""
    index, count, path = proof["index"], proof["count"], proof["path"]
    if index < 0 or index >= count or [beside for beside in path if len(beside) != 32]:
        return False
    reached, place, last = leaf, index, count - 1
    for beside in path:
        if last == 0:
            return False
        if place % 2 == 1 or place == last:
            reached = stranger_hash(b"\x01" + beside + reached)
            while place % 2 == 0 and place != 0:
                place, last = place // 2, last // 2
        else:
            reached = stranger_hash(b"\x01" + reached + beside)
        place, last = place // 2, last // 2
    return last == 0 and reached == root


def stranger_heads(records: Sequence[Fields], salts: Sequence[bytes]) -> dict[int, bytes]:
    """The newest block hash of every lane, computed anew from what is stored of the records."""
    blocks: dict[tuple[int, int], list[tuple[Fields, bytes]]] = defaultdict(list)
    for record, salt in zip(records, salts, strict=True):
        salted = stranger_hash(salt + record["body"])
        blocks[record["lane"], record["height"]].append((record, stranger_leaf(record, salted)))
    heads: dict[int, bytes] = {}
    for lane, height in sorted(blocks):
        inside = sorted(blocks[lane, height], key=lambda one: one[0]["position"])
        header = {
            "lane": lane,
            "height": height,
            "first_position": inside[0][0]["position"],
            "count": len(inside),
            "log_time_ms": inside[0][0]["log_time_ms"],
            "previous": heads.get(lane, bytes(32)),
            "root": stranger_root([leaf for _, leaf in inside]),
        }
        heads[lane] = stranger_block_hash(header)
    return heads


# --- a log with something of everything in it ------------------------------------------------------------

NOON_MS = 1_800_000_000_000
SETTINGS = Settings(lanes=3)


def drawn() -> Callable[[int], bytes]:
    """Salts that differ, and are the same in every run."""
    number = 0

    def draw(size: int) -> bytes:
        nonlocal number
        number += 1
        return sha256(b"salt %d" % number).digest()[:size]

    return draw


def key_of(number: int, size: int = 16) -> bytes:
    return sha256(b"key %d" % number).digest()[:size]


def an_event(number: int) -> Submission:
    return Submission(
        policy=EVENTS,
        scope="",
        key=key_of(number),
        fingerprint=key_of(number, 32),
        body=b'{"n":%d}' % number,
        actor="user:zoë",
        partitions=("a", "b/ü")[: number % 3],
    )


def a_transaction(number: int, organization: str) -> Submission:
    return Submission(
        policy=LEDGER,
        scope=organization,
        key=key_of(number),
        fingerprint=key_of(number, 32),
        body=b"t" * (number % 5),
        actor="client:till",
        client="till",
        client_sequence=number,
        operations=(SetEntity("e", b"v"),),
    )


def a_push(number: int) -> Submission:
    key = key_of(number, 32)
    delta = RowDelta(Op.INSERT, "t", "r", "c", number, (), key)
    return Submission(policy=DELTAS, scope="gateway", key=key, fingerprint=key, body=b"delta", delta=delta)


def a_message(number: int) -> Submission:
    return Submission(policy=CHAT, scope="chat", key=key_of(number), fingerprint=b"", body=b"hi", actor="user:1")


def a_claim(number: int) -> Claim:
    return Claim(policy=RUNS, scope="campaign-1", key=key_of(number), fingerprint=b"", holder="me")


def filled_log(batches: int = 5) -> MemoryLog:
    log = MemoryLog(SETTINGS, drawn())
    log.submit([Request((SetMember("chat", "user:1"),))], NOON_MS)
    for batch in range(1, batches + 1):
        items: list[Item] = [an_event(10 * batch + one) for one in range(batch)]
        items += [a_transaction(batch, "org-1"), a_push(batch), a_message(batch), a_transaction(batch, "org-2")]
        log.submit([Request(tuple(items))], NOON_MS + 7 * batch)
        # A lease changes the lane's head and writes no record: the chain must not notice.
        log.submit([Request((a_claim(batch),))], NOON_MS + 7 * batch + 1)
    return log


def leaves_of(log: MemoryLog, block: Block) -> list[bytes]:
    return [
        leaf_hash(record_header(record), body_hash(salt, record.body))
        for record, salt in zip(log.records, log.salts, strict=True)
        if (record.lane, record.height) == (block.lane, block.height)
    ]


Evidence = tuple[Record, bytes, Proof, Block]


def evidence_of(log: MemoryLog) -> Iterator[Evidence]:
    """Every record of the log with its salt, its proof and its block."""
    blocks = {(block.lane, block.height): block for block in log.blocks}
    for record, salt in zip(log.records, log.salts, strict=True):
        block = blocks[record.lane, record.height]
        yield record, salt, prove(leaves_of(log, block), record.position - block.first_position), block


LOG = filled_log()
EVIDENCE = list(evidence_of(LOG))
# One with partitions, from the largest block; one with a client and without a body.
SAMPLES = [
    next(one for one in EVIDENCE if one[0].policy == "events" and one[3].count == 5 and len(one[0].partitions) == 2),
    next(one for one in EVIDENCE if one[0].policy == "ledger" and not one[0].body and one[3].count > 1),
]


def stranger_accepts(record: Record, salt: bytes, proof: Proof, block: Block, trusted: bytes) -> bool:
    return stranger_verifies(asdict(record), salt, asdict(proof), asdict(block), trusted)


# --- what it means to change something -------------------------------------------------------------------


def flipped(data: bytes, number: int) -> bytes:
    """One bit changed, another one for each number."""
    place = number % len(data)
    return data[:place] + bytes([data[place] ^ (1 << number % 8)]) + data[place + 1 :]


def changed_bytes(data: bytes) -> Iterator[bytes]:
    """Every byte changed, one more at either end, one less at either end."""
    for place in range(len(data)):
        yield flipped(data, place)
    yield from (data + b"\x00", b"\x00" + data)
    if data:
        yield from (data[1:], data[:-1])


def changed_values(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from (one for one in {value + 1, value - 1, value ^ 256, value + 2**31, 0} if 0 <= one != value)
        case bytes():
            yield from (one for one in changed_bytes(value) if one != value)
        case str():
            for place in range(len(value)):
                yield value[:place] + ("x" if value[place] != "x" else "y") + value[place + 1 :]
            yield from (value + "x", value + "\x00", "x" + value, value[:-1] if value else "y")
        case tuple():
            yield from ((*value, ""), ("", *value), (*value, "x"))
            for place, one in enumerate(value):
                yield value[:place] + value[place + 1 :]
                yield from ((*value[:place], other, *value[place + 1 :]) for other in changed_values(one))
            if len(value) > 1:
                yield from (value[::-1], ("".join(value),))


def changed_structs(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with each of its fields changed in every way. A field that is added one day is in it by itself."""
    for field in value.__struct_fields__:
        changed = list(changed_values(getattr(value, field)))
        assert changed, field
        for one in changed:
            yield field, replace(value, **{field: one})


NOT_IN_THE_HEADER = frozenset({"body", "erased"})
"""The body enters the leaf by its hash, and that it was erased is a mark of the store's: no hash has it."""


# --- the tree --------------------------------------------------------------------------------------------

DATA = [b"leaf %d" % number for number in range(1000)]
LEAVES = [leaf_hash(one, b"") for one in DATA]
ALL_INDEXES_UP_TO = 33
ALL_BYTES_UP_TO = 17


@cache
def direct_root(start: int, end: int) -> bytes:
    """RFC 9162, section 2.1.1, word for word, over DATA[start:end]."""
    if end - start == 1:
        return sha256(b"\x00" + DATA[start]).digest()
    split = start + largest_power_of_two_below(end - start)
    return sha256(b"\x01" + direct_root(start, split) + direct_root(split, end)).digest()


def direct_path(index: int, start: int, end: int) -> tuple[bytes, ...]:
    """RFC 9162, section 2.1.3.1, word for word, over DATA[start:end]."""
    if end - start == 1:
        return ()
    split = largest_power_of_two_below(end - start)
    if index < split:
        return (*direct_path(index, start, start + split), direct_root(start + split, end))
    return (*direct_path(index - split, start + split, end), direct_root(start, start + split))


def indexes_of(count: int) -> Sequence[int]:
    """All of a small tree. Of a large one both ends of the left part, and the middle and the end of the right one."""
    if count <= ALL_INDEXES_UP_TO:
        return range(count)
    split = largest_power_of_two_below(count)
    return sorted({0, split - 1, split + (count - split) // 2, count - 1})


@pytest.mark.rule("LG-18")
def test_the_tree_is_that_of_the_rfc_for_every_number_of_leaves() -> None:
    for count in range(1, 1001):
        assert root_of(LEAVES[:count]) == direct_root(0, count), count


def changed_proofs(proof: Proof) -> Iterator[Proof]:
    """Another index, a byte of the path changed, a hash more, less, twice or elsewhere."""
    path = proof.path
    others = {0, proof.index - 1, proof.index + 1, proof.index ^ 1, proof.count - 1, proof.count, -1}
    yield from (replace(proof, index=one) for one in sorted(others - {proof.index}))
    for place, beside in enumerate(path):
        # Of a large tree one byte of each hash, another one each time; of a small one all of them.
        changed = [flipped(beside, proof.count + place)] if proof.count > ALL_BYTES_UP_TO else changed_bytes(beside)
        yield from (replace(proof, path=(*path[:place], one, *path[place + 1 :])) for one in changed)
    for place in {0, len(path) // 2, len(path) - 1} if path else set():
        yield replace(proof, path=path[:place] + path[place + 1 :])
        yield replace(proof, path=(*path[:place], path[place], *path[place:]))
    yield from (replace(proof, path=one) for one in ((*path, NO_HASH), (NO_HASH, *path), (*path, b"")))
    if len(path) > 1:
        yield replace(proof, path=path[::-1])


@pytest.mark.rule("LG-18")
def test_a_proof_is_that_of_the_rfc_for_any_number_of_leaves_and_no_changed_one_verifies() -> None:
    for count in range(1, 1001):
        leaves = LEAVES[:count]
        root = root_of(leaves)
        for index in indexes_of(count):
            proof = prove(leaves, index)
            assert proof == Proof(index, count, direct_path(index, 0, count))
            assert verify_inclusion(leaves[index], proof, root), (index, count)
            assert not verify_inclusion(flipped(leaves[index], count), proof, root)
            assert not verify_inclusion(leaves[index], proof, flipped(root, count))
            for changed in changed_proofs(proof):
                assert not verify_inclusion(leaves[index], changed, root), (index, count, changed)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", range(1, ALL_BYTES_UP_TO + 1))
def test_no_other_leaf_and_no_other_root_will_do(count: int) -> None:
    root = root_of(LEAVES[:count])
    for index in range(count):
        proof = prove(LEAVES[:count], index)
        assert not any(verify_inclusion(one, proof, root) for one in changed_bytes(LEAVES[index]))
        assert not any(verify_inclusion(LEAVES[index], proof, one) for one in changed_bytes(root))
        others = [place for place, leaf in enumerate(LEAVES[:count]) if verify_inclusion(leaf, proof, root)]
        assert others == [index]


def turns(index: int, count: int) -> list[str]:
    """From which side the way of a leaf comes at each node, lowest first."""
    if count == 1:
        return []
    split = largest_power_of_two_below(count)
    return [*turns(index, split), "left"] if index < split else [*turns(index - split, count - split), "right"]


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", range(1, 10))
def test_a_proof_passes_only_for_a_place_that_is_reached_by_the_same_turns(count: int) -> None:
    root = root_of(LEAVES[:count])
    for index in range(count):
        path = prove(LEAVES[:count], index).path
        for other_count in range(-1, 20):
            for other in range(-1, other_count + 1):
                is_a_place = 0 <= other < other_count
                expected = is_a_place and turns(other, other_count) == turns(index, count)
                assert verify_inclusion(LEAVES[index], Proof(other, other_count, path), root) == expected


@pytest.mark.rule("LG-18")
def test_a_byte_cannot_move_between_the_leaf_and_the_hash_beside_it() -> None:
    left, right = LEAVES[:2]
    root = root_of([left, right])
    for cut in (0, 1, 31, 33, 63, 64):
        both = left + right
        assert not verify_inclusion(both[:cut], Proof(0, 2, (both[cut:],)), root)
        assert not verify_inclusion(both[cut:], Proof(1, 2, (both[:cut],)), root)


@pytest.mark.rule("LG-18")
def test_the_root_does_not_fix_the_count_so_the_block_header_must() -> None:
    root, proof = root_of(LEAVES[:3]), prove(LEAVES[:3], 0)
    assert verify_inclusion(LEAVES[0], replace(proof, count=4), root)
    for record, salt, own, block in EVIDENCE:
        for count in range(1, 3 * block.count + 3):
            changed = replace(own, count=count)
            assert verify(record, salt, changed, block) == (count == block.count)
            # Who changes the header as well has another block, whose hash nobody vouches for.
            forged = replace(block, count=count)
            assert (forged.hash == block.hash) == (count == block.count)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize(("count", "index"), [(0, 0), (1, 1), (1, -1), (5, 5), (5, -5)])
def test_there_is_no_proof_of_a_leaf_that_is_not_there(count: int, index: int) -> None:
    with pytest.raises(IndexError):
        prove(LEAVES[:count], index)


hashes = st.sampled_from([*LEAVES[:4], root_of(LEAVES[:2]), root_of(LEAVES[2:4]), root_of(LEAVES[:4]), b"", b"x" * 33])


@pytest.mark.rule("LG-18")
@given(hashes, st.integers(-2, 9), st.integers(-2, 9), st.lists(hashes, max_size=4), hashes)
def test_the_strangers_verifier_agrees_on_any_proof(
    leaf: bytes, index: int, count: int, path: list[bytes], root: bytes
) -> None:
    proof = Proof(index, count, tuple(path))
    assert verify_inclusion(leaf, proof, root) == stranger_arrives(leaf, asdict(proof), root)


# --- domains ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
@given(st.binary(min_size=64, max_size=64))
def test_leaf_node_and_block_are_kept_apart(data: bytes) -> None:
    left, right = data[:32], data[32:]
    assert leaf_hash(left, right) == sha256(b"\x00" + data).digest()
    assert node_hash(left, right) == sha256(b"\x01" + data).digest()
    block = Block(1, 2, 3, 4, 5, left, right)
    numbers = stranger_block_header(asdict(block))[:33]
    assert block.hash == sha256(b"\x02" + numbers + data).digest()
    assert block.hash not in {leaf_hash(numbers + left, right), node_hash(numbers + left, right)}


@pytest.mark.rule("LG-18")
def test_a_node_cannot_be_shown_as_a_record() -> None:
    leaves = LEAVES[:4]
    left, right = node_hash(*leaves[:2]), node_hash(*leaves[2:])
    as_if_one_level_less = Proof(0, 2, (right,))
    assert verify_inclusion(left, as_if_one_level_less, root_of(leaves))
    assert not verify_inclusion(leaf_hash(leaves[0], leaves[1]), as_if_one_level_less, root_of(leaves))


# --- records ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_every_record_verifies_with_us_and_with_a_stranger() -> None:
    for record, salt, proof, block in EVIDENCE:
        assert verify(record, salt, proof, block)
        assert stranger_accepts(record, salt, proof, block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", [*range(1, 20), 31, 32, 33, 100])
def test_every_record_of_a_batch_of_any_size_verifies(count: int) -> None:
    log = MemoryLog(draw=drawn())
    log.submit([Request(tuple(an_event(number) for number in range(count)))], NOON_MS)
    (block,) = log.blocks
    assert block.count == count
    for record, salt, proof, its_block in evidence_of(log):
        assert verify(record, salt, proof, its_block)
        assert stranger_accepts(record, salt, proof, its_block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("evidence", SAMPLES, ids=["event", "transaction"])
def test_a_change_to_any_field_of_a_record_is_found(evidence: Evidence) -> None:
    record, salt, proof, block = evidence
    seen = set()
    for field, changed in changed_structs(record):
        seen.add(field)
        assert not verify(changed, salt, proof, block), field
        # A mark that says "erased" is believed, but what the hashes say does not depend on it.
        assert stranger_accepts(changed, salt, proof, block, block.hash) == (field == "erased"), field
    assert seen == set(Record.__struct_fields__)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("evidence", SAMPLES, ids=["event", "transaction"])
def test_a_change_to_the_salt_or_the_proof_is_found(evidence: Evidence) -> None:
    record, salt, proof, block = evidence
    for changed_salt in changed_bytes(salt):
        assert not verify(record, changed_salt, proof, block)
        assert not stranger_accepts(record, changed_salt, proof, block, block.hash)
    for changed_proof in changed_proofs(proof):
        assert not verify(record, salt, changed_proof, block)
        assert not stranger_accepts(record, salt, changed_proof, block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("shift", [-16, -1, 1, 4])
def test_a_byte_cannot_move_between_salt_and_body(shift: int) -> None:
    record, salt, proof, block = SAMPLES[0]
    both = salt + record.body
    cut = SALT_BYTES + shift
    assert not stranger_accepts(replace(record, body=both[cut:]), both[:cut], proof, block, block.hash)
    assert not verify(replace(record, body=both[cut:]), both[:cut], proof, block)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize(
    "fields", [{"sequence": 2**64}, {"log_time_ms": -1}, {"client_sequence": -1}, {"scope": "\ud800"}], ids=str
)
def test_a_record_that_no_log_could_hold_does_not_verify(fields: dict[str, Any]) -> None:
    record, salt, proof, block = SAMPLES[0]
    assert not verify(replace(record, **fields), salt, proof, block)


@pytest.mark.rule("LG-18")
def test_a_change_to_any_field_of_a_block_gives_another_hash() -> None:
    for block in LOG.blocks:
        assert block.hash == stranger_block_hash(asdict(block))
        for field, changed in changed_structs(block):
            assert changed.hash != block.hash, field
            assert changed.hash == stranger_block_hash(asdict(changed)), field


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("field", ["lane", "height", "first_position", "count", "root"])
def test_a_record_does_not_verify_against_a_block_that_says_otherwise(field: str) -> None:
    for record, salt, proof, block in SAMPLES:
        for changed_field, changed in changed_structs(block):
            if changed_field == field:
                assert not verify(record, salt, proof, changed)
                assert not stranger_accepts(record, salt, proof, changed, changed.hash)


@pytest.mark.rule("LG-18")
def test_a_record_does_not_verify_in_the_place_of_another() -> None:
    for record, salt, _, _ in EVIDENCE:
        for other, _, proof, block in EVIDENCE:
            assert verify(record, salt, proof, block) == (record is other)


@pytest.mark.rule("LG-18", "CO-41")
def test_an_erased_record_still_verifies_by_what_is_left_of_it() -> None:
    for record, salt, proof, block in EVIDENCE:
        erased, kept = replace(record, body=b"", erased=True), body_hash(salt, record.body)
        assert verify_header(erased, kept, proof, block)
        assert stranger_verifies_erased(asdict(erased), kept, asdict(proof), asdict(block), block.hash)
        assert not verify(erased, salt, proof, block), "its body is not there, even where it was empty"
        assert verify(replace(erased, erased=False), salt, proof, block) == (record.body == b"")


@pytest.mark.rule("LG-18", "CO-41")
def test_an_erased_record_is_guarded_like_any_other() -> None:
    record, salt, proof, block = SAMPLES[0]
    kept = body_hash(salt, record.body)
    assert not any(verify_header(record, changed, proof, block) for changed in changed_bytes(kept))
    for field, changed in changed_structs(record):
        assert verify_header(changed, kept, proof, block) == (field in NOT_IN_THE_HEADER), field


@pytest.mark.rule("LG-18", "CO-41")
def test_a_partition_cannot_move_from_the_header_to_the_kept_hash() -> None:
    record, salt, proof, block = SAMPLES[0]
    kept = body_hash(salt, record.body)
    for keep in range(len(record.partitions)):
        moved = b"".join(stranger_frame("partition", one) for one in record.partitions[keep:])
        cut = replace(record, partitions=record.partitions[:keep])
        assert record_header(cut) + moved == record_header(record)
        assert not verify_header(cut, moved + kept, proof, block)
        assert not stranger_verifies_erased(asdict(cut), moved + kept, asdict(proof), asdict(block), block.hash)


# --- the header ------------------------------------------------------------------------------------------

# Texts that are made of what frames are made of: labels, lengths, zero bytes.
texts = st.text(max_size=3) | st.text(alphabet="ak\x00\x01é\U0001f600", max_size=4)
texts |= st.sampled_from(["scope", "key\x00\x00\x00\x00", "partition\x00\x00\x00\x01a", "actor\x00\x00\x00\x00client"])
blobs = st.binary(max_size=4) | texts.map(str.encode)
wide = st.integers(0, 3) | st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    lane=st.integers(0, 2**32 - 1),
    position=wide,
    sequence=wide,
    log_time_ms=wide,
    height=wide,
    policy=texts,
    scope=texts,
    key=blobs,
    fingerprint=blobs,
    actor=texts,
    client=texts,
    client_sequence=wide,
    partitions=st.lists(texts, max_size=3).map(tuple),
    body=blobs,
    erased=st.booleans(),
)


def header_fields(record: Record) -> dict[str, Any]:
    return {field: value for field, value in asdict(record).items() if field not in NOT_IN_THE_HEADER}


@pytest.mark.rule("LG-18")
@given(records)
def test_a_header_can_be_read_back_so_no_two_records_share_one(record: Record) -> None:
    header = record_header(record)
    assert header == stranger_header(asdict(record))
    assert stranger_reads_header(header) == header_fields(record)


@pytest.mark.rule("LG-18")
@given(records, records, st.sets(st.sampled_from(Record.__struct_fields__)))
def test_records_that_differ_in_any_fields_have_different_headers(one: Record, other: Record, taken: set[str]) -> None:
    mixed = replace(one, **{field: getattr(other, field) for field in taken})
    same = header_fields(mixed) == header_fields(one)
    assert (record_header(mixed) == record_header(one)) == same


TEXT_FIELDS = ("policy", "scope", "key", "fingerprint", "actor", "client")


@pytest.mark.rule("LG-18")
@given(records, st.text(alphabet="aé\x00", max_size=6), st.data())
def test_no_shift_of_a_boundary_makes_two_records_one(record: Record, written: str, data: st.DataObject) -> None:
    first, second = data.draw(st.sampled_from(list(pairwise(TEXT_FIELDS))))
    cuts = data.draw(st.lists(st.integers(0, len(written)), min_size=2, max_size=2, unique=bool(written)))
    headers = set()
    for cut in cuts:
        parts = {first: written[:cut], second: written[cut:]}
        as_bytes = {field: part.encode() if field in {"key", "fingerprint"} else part for field, part in parts.items()}
        headers.add(record_header(replace(record, **as_bytes)))
    assert len(headers) == len(set(cuts))


@pytest.mark.rule("LG-18")
def test_partitions_keep_their_borders_their_order_and_their_distance_from_the_client() -> None:
    record = SAMPLES[0][0]
    lists = [(), ("",), ("", ""), ("a",), ("ab",), ("a", "b"), ("b", "a"), ("", "ab"), ("ab", ""), ("a", "", "b")]
    lists += [("a\x00\x00\x00\x00",), ("apartition\x00\x00\x00\x01b",)]
    headers = {record_header(replace(record, partitions=one, client=client)) for one in lists for client in ("", "a")}
    assert len(headers) == 2 * len(lists)


# --- the chain -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_each_lane_has_a_chain_over_all_its_batches() -> None:
    lanes = {block.lane for block in LOG.blocks}
    assert len(lanes) >= 3
    for lane in lanes:
        blocks = [block for block in LOG.blocks if block.lane == lane]
        assert [block.height for block in blocks] == [1, 2, 3, 4, 5]
        assert (blocks[0].previous, blocks[0].first_position) == (NO_HASH, 1)
        for before, after in pairwise(blocks):
            assert after.previous == before.hash
            assert after.first_position == before.first_position + before.count
            assert after.log_time_ms > before.log_time_ms
        for block in blocks:
            inside = [one for one in LOG.records if (one.lane, one.height) == (lane, block.height)]
            assert [one.position for one in inside] == [block.first_position + place for place in range(block.count)]
            assert {one.log_time_ms for one in inside} == {block.log_time_ms}
            assert block.root == root_of(leaves_of(LOG, block))


@pytest.mark.rule("LG-18")
def test_heads_carry_the_hash_of_the_newest_block_also_after_a_lease() -> None:
    newest = {block.lane: block for block in LOG.blocks}
    heads = {lane: head for lane, head in LOG.snapshot.heads.items() if head.position}
    assert heads.keys() == newest.keys()
    assert any(head.fence for head in heads.values())
    for lane, head in heads.items():
        assert (head.block_hash, head.height) == (newest[lane].hash, newest[lane].height)


def heads_of(log: MemoryLog) -> dict[int, bytes]:
    return {lane: head.block_hash for lane, head in log.snapshot.heads.items() if head.position}


@pytest.mark.rule("LG-18")
def test_a_stranger_computes_the_heads_anew_and_finds_any_change() -> None:
    heads, stored = heads_of(LOG), [asdict(record) for record in LOG.records]
    assert stranger_heads(stored, LOG.salts) == heads
    for place, record in enumerate(LOG.records):
        # Of each field one change is enough here: that all of them reach the leaf is shown above.
        for field, changed in dict(changed_structs(record)).items():
            altered = [*stored[:place], asdict(changed), *stored[place + 1 :]]
            assert (stranger_heads(altered, LOG.salts) == heads) == (field == "erased"), (place, field)


@pytest.mark.rule("LG-18")
def test_a_record_removed_doubled_or_moved_is_found() -> None:
    heads, stored = heads_of(LOG), [asdict(record) for record in LOG.records]
    for place, record in enumerate(stored):
        without = stored[:place] + stored[place + 1 :], LOG.salts[:place] + LOG.salts[place + 1 :]
        assert stranger_heads(*without) != heads
        assert stranger_heads([*stored, record], [*LOG.salts, LOG.salts[place]]) != heads
        for other in range(place):
            moved = list(stored)
            moved[place] = {**stored[other], "position": record["position"], "lane": record["lane"]}
            assert stranger_heads(moved, LOG.salts) != heads


@pytest.mark.rule("LG-18")
def test_only_a_head_from_outside_tells_that_the_newest_are_gone() -> None:
    whole, cut = filled_log(5), filled_log(4)
    kept = len(cut.records)
    assert (whole.records[:kept], whole.salts[:kept]) == (cut.records, cut.salts)
    recomputed = stranger_heads([asdict(record) for record in whole.records[:kept]], whole.salts[:kept])
    assert recomputed == heads_of(cut)
    assert all(recomputed[lane] != block_hash for lane, block_hash in heads_of(whole).items())


@pytest.mark.rule("LG-18")
def test_a_batch_without_records_closes_no_block() -> None:
    changes = plan([Request((a_claim(1),))], Snapshot(), NOON_MS).changes
    before = dict(changes.heads)
    assert seal(changes, []).blocks == []
    assert changes.heads == before


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("salts", [0, 1, 3])
def test_a_salt_too_many_or_too_few_closes_no_block(salts: int) -> None:
    changes = plan([Request((an_event(1), an_event(2)))], Snapshot(), NOON_MS).changes
    before = dict(changes.heads)
    with pytest.raises(ValueError, match="zip"):
        seal(changes, [bytes(16)] * salts)
    assert changes.heads == before


# --- the document ----------------------------------------------------------------------------------------


def fenced(name: str) -> str:
    """The block of the document that is fenced under that name."""
    found = re.findall(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, name
    return str(found[0])


def documented_bytes(name: str) -> bytes:
    """The hexadecimal at the start of each line; what stands behind it is for people."""
    return bytes.fromhex("".join(line.split()[0] for line in fenced(name).splitlines()))


def documented_hashes() -> dict[str, bytes]:
    rows = re.findall(r"^\| ([^|]+) \| `([0-9a-f]{64})` \|$", DOCUMENT, re.MULTILINE)
    return {name: bytes.fromhex(value) for name, value in rows}


def documented_offsets(heading: str) -> dict[str, tuple[int, int]]:
    """Offset and width of each field, from the table of a chapter."""
    chapter = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", chapter, re.MULTILINE)
    return {name: (int(offset), int(width)) for offset, width, name in rows}


def documented_records() -> list[tuple[Record, bytes]]:
    found = []
    for fields in json.loads(fenced("records")):
        salt = bytes.fromhex(fields.pop("salt"))
        raw = {name: bytes.fromhex(fields[name]) for name in ("key", "fingerprint")}
        rest = {"body": fields["body"].encode(), "partitions": tuple(fields["partitions"])}
        found.append((Record(**{**fields, **raw, **rest}), salt))
    return found


def documented_block() -> Block:
    fields = json.loads(fenced("block"))
    return Block(**{**fields, **{name: bytes.fromhex(fields[name]) for name in ("previous", "root")}})


def documented_proofs() -> list[Proof]:
    found = json.loads(fenced("proofs"))
    return [Proof(one["index"], one["count"], tuple(map(bytes.fromhex, one["path"]))) for one in found]


def assembled(offsets: Mapping[str, tuple[int, int]], values: Mapping[str, Any]) -> bytes:
    """The bytes that a table of offsets makes of these values."""
    header = bytearray(max(at + width for at, width in offsets.values()))
    for name, (at, width) in offsets.items():
        value = values[name]
        header[at : at + width] = value if isinstance(value, bytes) else value.to_bytes(width, "big")
    return bytes(header)


@pytest.mark.rule("LG-18")
def test_the_offsets_of_the_document_are_those_of_the_bytes() -> None:
    numbers = {name: 1001 + place for place, name in enumerate(RECORD_NUMBERS)}
    numbers_of_record = assembled(documented_offsets("Record header"), {"version": 1, **numbers})
    header = record_header(replace(SAMPLES[0][0], **numbers))
    assert header.startswith(numbers_of_record + b"policy")
    assert f"starts with {len(numbers_of_record)} bytes of numbers" in DOCUMENT
    block = Block(1001, 1002, 1003, 1004, 1005, previous=b"p" * 32, root=b"r" * 32)
    block_header = assembled(documented_offsets("Block header"), {"version": 1, **asdict(block)})
    assert sha256(b"\x02" + block_header).digest() == block.hash
    assert f"Its header has {len(block_header)} bytes" in DOCUMENT


@pytest.mark.rule("LG-18")
def test_the_labels_of_the_document_are_those_of_the_frames() -> None:
    chapter = DOCUMENT.split("\n## Record header\n")[1].split("\n## ")[0]
    labels = re.findall(r"^\| `(\w+)` \| ", chapter, re.MULTILINE)
    assert labels == [*RECORD_FRAMES, "partition"]
    place = -1
    written = documented_bytes("header of record 2")
    for label in labels:
        place = written.index(label.encode() + b"\x00\x00\x00", place + 1)


@pytest.mark.rule("LG-18")
def test_the_example_of_the_document_is_what_we_compute() -> None:
    hashes_by_name, block, leaves = documented_hashes(), documented_block(), []
    for index, (record, salt) in enumerate(documented_records()):
        header = record_header(record)
        assert header == stranger_header(asdict(record)) == documented_bytes(f"header of record {index}")
        assert re.search(rf"\b{len(header)} bytes[.:]", DOCUMENT)
        salted = body_hash(salt, record.body)
        assert salted == hashes_by_name[f"body hash of record {index}"]
        leaves.append(leaf_hash(header, salted))
        assert leaves[-1] == stranger_leaf(asdict(record), salted) == hashes_by_name[f"leaf {index}"]
    assert node_hash(*leaves[:2]) == hashes_by_name["node of leaf 0 and leaf 1"]
    assert root_of(leaves) == hashes_by_name["root: node of that node and leaf 2"] == block.root
    assert stranger_block_header(asdict(block)) == documented_bytes("header of the block")
    assert block.hash == hashes_by_name["block hash"]
    assert documented_proofs() == [prove(leaves, index) for index in range(3)]
    assert len(hashes_by_name) == 9


@pytest.mark.rule("LG-18")
def test_the_example_of_the_document_verifies() -> None:
    block, trusted = documented_block(), documented_hashes()["block hash"]
    for (record, salt), proof in zip(documented_records(), documented_proofs(), strict=True):
        assert verify(record, salt, proof, block)
        assert stranger_accepts(record, salt, proof, block, trusted)
        assert not stranger_accepts(record, salt, proof, block, bytes(32))
