"""Record headers and the chain of blocks of each lane (LG-18)."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from core.independent_verifier import independent_header, independent_heads, independent_read_header
from core.proof_samples import (
    LOG,
    NOON_MS,
    NOT_IN_THE_HEADER,
    SAMPLES,
    build_claim,
    build_event,
    changed_structs,
    fill_log,
    hash_leaves,
)
from oncelog.core.plan import plan
from oncelog.core.proof import (
    NO_HASH,
    compute_root,
    encode_record_header,
    seal,
)
from oncelog.core.values import Record, Request, Snapshot
from oncelog.testing.memory_log import MemoryLog

# --- the header ------------------------------------------------------------------------------------------

# Texts that look like parts of frames: labels, lengths, zero bytes.
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
def test_header_can_be_decoded_and_is_unique(record: Record) -> None:
    header = encode_record_header(record)
    assert header == independent_header(asdict(record))
    assert independent_read_header(header) == header_fields(record)


@pytest.mark.rule("LG-18")
@given(records, records, st.sets(st.sampled_from(Record.__struct_fields__)))
def test_records_that_differ_in_any_fields_have_different_headers(one: Record, other: Record, taken: set[str]) -> None:
    mixed = replace(one, **{field: getattr(other, field) for field in taken})
    same = header_fields(mixed) == header_fields(one)
    assert (encode_record_header(mixed) == encode_record_header(one)) == same


TEXT_FIELDS = ("policy", "scope", "key", "fingerprint", "actor", "client")


@pytest.mark.rule("LG-18")
@given(records, st.text(alphabet="aé\x00", max_size=6), st.data())
def test_shifted_field_boundaries_do_not_collide(record: Record, written: str, data: st.DataObject) -> None:
    first, second = data.draw(st.sampled_from(list(pairwise(TEXT_FIELDS))))
    cuts = data.draw(st.lists(st.integers(0, len(written)), min_size=2, max_size=2, unique=bool(written)))
    headers = set()
    for cut in cuts:
        parts = {first: written[:cut], second: written[cut:]}
        as_bytes = {field: part.encode() if field in {"key", "fingerprint"} else part for field, part in parts.items()}
        headers.add(encode_record_header(replace(record, **as_bytes)))
    assert len(headers) == len(set(cuts))


@pytest.mark.rule("LG-18")
def test_partitions_are_framed_in_order_and_separate_from_the_client() -> None:
    record = SAMPLES[0][0]
    lists = [(), ("",), ("", ""), ("a",), ("ab",), ("a", "b"), ("b", "a"), ("", "ab"), ("ab", ""), ("a", "", "b")]
    lists += [("a\x00\x00\x00\x00",), ("apartition\x00\x00\x00\x01b",)]
    headers = {
        encode_record_header(replace(record, partitions=one, client=client)) for one in lists for client in ("", "a")
    }
    assert len(headers) == 2 * len(lists)


# --- the chain -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_each_lane_chains_all_its_batches() -> None:
    lanes = {block.lane for block in LOG.blocks}
    assert len(lanes) >= 3
    for lane in lanes:
        blocks = [block for block in LOG.blocks if block.lane == lane]
        assert [block.height for block in blocks] == list(range(1, len(blocks) + 1))
        assert len(blocks) >= 5
        assert (blocks[0].previous, blocks[0].first_position) == (NO_HASH, 1)
        for before, after in pairwise(blocks):
            assert after.previous == before.hash
            assert after.first_position == before.first_position + before.count
            assert after.log_time_ms > before.log_time_ms
        for block in blocks:
            inside = [one for one in LOG.records if (one.lane, one.height) == (lane, block.height)]
            assert [one.position for one in inside] == [block.first_position + place for place in range(block.count)]
            assert {one.log_time_ms for one in inside} == {block.log_time_ms}
            assert block.root == compute_root(hash_leaves(LOG, block))


@pytest.mark.rule("LG-18")
def test_head_has_the_hash_of_the_newest_block_even_after_a_lease() -> None:
    newest = {block.lane: block for block in LOG.blocks}
    heads = {lane: head for lane, head in LOG.snapshot.heads.items() if head.position}
    assert heads.keys() == newest.keys()
    assert any(head.fence for head in heads.values())
    for lane, head in heads.items():
        assert (head.block_hash, head.height) == (newest[lane].hash, newest[lane].height)


def heads_of(log: MemoryLog) -> dict[int, bytes]:
    return {lane: head.block_hash for lane, head in log.snapshot.heads.items() if head.position}


@pytest.mark.rule("LG-18")
def test_independent_verifier_recomputes_heads_and_finds_any_change() -> None:
    heads, stored = heads_of(LOG), [asdict(record) for record in LOG.records]
    assert independent_heads(stored, LOG.salts) == heads
    for place, record in enumerate(LOG.records):
        # One change per field is enough here, because the tests above cover all changes.
        for field, changed in dict(changed_structs(record)).items():
            altered = [*stored[:place], asdict(changed), *stored[place + 1 :]]
            assert (independent_heads(altered, LOG.salts) == heads) == (field == "erased"), (place, field)


@pytest.mark.rule("LG-18")
def test_removed_duplicated_or_moved_record_is_found() -> None:
    heads, stored = heads_of(LOG), [asdict(record) for record in LOG.records]
    for place, record in enumerate(stored):
        without = stored[:place] + stored[place + 1 :], LOG.salts[:place] + LOG.salts[place + 1 :]
        assert independent_heads(*without) != heads
        assert independent_heads([*stored, record], [*LOG.salts, LOG.salts[place]]) != heads
        for other in range(place):
            moved = list(stored)
            moved[place] = {**stored[other], "position": record["position"], "lane": record["lane"]}
            assert independent_heads(moved, LOG.salts) != heads


@pytest.mark.rule("LG-18")
def test_truncation_is_found_only_with_a_trusted_head() -> None:
    whole, cut = fill_log(5), fill_log(4)
    kept = len(cut.records)
    assert (whole.records[:kept], whole.salts[:kept]) == (cut.records, cut.salts)
    recomputed = independent_heads([asdict(record) for record in whole.records[:kept]], whole.salts[:kept])
    assert recomputed == heads_of(cut)
    assert all(recomputed[lane] != block_hash for lane, block_hash in heads_of(whole).items())


@pytest.mark.rule("LG-18")
def test_batch_without_records_makes_no_block() -> None:
    changes = plan([Request((build_claim(1),))], Snapshot(), NOON_MS).changes
    before = dict(changes.heads)
    assert seal(changes, []).blocks == []
    assert changes.heads == before


@pytest.mark.rule("LG-18")
@pytest.mark.parametrize("salts", [0, 1, 3])
def test_wrong_number_of_salts_is_refused(salts: int) -> None:
    changes = plan([Request((build_event(1), build_event(2)))], Snapshot(), NOON_MS).changes
    before = dict(changes.heads)
    with pytest.raises(ValueError, match="zip"):
        seal(changes, [bytes(16)] * salts)
    assert changes.heads == before
