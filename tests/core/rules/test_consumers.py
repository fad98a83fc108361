"""Named consumers, whose cursors are stored in the log. test_plan_model.py generates histories with them."""

import pytest

from core.item_builders import Log, assert_committed, assert_refused, event, result
from oncelog.core.identity import compute_lane
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.plan import plan
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.values import Applied, LaneHead, Mode, Reason, Request, SetCursor, Settings, Snapshot

CHANGED, UNCHANGED = Applied(changed=True), Applied(changed=False)


def build_log() -> Log:
    """Return a log with three events in lane 0 and two results in a stream."""
    log = Log()
    log.submit_separately(event(1), event(2), event(3), result(1), result(2))
    return log


@pytest.mark.rule("CO-42")
def test_cursor_moves_back_only_with_rewind() -> None:
    log = build_log()
    assert log(SetCursor("mailer", 2)) == CHANGED
    assert log(SetCursor("mailer", 2)) == UNCHANGED, "a retry"
    assert log(SetCursor("mailer", 1)) == UNCHANGED, "a cursor that was overtaken"
    assert log.snapshot.consumers == {("", "mailer"): 2}
    assert log(SetCursor("mailer", 3)) == CHANGED
    assert log(SetCursor("mailer", 3, rewind=True)) == UNCHANGED
    assert log(SetCursor("mailer", 1, rewind=True)) == CHANGED
    assert log.snapshot.consumers == {("", "mailer"): 1}
    assert log(SetCursor("mailer", 2, rewind=True)) == CHANGED, "rewind may also move the cursor forward"
    assert log.snapshot.consumers == {("", "mailer"): 2}


@pytest.mark.rule("CO-42")
def test_consumer_with_cursor_zero_exists() -> None:
    log = Log()
    assert log(SetCursor("mailer", 0)) == CHANGED
    assert log.snapshot.consumers == {("", "mailer"): 0}
    assert log(SetCursor("mailer", 0)) == UNCHANGED
    log(event(1))
    assert log(SetCursor("mailer", 1)) == CHANGED
    assert log(SetCursor("mailer", 0, rewind=True)) == CHANGED
    assert log.snapshot.consumers == {("", "mailer"): 0}


@pytest.mark.rule("CO-42")
@pytest.mark.parametrize("rewind", [False, True])
@pytest.mark.parametrize(("scope", "newest"), [("", 3), ("campaign/1", 2), ("campaign/none", 0)])
def test_cursor_beyond_the_newest_position_is_refused(scope: str, newest: int, rewind: bool) -> None:
    log = build_log()
    for cursor in (newest + 1, -1, 2**70, -(2**70)):
        failure = assert_refused(log(SetCursor("mailer", cursor, scope, rewind)), Reason.INVALID_CURSOR)
        assert (failure.field, failure.current) == ("cursor", newest)
        assert str(cursor) in failure.message
    assert not log.snapshot.consumers
    assert log(SetCursor("mailer", newest, scope, rewind)) == CHANGED


@pytest.mark.rule("CO-42")
def test_removed_consumer_starts_again() -> None:
    log = build_log()
    assert log(SetCursor("mailer", None)) == UNCHANGED
    log(SetCursor("mailer", 3))
    assert log(SetCursor("mailer", None, "campaign/1")) == UNCHANGED, "a consumer of another scope"
    assert log(SetCursor("mailer", None)) == CHANGED
    assert not log.snapshot.consumers
    assert log(SetCursor("mailer", None)) == UNCHANGED
    assert log(SetCursor("mailer", 1)) == CHANGED, "the removed cursor no longer applies"


@pytest.mark.rule("CO-42")
def test_cursors_of_different_names_and_scopes_are_separate() -> None:
    log = build_log()
    for number, (name, scope) in enumerate([("a", ""), ("b", ""), ("a", "campaign/1"), ("a", "campaign/2")]):
        if scope == "campaign/2":
            log.submit_separately(*(result(one, scope=scope) for one in range(3)))
        assert log(SetCursor(name, min(number, 2), scope)) == CHANGED
    assert log.snapshot.consumers == {("", "a"): 0, ("", "b"): 1, ("campaign/1", "a"): 2, ("campaign/2", "a"): 2}
    longest = "c" * NAME_CHARACTERS_MAX
    assert log(SetCursor(longest, 0, longest)) == CHANGED


@pytest.mark.rule("CO-42")
def test_cursor_may_point_at_an_earlier_item_of_its_group_commit() -> None:
    log = Log()
    verdicts = log.submit_separately(
        SetCursor("a", 1), event(1), SetCursor("a", 1), SetCursor("a", 1), SetCursor("a", None)
    )
    assert_refused(verdicts[0], Reason.INVALID_CURSOR)
    assert verdicts[2:] == [CHANGED, UNCHANGED, CHANGED]
    assert not log.snapshot.consumers


@pytest.mark.rule("CO-42")
def test_cursor_commits_with_its_request() -> None:
    log = build_log()
    log(SetCursor("a", 1))
    before = dict(log.snapshot.heads)
    log.now_ms += 10
    verdicts = log.submit_request(SetCursor("a", 2), event(1, "other"), mode=Mode.ALL)
    assert_refused(verdicts[0], Reason.NOT_PROCESSED)
    assert log.snapshot.consumers == {("", "a"): 1}
    assert log.snapshot.heads == before
    moved, made = log.submit_request(SetCursor("a", 2), event(4), mode=Mode.ALL)
    assert (moved, assert_committed(made).position) == (CHANGED, 4)
    assert log.snapshot.consumers == {("", "a"): 2}


@pytest.mark.rule("CO-42")
@pytest.mark.parametrize("scope", ["", "campaign/1"])
def test_cursor_changes_the_lane_head_and_writes_no_record(scope: str) -> None:
    lane = compute_lane(scope, Settings().lanes) if scope else 0
    head = LaneHead(position=7, log_time_ms=50, revision=3, height=2, block_hash=b"h")
    snapshot = Snapshot(heads={lane: head}, streams={"campaign/1": 7})
    changes = plan([Request((SetCursor("a", 7, scope),))], snapshot, 60).changes
    assert changes.heads == {lane: LaneHead(position=7, log_time_ms=60, revision=4, height=2, block_hash=b"h")}
    assert (changes.records, changes.consumers) == ([], {(scope, "a"): 7})
    assert not changes.is_empty
    assert plan([Request((SetCursor("a", None, scope), SetCursor("a", 8, scope)))], snapshot, 60).changes.is_empty


@pytest.mark.rule("CO-42")
def test_read_set_of_a_cursor_contains_its_consumer_and_stream() -> None:
    batch = [Request((SetCursor("a", 1), SetCursor("b", None)))]
    assert build_read_set(batch, Settings()) == ReadSet(lanes={0}, consumers={("", "a"), ("", "b")})
    batch = [Request((SetCursor("a", 1, "s"),))]
    lane = compute_lane("s", Settings().lanes)
    assert build_read_set(batch, Settings()) == ReadSet(lanes={lane}, streams={"s"}, consumers={("s", "a")})
