"""A rate limit is shared by all processes of a log."""

from pathlib import Path

import pytest

from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Rate, Refused, Request, Submission
from oncelog.storage.sqlite.writer import Writer
from storage.sqlite.writers import session_on


def write(number: int, actor: str, burst: int) -> Submission:
    key = number.to_bytes(16, "big")
    return Submission(policy=EVENTS, scope="", key=key, fingerprint=b"", actor=actor, rate=Rate(1, burst))


def commits(session: Writer, *items: Submission) -> int:
    """Return the number of committed items, and assert that the others were refused."""
    verdicts = session.commit([Request(items)], None).verdicts[0]
    assert {type(verdict) for verdict in verdicts} <= {Committed, Refused}
    return sum(type(verdict) is Committed for verdict in verdicts)


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("burst", [1, 2, 7, 10, 25])
def test_rate_limit_is_shared_by_all_processes(tmp_path: Path, burst: int) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 50) as one, session_on(path, 50) as two, session_on(path, 50) as three:
        taken = 0
        for number in range(0, 30, 3):
            for place, session in enumerate((one, two, three)):
                taken += commits(session, write(number + place, "user:ann", burst))
        assert taken == burst
        with session_on(path, 50) as late:
            assert commits(late, *[write(100 + number, "user:ann", burst) for number in range(5)]) == 0
            assert commits(late, *[write(200 + number, "user:bob", burst) for number in range(30)]) == burst
