"""The clock of a ledger's client: who cannot know how old a write is asks before it is sent again."""

import pytest

from client.ledger.test_ledger_client_protocol import Driven
from oncelog.client.ledger.entries import Forgotten, Unknown
from oncelog.client.ledger.protocol import REMEMBERED_MS, SET_BACK_MS, TOLD_MS

pytestmark = pytest.mark.rule("LG-19")

NOON_MS = 1_700_000_000_000


@pytest.mark.parametrize(("back_ms", "is_told"), [(0, False), (SET_BACK_MS, False), (SET_BACK_MS + 1, True)])
def test_a_pending_write_of_a_later_time_than_now_may_have_been_forgotten(back_ms: int, is_told: bool) -> None:
    """Nobody knows the age of one that is younger than it can be: the server may have had it, and forgotten."""
    driven = Driven(pending=(1,), now_ms=-back_ms).told(0)  # made at 0
    assert driven.protocol.forgotten == (Forgotten(0, 0) if is_told else None)
    assert driven.sent() == ([] if is_told else [(1, 1)])


def test_a_server_that_knows_the_client_is_believed_whatever_the_clock_says() -> None:
    driven = Driven(last=3, pending=(4,), now_ms=-SET_BACK_MS - 1).told(3)
    assert driven.protocol.forgotten is None
    assert driven.sent() == [(1, 4)]


def lost(now_ms: int) -> Driven:
    """One whose first write got no answer."""
    driven = Driven(now_ms=now_ms).told(0)
    driven.submit()
    assert driven.sent() == [(1, 1)]
    driven.answer(1, Unknown())
    driven.protocol.release()
    return driven


@pytest.mark.parametrize("step_ms", [-SET_BACK_MS - 1, -REMEMBERED_MS, REMEMBERED_MS + 1])
def test_a_clock_that_was_set_while_it_ran_has_the_server_asked_first(step_ms: int) -> None:
    driven = lost(NOON_MS)
    driven.now_ms += step_ms
    assert driven.sent() == []
    assert driven.told(0).protocol.forgotten == Forgotten(0, 0)


@pytest.mark.parametrize("step_ms", [-SET_BACK_MS, -1, 0, TOLD_MS + 1, REMEMBERED_MS])
def test_a_clock_that_was_corrected_a_little_is_no_reason_to_ask(step_ms: int) -> None:
    driven = lost(NOON_MS)
    driven.now_ms += step_ms
    assert driven.sent() == [(1, 1)]


def test_what_was_never_sent_has_no_age() -> None:
    driven = Driven(now_ms=NOON_MS).told(0)
    driven.submit()
    driven.now_ms -= REMEMBERED_MS
    assert driven.sent() == [(1, 1)]


def test_after_a_clock_was_set_back_the_server_is_asked_once_and_not_at_every_attempt() -> None:
    driven = Driven(last=3, pending=(4,), now_ms=-REMEMBERED_MS).told(3)
    assert driven.sent() == [(1, 4)]
    driven.answer(1, Unknown())
    driven.protocol.release()
    driven.now_ms += TOLD_MS
    assert driven.sent() == [(1, 4)]  # it was told where it stands not long ago
    driven.answer(1, Unknown())
    driven.protocol.release()
    driven.now_ms += 1
    assert driven.sent() == []
    assert driven.told(3).sent() == [(1, 4)]
