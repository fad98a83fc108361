"""Verdicts say whether they are a success, and return their receipt or raise their refusal."""

import pytest

import oncelog
from oncelog import Applied, Committed, Granted, Reason, Receipt, Refused, RefusedError, Replayed, RetryLaterError

RECEIPT = Receipt(lane=0, position=7, sequence=0, log_time_ms=1, height=2, client_sequence=0)
TEMPORARY = {Reason.BUSY, Reason.IN_FLIGHT, Reason.QUOTA_EXCEEDED, Reason.RATE_LIMITED, Reason.READ_ONLY}


@pytest.mark.parametrize("verdict", [Committed(RECEIPT), Replayed(RECEIPT), Replayed(RECEIPT, mismatch=True)])
def test_known_write_returns_its_receipt(verdict: Committed | Replayed[Receipt]) -> None:
    assert verdict.ok
    assert verdict.unwrap() == RECEIPT


def test_write_whose_place_is_forgotten_returns_none() -> None:
    verdict = Replayed(None)
    assert verdict.ok
    assert verdict.unwrap() is None


@pytest.mark.parametrize("verdict", [Granted(fence=1, until_ms=5), Applied(changed=False)])
def test_verdict_without_a_receipt_returns_itself(verdict: Granted | Applied) -> None:
    assert verdict.ok
    assert verdict.unwrap() is verdict


@pytest.mark.parametrize("reason", Reason)
def test_refusal_raises_an_error_with_its_reason(reason: Reason) -> None:
    refused = Refused(reason, "no", field="x", current=3, retry_after_ms=250)
    assert not refused.ok
    with pytest.raises(RefusedError, match=f"^{reason.value}: no$") as raised:
        refused.unwrap()
    error = raised.value
    assert (error.reason, error.field, error.current) == (reason, "x", 3)
    assert isinstance(error, RetryLaterError) == (reason in TEMPORARY)


def test_rate_limit_tells_when_to_retry() -> None:
    with pytest.raises(RetryLaterError) as raised:
        Refused(Reason.RATE_LIMITED, "too many new writes", retry_after_ms=250).unwrap()
    assert raised.value.retry_after_ms == 250
    assert isinstance(raised.value, oncelog.OncelogError)
