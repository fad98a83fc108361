"""How `plan` handles client sequences and their eviction."""

import pytest

from core.item_builders import (
    DAY_MS,
    Log,
    assert_committed,
    assert_refused,
    assert_replayed,
    key,
    transaction,
)
from oncelog.core.operations import Condition, DeleteEntity, Must, SetEntity
from oncelog.core.values import (
    Reason,
)


@pytest.mark.rule("LG-4", "LG-5", "LG-6", "LG-9")
def test_gap_in_client_sequences_is_refused() -> None:
    log = Log()
    assert assert_refused(log(transaction(1, 2)), Reason.SEQUENCE_GAP).current == 0
    assert assert_refused(log(transaction(1, 0)), Reason.MALFORMED).field == "client_sequence"
    assert assert_committed(log(transaction(1, 1))).client_sequence == 1
    assert assert_committed(log(transaction(2, 2))).client_sequence == 2
    assert assert_refused(log(transaction(9, 4)), Reason.SEQUENCE_GAP).current == 2
    entry = log.snapshot.clients["ledger", "org/1", "c1"]
    assert (entry.sequence, entry.last_seen_ms, entry.last_key, entry.last_fingerprint) == (2, 1_000_000, key(2), b"x")


@pytest.mark.rule("LG-4", "LG-11")
def test_known_key_is_replayed_for_any_client_sequence() -> None:
    log = Log()
    first = assert_committed(log(transaction(1, 1)))
    second = assert_committed(log(transaction(2, 2)))
    for sequence in (1, 2, 3, 77):
        assert assert_replayed(log(transaction(1, sequence))).receipt == first
    assert assert_replayed(log(transaction(2, 1))).receipt == second


@pytest.mark.rule("LG-6", "LG-13")
def test_old_client_sequence_is_replayed_or_refused() -> None:
    log = Log()
    first = assert_committed(log(transaction(1, 1, content="one")))
    assert_committed(log(transaction(2, 2, content="two")))
    assert assert_replayed(log(transaction(None, 1, content="one"))).receipt == first
    assert assert_replayed(log(transaction(7, 1, content="one"))).receipt == first
    assert assert_refused(log(transaction(7, 1, content="two")), Reason.SEQUENCE_REUSED).current == 2
    assert_refused(log(transaction(None, 2, content="one")), Reason.SEQUENCE_REUSED)
    assert len(log.records) == 2


@pytest.mark.rule("LG-13")
def test_write_without_key_is_retried_by_its_client_sequence() -> None:
    log = Log()
    receipt = assert_committed(log(transaction(None, 1)))
    assert assert_replayed(log(transaction(None, 1))).receipt == receipt
    assert assert_committed(log(transaction(None, 2))).client_sequence == 2
    assert not log.snapshot.keys


@pytest.mark.rule("LG-13", "LG-15")
def test_stored_record_decides_the_answer_to_an_evicted_client_sequence() -> None:
    log = Log(eviction_interval=1)
    first = assert_committed(log(transaction(1, 1)))
    log.now_ms += DAY_MS
    log(transaction(2, 2))
    log.now_ms += 1
    log(transaction(3, 3))
    assert assert_replayed(log(transaction(1, 1))).receipt == first
    assert assert_replayed(log(transaction(None, 1))).receipt == first
    assert assert_refused(log(transaction(9, 1, content="other")), Reason.SEQUENCE_REUSED).current == 3
    # A replay lacks the receipt only if the record itself is gone.
    log.snapshot.sequences = {identity: one for identity, one in log.snapshot.sequences.items() if identity[3] != 1}
    assert assert_replayed(log(transaction(1, 1))).receipt is None
    assert assert_replayed(log(transaction(9, 1, content="other"))).receipt is None
    assert assert_replayed(log(transaction(2, 2))).receipt is not None


@pytest.mark.rule("LG-15")
def test_eviction_is_strict_and_runs_only_at_its_interval() -> None:
    def last_sequence_after(eviction_interval: int, later_ms: int) -> int:
        """Return the last sequence in the refusal of a gap, after another client has written."""
        log = Log(eviction_interval=eviction_interval)
        log(transaction(1, 1))
        log.now_ms += later_ms
        log(transaction(1, 1, client="c2"))
        return assert_refused(log(transaction(99, 9)), Reason.SEQUENCE_GAP).current

    assert last_sequence_after(1, DAY_MS) == 1, "an age equal to the time to live is not older"
    assert last_sequence_after(1, DAY_MS + 1) == 0
    assert last_sequence_after(2, DAY_MS + 1) == 0, "position 2 evicts"
    assert last_sequence_after(3, DAY_MS + 1) == 1, "no eviction before position 3"


@pytest.mark.rule("LG-15")
def test_record_at_an_eviction_position_applies_before_the_eviction() -> None:
    log = Log(eviction_interval=2)
    log(transaction(1, 1))
    log.now_ms += 2 * DAY_MS
    assert assert_committed(log(transaction(2, 2))).position == 2
    assert assert_committed(log(transaction(3, 3))).client_sequence == 3
    assert assert_refused(log(transaction(1, 7)), Reason.SEQUENCE_GAP).current == 3, (
        "the old key is gone, but the client is not"
    )


@pytest.mark.rule("LG-15")
def test_batch_across_an_eviction_decides_like_single_writes() -> None:
    together, single = Log(eviction_interval=2), Log(eviction_interval=2)
    for log in (together, single):
        log(transaction(1, 1))
        log.now_ms += 2 * DAY_MS
    writes = [transaction(1, 1, client="c2"), transaction(2, 2), transaction(1, 1), transaction(3, 2, client="c2")]
    in_one = together.submit_separately(*writes)
    one_by_one = [single(write) for write in writes]
    assert [type(one) for one in in_one] == [type(one) for one in one_by_one]
    assert_refused(in_one[1], Reason.SEQUENCE_GAP)
    assert assert_committed(in_one[2]).position == 3
    assert together.snapshot.clients == single.snapshot.clients
    assert together.snapshot.heads.keys() == single.snapshot.heads.keys()


@pytest.mark.rule("LG-16")
def test_evicted_client_is_unknown_and_setting_the_clock_back_evicts_nothing() -> None:
    log = Log(eviction_interval=1)
    log(transaction(1, 1))
    log(transaction(2, 2))
    log.now_ms -= 3 * DAY_MS
    log(transaction(1, 1, client="c2"))
    assert assert_replayed(log(transaction(1, 1))).receipt is not None
    log.now_ms += 7 * DAY_MS
    log(transaction(2, 2, client="c2"))
    assert assert_refused(log(transaction(3, 3)), Reason.SEQUENCE_GAP).current == 0
    assert assert_committed(log(transaction(1, 1))).client_sequence == 1, (
        "documented limit: a late retry is a new request"
    )


@pytest.mark.rule("LG-17")
def test_transaction_is_atomic_and_has_one_client_sequence() -> None:
    log = Log()
    writes = [SetEntity(f"k{number}", b"v") for number in range(5)]
    receipt = assert_committed(log(transaction(1, 1, *writes)))
    assert (receipt.position, receipt.client_sequence, len(log.snapshot.entities)) == (1, 1, 5)
    failing = [SetEntity("k9", b"v"), SetEntity("k0", b"w", condition=Condition(Must.NOT_EXIST))]
    assert_refused(log(transaction(2, 2, *failing)), Reason.KEY_EXISTS)
    assert ("org/1", "k9") not in log.snapshot.entities
    assert_refused(log(transaction(2, 3, *failing)), Reason.SEQUENCE_GAP)
    assert assert_committed(log(transaction(2, 2, DeleteEntity("k0")))).client_sequence == 2
