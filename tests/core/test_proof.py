"""Merkle trees, leaves and proofs of single records (LG-18, CO-41)."""

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from core.independent_verifier import (
    independent_block_hash,
    independent_block_header,
    independent_frame,
    independent_reaches_root,
    independent_verify_erased,
    largest_power_of_two_below,
)
from core.proof_samples import (
    EVIDENCE,
    LOG,
    NOON_MS,
    NOT_IN_THE_HEADER,
    SAMPLES,
    Evidence,
    build_event,
    changed_bytes,
    changed_structs,
    collect_evidence,
    flip_bit,
    independent_accepts,
    make_salt_source,
)
from oncelog.core.proof import (
    NO_HASH,
    SALT_BYTES,
    Block,
    Proof,
    compute_root,
    encode_record_header,
    hash_body,
    hash_leaf,
    hash_node,
    prove,
    verify,
    verify_header,
    verify_inclusion,
)
from oncelog.core.values import Record, Request
from oncelog.testing.memory_log import MemoryLog

# --- the tree --------------------------------------------------------------------------------------------

DATA = [b"leaf %d" % number for number in range(1000)]
LEAVES = [hash_leaf(one, b"") for one in DATA]
ALL_INDEXES_UP_TO = 33
ALL_BYTES_UP_TO = 17


@cache
def direct_root(start: int, end: int) -> bytes:
    """RFC 9162, section 2.1.1, applied literally to DATA[start:end]."""
    if end - start == 1:
        return sha256(b"\x00" + DATA[start]).digest()
    split = start + largest_power_of_two_below(end - start)
    return sha256(b"\x01" + direct_root(start, split) + direct_root(split, end)).digest()


def direct_path(index: int, start: int, end: int) -> tuple[bytes, ...]:
    """RFC 9162, section 2.1.3.1, applied literally to DATA[start:end]."""
    if end - start == 1:
        return ()
    split = largest_power_of_two_below(end - start)
    if index < split:
        return (*direct_path(index, start, start + split), direct_root(start + split, end))
    return (*direct_path(index - split, start + split, end), direct_root(start, start + split))


def sample_indexes(count: int) -> Sequence[int]:
    """Return all indexes of a small tree. For a large tree, return both ends of the left part, and the middle and end
    of the right part.
    """
    if count <= ALL_INDEXES_UP_TO:
        return range(count)
    split = largest_power_of_two_below(count)
    return sorted({0, split - 1, split + (count - split) // 2, count - 1})


@pytest.mark.rule("LG-18")
def test_root_equals_the_definition_of_the_rfc_for_every_size() -> None:
    for count in range(1, 1001):
        assert compute_root(LEAVES[:count]) == direct_root(0, count), count


def changed_proofs(proof: Proof) -> Iterator[Proof]:
    """Yield proofs with another index, a changed byte, or a hash added, removed, repeated or moved."""
    path = proof.path
    others = {0, proof.index - 1, proof.index + 1, proof.index ^ 1, proof.count - 1, proof.count, -1}
    yield from (replace(proof, index=one) for one in sorted(others - {proof.index}))
    for place, beside in enumerate(path):
        # All bytes in a small tree; in a large tree, a different byte of each hash.
        changed = [flip_bit(beside, proof.count + place)] if proof.count > ALL_BYTES_UP_TO else changed_bytes(beside)
        yield from (replace(proof, path=(*path[:place], one, *path[place + 1 :])) for one in changed)
    for place in {0, len(path) // 2, len(path) - 1} if path else set():
        yield replace(proof, path=path[:place] + path[place + 1 :])
        yield replace(proof, path=(*path[:place], path[place], *path[place:]))
    yield from (replace(proof, path=one) for one in ((*path, NO_HASH), (NO_HASH, *path), (*path, b"")))
    if len(path) > 1:
        yield replace(proof, path=path[::-1])


@pytest.mark.rule("LG-18")
def test_proof_equals_the_definition_of_the_rfc_and_changed_proofs_fail(is_soak: bool) -> None:
    for count in (
        range(1, 1001) if is_soak else (*range(1, 130), *range(130, 1001, 29), 255, 256, 257, 511, 512, 513, 1000)
    ):
        leaves = LEAVES[:count]
        root = compute_root(leaves)
        for index in sample_indexes(count):
            proof = prove(leaves, index)
            assert proof == Proof(index, count, direct_path(index, 0, count))
            assert verify_inclusion(leaves[index], proof, root), (index, count)
            assert not verify_inclusion(flip_bit(leaves[index], count), proof, root)
            assert not verify_inclusion(leaves[index], proof, flip_bit(root, count))
            for changed in changed_proofs(proof):
                assert not verify_inclusion(leaves[index], changed, root), (index, count, changed)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", range(1, ALL_BYTES_UP_TO + 1))
def test_proof_fails_for_other_leaves_and_roots(count: int) -> None:
    root = compute_root(LEAVES[:count])
    for index in range(count):
        proof = prove(LEAVES[:count], index)
        assert not any(verify_inclusion(one, proof, root) for one in changed_bytes(LEAVES[index]))
        assert not any(verify_inclusion(LEAVES[index], proof, one) for one in changed_bytes(root))
        others = [place for place, leaf in enumerate(LEAVES[:count]) if verify_inclusion(leaf, proof, root)]
        assert others == [index]


def list_path_sides(index: int, count: int) -> list[str]:
    """Return the side from which the path of a leaf reaches each node, lowest first."""
    if count == 1:
        return []
    split = largest_power_of_two_below(count)
    return (
        [*list_path_sides(index, split), "left"]
        if index < split
        else [*list_path_sides(index - split, count - split), "right"]
    )


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", range(1, 10))
def test_proof_passes_only_for_indexes_with_the_same_path(count: int) -> None:
    root = compute_root(LEAVES[:count])
    for index in range(count):
        path = prove(LEAVES[:count], index).path
        for other_count in range(-1, 20):
            for other in range(-1, other_count + 1):
                is_a_place = 0 <= other < other_count
                expected = is_a_place and list_path_sides(other, other_count) == list_path_sides(index, count)
                assert verify_inclusion(LEAVES[index], Proof(other, other_count, path), root) == expected


@pytest.mark.rule("LG-18")
def test_byte_cannot_move_between_leaf_and_sibling_hash() -> None:
    left, right = LEAVES[:2]
    root = compute_root([left, right])
    for cut in (0, 1, 31, 33, 63, 64):
        both = left + right
        assert not verify_inclusion(both[:cut], Proof(0, 2, (both[cut:],)), root)
        assert not verify_inclusion(both[cut:], Proof(1, 2, (both[:cut],)), root)


@pytest.mark.rule("LG-18")
def test_block_header_fixes_the_count_that_the_root_does_not() -> None:
    root, proof = compute_root(LEAVES[:3]), prove(LEAVES[:3], 0)
    assert verify_inclusion(LEAVES[0], replace(proof, count=4), root)
    for record, salt, own, block in EVIDENCE:
        for count in range(1, 3 * block.count + 3):
            changed = replace(own, count=count)
            assert verify(record, salt, changed, block) == (count == block.count)
            # A changed header makes a different block, whose hash is not trusted.
            forged = replace(block, count=count)
            assert (forged.hash == block.hash) == (count == block.count)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize(("count", "index"), [(0, 0), (1, 1), (1, -1), (5, 5), (5, -5)])
def test_proof_of_a_missing_leaf_is_refused(count: int, index: int) -> None:
    with pytest.raises(IndexError):
        prove(LEAVES[:count], index)


hashes = st.sampled_from(
    [*LEAVES[:4], compute_root(LEAVES[:2]), compute_root(LEAVES[2:4]), compute_root(LEAVES[:4]), b"", b"x" * 33]
)


@pytest.mark.rule("LG-18")
@given(hashes, st.integers(-2, 9), st.integers(-2, 9), st.lists(hashes, max_size=4), hashes)
def test_independent_verifier_agrees_on_any_proof(
    leaf: bytes, index: int, count: int, path: list[bytes], root: bytes
) -> None:
    proof = Proof(index, count, tuple(path))
    assert verify_inclusion(leaf, proof, root) == independent_reaches_root(leaf, asdict(proof), root)


# --- domains ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
@given(st.binary(min_size=64, max_size=64))
def test_leaf_node_and_block_hashes_have_separate_domains(data: bytes) -> None:
    left, right = data[:32], data[32:]
    assert hash_leaf(left, right) == sha256(b"\x00" + data).digest()
    assert hash_node(left, right) == sha256(b"\x01" + data).digest()
    block = Block(1, 2, 3, 4, 5, left, right)
    numbers = independent_block_header(asdict(block))[:33]
    assert block.hash == sha256(b"\x02" + numbers + data).digest()
    assert block.hash not in {hash_leaf(numbers + left, right), hash_node(numbers + left, right)}


@pytest.mark.rule("LG-18")
def test_inner_node_does_not_verify_as_a_record() -> None:
    leaves = LEAVES[:4]
    left, right = hash_node(*leaves[:2]), hash_node(*leaves[2:])
    as_if_one_level_less = Proof(0, 2, (right,))
    assert verify_inclusion(left, as_if_one_level_less, compute_root(leaves))
    assert not verify_inclusion(hash_leaf(leaves[0], leaves[1]), as_if_one_level_less, compute_root(leaves))


# --- records ---------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_every_record_verifies_with_both_verifiers() -> None:
    for record, salt, proof, block in EVIDENCE:
        assert verify(record, salt, proof, block)
        assert independent_accepts(record, salt, proof, block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("count", [*range(1, 20), 31, 32, 33, 100])
def test_every_record_of_a_batch_of_any_size_verifies(count: int) -> None:
    log = MemoryLog(draw=make_salt_source())
    log.submit([Request(tuple(build_event(number) for number in range(count)))], NOON_MS)
    (block,) = log.blocks
    assert block.count == count
    for record, salt, proof, its_block in collect_evidence(log):
        assert verify(record, salt, proof, its_block)
        assert independent_accepts(record, salt, proof, its_block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("evidence", SAMPLES, ids=["event", "transaction"])
def test_changed_record_field_fails_verification(evidence: Evidence) -> None:
    record, salt, proof, block = evidence
    seen = set()
    for field, changed in changed_structs(record):
        seen.add(field)
        assert not verify(changed, salt, proof, block), field
        # The `erased` mark is not covered by a hash, and the hashes do not depend on it.
        assert independent_accepts(changed, salt, proof, block, block.hash) == (field == "erased"), field
    assert seen == {*Record.__struct_fields__} - {"trace"}


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("evidence", SAMPLES, ids=["event", "transaction"])
def test_changed_salt_or_proof_fails_verification(evidence: Evidence) -> None:
    record, salt, proof, block = evidence
    for changed_salt in changed_bytes(salt):
        assert not verify(record, changed_salt, proof, block)
        assert not independent_accepts(record, changed_salt, proof, block, block.hash)
    for changed_proof in changed_proofs(proof):
        assert not verify(record, salt, changed_proof, block)
        assert not independent_accepts(record, salt, changed_proof, block, block.hash)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("shift", [-16, -1, 1, 4])
def test_byte_cannot_move_between_salt_and_body(shift: int) -> None:
    record, salt, proof, block = SAMPLES[0]
    both = salt + record.body
    cut = SALT_BYTES + shift
    assert not independent_accepts(replace(record, body=both[cut:]), both[:cut], proof, block, block.hash)
    assert not verify(replace(record, body=both[cut:]), both[:cut], proof, block)


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize(
    "fields", [{"sequence": 2**64}, {"log_time_ms": -1}, {"client_sequence": -1}, {"scope": "\ud800"}], ids=str
)
def test_invalid_record_does_not_verify(fields: dict[str, Any]) -> None:
    record, salt, proof, block = SAMPLES[0]
    assert not verify(replace(record, **fields), salt, proof, block)


@pytest.mark.rule("LG-18")
def test_changed_block_field_changes_the_block_hash() -> None:
    for block in LOG.blocks:
        assert block.hash == independent_block_hash(asdict(block))
        for field, changed in changed_structs(block):
            assert changed.hash != block.hash, field
            assert changed.hash == independent_block_hash(asdict(changed)), field


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("field", ["lane", "height", "first_position", "count", "root"])
def test_record_does_not_verify_against_a_changed_block(field: str) -> None:
    for record, salt, proof, block in SAMPLES:
        for changed_field, changed in changed_structs(block):
            if changed_field == field:
                assert not verify(record, salt, proof, changed)
                assert not independent_accepts(record, salt, proof, changed, changed.hash)


@pytest.mark.rule("LG-18")
def test_record_does_not_verify_at_another_index() -> None:
    for record, salt, _, _ in EVIDENCE:
        for other, _, proof, block in EVIDENCE:
            assert verify(record, salt, proof, block) == (record is other)


@pytest.mark.rule("LG-18", "CO-41")
def test_erased_record_verifies_by_its_salted_hash() -> None:
    for record, salt, proof, block in EVIDENCE:
        erased, kept = replace(record, body=b"", erased=True), hash_body(salt, record.body)
        assert verify_header(erased, kept, proof, block)
        assert independent_verify_erased(asdict(erased), kept, asdict(proof), asdict(block), block.hash)
        assert not verify(erased, salt, proof, block), "an erased record has no body, even if the body was empty"
        assert verify(replace(erased, erased=False), salt, proof, block) == (record.body == b"")


@pytest.mark.rule("LG-18", "CO-41")
def test_changed_erased_record_fails_verification() -> None:
    record, salt, proof, block = SAMPLES[0]
    kept = hash_body(salt, record.body)
    assert not any(verify_header(record, changed, proof, block) for changed in changed_bytes(kept))
    for field, changed in changed_structs(record):
        assert verify_header(changed, kept, proof, block) == (field in NOT_IN_THE_HEADER), field


@pytest.mark.rule("LG-18", "CO-41")
def test_partition_cannot_move_from_header_to_stored_hash() -> None:
    record, salt, proof, block = SAMPLES[0]
    kept = hash_body(salt, record.body)
    for keep in range(len(record.partitions)):
        moved = b"".join(independent_frame("partition", one) for one in record.partitions[keep:])
        cut = replace(record, partitions=record.partitions[:keep])
        assert encode_record_header(cut) + moved == encode_record_header(record)
        assert not verify_header(cut, moved + kept, proof, block)
        assert not independent_verify_erased(asdict(cut), moved + kept, asdict(proof), asdict(block), block.hash)
