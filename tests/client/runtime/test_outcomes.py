"""Outcomes of clients have `ok` and `unwrap`, like the verdicts of a log."""

import pytest

from oncelog.client import Committed, Fault, Refused, chat, ledger
from oncelog.client.runtime.values import BaseCommitted, BaseRefused
from oncelog.errors import ServerRefusedError


@pytest.mark.parametrize("outcome", [Committed(7, 1000), chat.Sent("msg_1", 1, "now"), ledger.Written("1", 1)])
def test_outcome_of_a_committed_write_is_unwrapped_to_itself(outcome: BaseCommitted) -> None:
    assert outcome.ok
    assert outcome.unwrap() is outcome


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (
            Refused("validation_failed", (Fault("type", "is missing"), Fault("x", "is unknown"))),
            "validation_failed",
            "type: is missing; x: is unknown",
        ),
        (Refused("prior_item_failed"), "prior_item_failed", "the server gives no details"),
        (chat.Refused("NOT_A_MEMBER", "join first"), "NOT_A_MEMBER", "join first"),
        (ledger.Refused(ledger.RefusalCode.KEY_EXISTS, "a exists", "a"), "KEY_EXISTS", "a exists"),
    ],
)
def test_refused_outcome_raises_its_code_and_message(outcome: BaseRefused, code: str, message: str) -> None:
    assert not outcome.ok
    with pytest.raises(ServerRefusedError) as raised:
        outcome.unwrap()
    assert (raised.value.code, str(raised.value), raised.value.is_transient) == (code, f"{code}: {message}", False)
