"""How `plan` handles leases."""

import pytest
from msgspec.structs import replace

from core.item_builders import (
    HOUR_MS,
    Log,
    assert_committed,
    assert_refused,
    assert_replayed,
    claim,
    done,
    release,
    renewal,
)
from oncelog.core.limits import LEASE_MEMORY_MS
from oncelog.core.policy import OnReuse, Order, Policy, kept_for
from oncelog.core.values import (
    Applied,
    Claim,
    Granted,
    Mode,
    Reason,
    Submission,
)


@pytest.mark.rule("RU-6", "RU-7")
def test_one_claim_is_granted_and_the_others_get_its_event() -> None:
    log = Log()
    granted, busy = log.submit_separately(claim(1, "a"), claim(1, "b"))
    assert granted == Granted(fence=1, until_ms=log.now_ms + 30_000)
    waiting = assert_refused(busy, Reason.IN_FLIGHT)
    assert (waiting.current, waiting.retry_after_ms) == (1, 30_000)
    receipt = assert_committed(log(done(1, "a", 1)))
    assert receipt.sequence == 1
    assert not log.snapshot.leases
    assert assert_replayed(log(claim(1, "b"))).receipt == receipt
    assert assert_replayed(log(done(1, "a", 1, "again"))).receipt == receipt


@pytest.mark.rule("RU-7")
def test_expired_lease_is_taken_over_and_its_holder_cannot_complete() -> None:
    log = Log()
    log(claim(1, "a"))
    log.now_ms += 29_999
    assert_refused(log(claim(1, "b")), Reason.IN_FLIGHT)
    log.now_ms += 1
    assert log(claim(1, "b")) == Granted(fence=2, until_ms=log.now_ms + 30_000)
    assert assert_refused(log(done(1, "a", 1, "late")), Reason.LEASE_LOST).current == 2
    assert_refused(log(renewal(1, 1)), Reason.LEASE_LOST)
    assert log(release(1, 1)) == Applied(changed=False)
    assert_committed(log(done(1, "b", 2, "second")))
    assert [record.body for record in log.records] == [b"second"]


@pytest.mark.rule("RU-7")
def test_lease_is_renewed_and_completes_late_before_a_takeover() -> None:
    log = Log()
    log(claim(1, "a"))
    log.now_ms += 20_000
    assert log(renewal(1, 1)) == Granted(1, log.now_ms + 30_000)
    assert log(renewal(1, 1, lease_ms=1)) == Granted(1, log.now_ms + 30_000), "a renewal never shortens the lease"
    log.now_ms += HOUR_MS
    assert_committed(log(done(1, "a", 1)))
    log(claim(2, "a"))
    log.now_ms += 30_000 + LEASE_MEMORY_MS
    assert log(renewal(2, 2)) == Granted(2, log.now_ms + 30_000)
    log.now_ms += 30_000 + LEASE_MEMORY_MS + 1
    assert_refused(log(done(2, "a", 2)), Reason.LEASE_LOST)


@pytest.mark.rule("RU-7")
def test_failure_is_reported_to_waiting_claims_and_a_new_claim_is_granted() -> None:
    log = Log()
    log(claim(1, "a"))
    assert log(release(1, 1, b"boom")) == Applied(changed=True)
    assert log(release(1, 1, b"boom")) == Applied(changed=False)
    failed = assert_refused(log(claim(1, "b", waited_for=1)), Reason.RUN_FAILED)
    assert (failed.value, failed.current) == (b"boom", 1)
    assert_refused(log(done(1, "a", 1)), Reason.LEASE_LOST)
    assert log(claim(1, "c")) == Granted(2, log.now_ms + 30_000)
    assert log(claim(1, "c")) == Granted(2, log.now_ms + 30_000), "a repeated claim gets the same fence"
    failed = assert_refused(log(claim(1, "b", waited_for=1)), Reason.RUN_FAILED)
    assert failed.value == b"boom", "the failure is reported while another caller runs"
    assert_refused(log(claim(1, "b", waited_for=2)), Reason.IN_FLIGHT)
    assert log(release(1, 2, b"", holder="c")) == Applied(changed=True)
    assert assert_refused(log(claim(1, "b", waited_for=2)), Reason.RUN_FAILED).value == b""


@pytest.mark.rule("RU-7")
def test_repeated_claim_never_shortens_its_lease() -> None:
    log = Log()
    log(claim(1, "a"))
    log(renewal(1, 1, lease_ms=300_000))
    assert log(claim(1, "a")) == Granted(1, log.now_ms + 300_000)


@pytest.mark.rule("RU-7")
def test_released_lease_is_not_a_failure() -> None:
    log = Log()
    log(claim(1, "a"))
    assert log(release(1, 1)) == Applied(changed=True)
    assert log(claim(1, "b", waited_for=1)) == Granted(2, log.now_ms + 30_000)


@pytest.mark.rule("RU-7")
def test_fence_of_another_holder_is_refused() -> None:
    log = Log()
    log(claim(1, "a"))
    fence = assert_refused(log(claim(1, "b")), Reason.IN_FLIGHT).current
    assert_refused(log(done(1, "b", fence)), Reason.LEASE_LOST)
    assert_refused(log(renewal(1, fence, holder="b")), Reason.LEASE_LOST)
    assert log(release(1, fence, holder="b")) == Applied(changed=False)
    assert_committed(log(done(1, "a", fence)))


@pytest.mark.rule("RU-7", "CO-15")
def test_rate_limit_applies_to_new_claims_but_not_to_granted_work() -> None:
    log = Log()
    known_only = replace(claim(1, "a"), known_only=True)
    assert_refused(log(known_only), Reason.NOT_KNOWN)
    log(claim(1, "a"))
    assert log(known_only) == Granted(1, log.now_ms + 30_000)
    receipt = assert_committed(log(replace(done(1, "a", 1), known_only=True)))
    assert assert_replayed(log(known_only)).receipt == receipt


@pytest.mark.rule("RU-7")
def test_fencing_numbers_are_never_reused() -> None:
    log = Log(lanes=1)
    fences = []
    for number in range(3):
        granted = log(claim(number, "a"))
        assert isinstance(granted, Granted)
        fences.append(granted.fence)
        log(release(number, granted.fence))
    again = log(claim(0, "b"))
    assert isinstance(again, Granted)
    assert [*fences, again.fence] == [1, 2, 3, 4]
    before = log.snapshot.heads[1]
    verdicts = log.submit_request(claim(7, "a"), claim(0, "c"), mode=Mode.ALL)
    assert_refused(verdicts[0], Reason.NOT_PROCESSED)
    assert log.snapshot.heads[1] == before


@pytest.mark.rule("RU-7", "RU-11")
def test_lease_is_bound_to_its_fingerprint() -> None:
    header = Policy(
        name="http",
        key_bytes=(1, 255),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=kept_for(hours=24),
        leased=True,
    )
    log = Log()

    def request(content: bytes, holder: str) -> Claim:
        return Claim(policy=header, scope="user:ann", key=b"k", fingerprint=content, holder=holder)

    log(request(b"x", "a"))
    assert_refused(log(request(b"y", "b")), Reason.IDENTITY_REUSED)
    assert_refused(log(request(b"y", "a")), Reason.IDENTITY_REUSED)
    assert_refused(log(request(b"x", "b")), Reason.IN_FLIGHT)
    changed = Submission(policy=header, scope="user:ann", key=b"k", fingerprint=b"y", holder="a", fence=1)
    assert_refused(log(changed), Reason.IDENTITY_REUSED)
    unleased = Submission(policy=header, scope="user:ann", key=b"k", fingerprint=b"x")
    assert_refused(log(unleased), Reason.IN_FLIGHT)
    log.now_ms += 30_000
    granted = log(request(b"y", "a"))
    assert isinstance(granted, Granted)
    assert granted.fence == 2, "a different request gets a new fence"
    log.now_ms += 30_000
    assert_committed(log(unleased))
    assert_refused(log(request(b"y", "b")), Reason.IDENTITY_REUSED)
    assert assert_replayed(log(request(b"x", "b"))).receipt is not None
