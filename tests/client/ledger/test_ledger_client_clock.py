"""Clock steps of the ledger client: a write of unknown age is sent again only after asking for the client state."""

import pytest

from client.ledger.test_ledger_client_protocol import Driven
from oncelog.client.ledger.entries import ForgottenClient
from oncelog.client.ledger.protocol import CLOCK_CORRECTION_MS, RETENTION_MS, STATE_VALID_MS
from oncelog.errors import LostError

pytestmark = pytest.mark.rule("LG-19")

NOON_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("back_ms", "is_told"), [(0, False), (CLOCK_CORRECTION_MS, False), (CLOCK_CORRECTION_MS + 1, True)]
)
def test_pending_write_dated_in_the_future_is_reported_as_forgotten(back_ms: int, is_told: bool) -> None:
    """The age of such a write is unknown: the server may have received and forgotten it."""
    driven = Driven(pending=(1,), now_ms=-back_ms).told(0)  # made at 0
    assert driven.protocol.forgotten == (ForgottenClient(0, 0) if is_told else None)
    assert driven.sent() == ([] if is_told else [(1, 1)])


def test_known_client_sends_pending_writes_despite_a_clock_set_back() -> None:
    driven = Driven(last=3, pending=(4,), now_ms=-CLOCK_CORRECTION_MS - 1).told(3)
    assert driven.protocol.forgotten is None
    assert driven.sent() == [(1, 4)]


def lost(now_ms: int) -> Driven:
    """Return a client whose first write got no answer."""
    driven = Driven(now_ms=now_ms).told(0)
    driven.submit()
    assert driven.sent() == [(1, 1)]
    driven.answer(1, LostError("lost"))
    driven.protocol.release()
    return driven


@pytest.mark.parametrize("step_ms", [-CLOCK_CORRECTION_MS - 1, -RETENTION_MS, RETENTION_MS + 1])
def test_clock_step_makes_a_retry_ask_for_the_client_state_first(step_ms: int) -> None:
    driven = lost(NOON_MS)
    driven.now_ms += step_ms
    assert driven.sent() == []
    assert driven.told(0).protocol.forgotten == ForgottenClient(0, 0)


@pytest.mark.parametrize("step_ms", [-CLOCK_CORRECTION_MS, -1, 0, STATE_VALID_MS + 1, RETENTION_MS])
def test_small_clock_correction_does_not_delay_a_retry(step_ms: int) -> None:
    driven = lost(NOON_MS)
    driven.now_ms += step_ms
    assert driven.sent() == [(1, 1)]


def test_unsent_write_is_sent_despite_a_clock_set_back() -> None:
    driven = Driven(now_ms=NOON_MS).told(0)
    driven.submit()
    driven.now_ms -= RETENTION_MS
    assert driven.sent() == [(1, 1)]


def test_client_state_is_not_requested_at_every_retry_after_a_clock_set_back() -> None:
    driven = Driven(last=3, pending=(4,), now_ms=-RETENTION_MS).told(3)
    assert driven.sent() == [(1, 4)]
    driven.answer(1, LostError("lost"))
    driven.protocol.release()
    driven.now_ms += STATE_VALID_MS
    assert driven.sent() == [(1, 4)]  # the client state was read recently
    driven.answer(1, LostError("lost"))
    driven.protocol.release()
    driven.now_ms += 1
    assert driven.sent() == []
    assert driven.told(3).sent() == [(1, 4)]
