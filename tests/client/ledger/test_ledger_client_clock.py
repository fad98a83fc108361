"""Clock steps: the ledger client requests the client state before it resends a write whose age is unknown."""

import pytest

from client.ledger.test_ledger_client_protocol import ProtocolDriver
from oncelog.client.ledger.entries import ForgottenClient
from oncelog.client.ledger.protocol import CLOCK_CORRECTION_MS, RETENTION_MS, STATE_VALID_MS
from oncelog.errors import LostError

pytestmark = pytest.mark.rule("LG-19")

NOON_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("back_ms", "is_forgotten"), [(0, False), (CLOCK_CORRECTION_MS, False), (CLOCK_CORRECTION_MS + 1, True)]
)
def test_pending_write_dated_in_the_future_is_reported_as_forgotten(back_ms: int, is_forgotten: bool) -> None:
    """The write's age is unknown, so the server may have received and forgotten it."""
    driver = ProtocolDriver(pending=(1,), now_ms=-back_ms).receive_state(0)  # The pending write was made at time 0.
    assert driver.protocol.forgotten == (ForgottenClient(0, 0) if is_forgotten else None)
    assert driver.send() == ([] if is_forgotten else [(1, 1)])


def test_known_client_sends_pending_writes_even_if_the_clock_is_set_back() -> None:
    driver = ProtocolDriver(last=3, pending=(4,), now_ms=-CLOCK_CORRECTION_MS - 1).receive_state(3)
    assert driver.protocol.forgotten is None
    assert driver.send() == [(1, 4)]


def unanswered_write(now_ms: int) -> ProtocolDriver:
    """Return a driver whose first write got no answer."""
    driver = ProtocolDriver(now_ms=now_ms).receive_state(0)
    driver.submit()
    assert driver.send() == [(1, 1)]
    driver.answer(1, LostError("lost"))
    driver.protocol.release()
    return driver


@pytest.mark.parametrize("step_ms", [-CLOCK_CORRECTION_MS - 1, -RETENTION_MS, RETENTION_MS + 1])
def test_retry_after_a_clock_step_requests_the_client_state_first(step_ms: int) -> None:
    driver = unanswered_write(NOON_MS)
    driver.now_ms += step_ms
    assert driver.send() == []
    assert driver.receive_state(0).protocol.forgotten == ForgottenClient(0, 0)


@pytest.mark.parametrize("step_ms", [-CLOCK_CORRECTION_MS, -1, 0, STATE_VALID_MS + 1, RETENTION_MS])
def test_small_clock_correction_does_not_delay_a_retry(step_ms: int) -> None:
    driver = unanswered_write(NOON_MS)
    driver.now_ms += step_ms
    assert driver.send() == [(1, 1)]


def test_unsent_write_is_sent_even_if_the_clock_is_set_back() -> None:
    driver = ProtocolDriver(now_ms=NOON_MS).receive_state(0)
    driver.submit()
    driver.now_ms -= RETENTION_MS
    assert driver.send() == [(1, 1)]


def test_recent_client_state_is_not_requested_again_after_the_clock_is_set_back() -> None:
    driver = ProtocolDriver(last=3, pending=(4,), now_ms=-RETENTION_MS).receive_state(3)
    assert driver.send() == [(1, 4)]
    driver.answer(1, LostError("lost"))
    driver.protocol.release()
    driver.now_ms += STATE_VALID_MS
    assert driver.send() == [(1, 4)]  # the client state is recent enough
    driver.answer(1, LostError("lost"))
    driver.protocol.release()
    driver.now_ms += 1
    assert driver.send() == []
    assert driver.receive_state(3).send() == [(1, 4)]
