"""Decisions of the deltas client: the next push and pull, and the effect of each answer."""

from typing import Any

import pytest

from client.deltas.test_deltas_client_store import ALL, delta, open_store, put
from oncelog.client.deltas.codec import (
    DeltaPage,
    GatewayRefusedError,
    OutboxEntry,
    PushReply,
    RowPage,
    SnapshotPage,
    decode_connected,
    decode_delta_page,
    decode_deltas,
    decode_error,
    decode_live,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.protocol import (
    HeldDelta,
    PullProtocol,
    PushProtocol,
    ReadDeltas,
    ReadSnapshot,
    ResetRows,
    RestartSnapshot,
    StageRows,
)
from oncelog.client.deltas.values import DeltasLimits, Refusal
from oncelog.client.runtime.backoff import Backoff, RetryPause
from oncelog.core.merge import RowDelta
from oncelog.errors import LostError, ProtocolError, SettingsError

EPOCH = "e"
LOST = LostError("lost")
FORGED = b'{"deltaId":"00","op":"INSERT","table":"t","rowId":"1","clientId":"c","columns":[],"hlc":"1"}'


def entries(count: int) -> list[OutboxEntry]:
    store = open_store()
    for number in range(count):
        put(store, str(number), a=number)
    return store.list_pending(None, ALL, ALL)


def fault(code: str, index: int | None = None, retry_after_ms: int = 0) -> GatewayRefusedError:
    return GatewayRefusedError(code.lower(), "because", retry_after_ms, index)


def held_of(pushing: PushProtocol) -> HeldDelta | None:
    return pushing.held


def refusal_of(pushing: PushProtocol) -> Refusal | None:
    return pushing.refusal


# --- pushing


def test_whole_outbox_is_pushed_again_after_a_failure() -> None:
    pushing, batch = PushProtocol(100), entries(3)
    assert (held_of(pushing), pushing.deltas_max) == (None, 100)
    assert pushing.handle_answer(batch, LOST) == RetryPause()
    assert (held_of(pushing), pushing.deltas_max, pushing.last_error) == (None, 100, "lost")
    assert pushing.handle_answer(batch, fault("SERVER_BUSY", None, 70)) == RetryPause(70)
    assert pushing.handle_answer(batch, PushReply(EPOCH)) is None
    assert pushing.last_error is None


@pytest.mark.rule("DE-6")
@pytest.mark.parametrize("code", ["BAD_REQUEST", "DELTA_ID_MISMATCH", "FORBIDDEN", "TOO_LARGE", "INVALID"])
def test_refused_delta_is_excluded_from_the_push_of_earlier_deltas(code: str) -> None:
    pushing, batch = PushProtocol(100), entries(5)
    assert pushing.handle_answer(batch, fault(code, 2)) is None
    assert held_of(pushing) == HeldDelta(batch[2].number, RetryPause(0, is_long=True))
    refusal = Refusal(batch[2].delta_id.hex(), "notes", "2", code, "because")
    assert refusal_of(pushing) == refusal
    assert pushing.handle_answer(batch[:2], PushReply(EPOCH)) is None
    assert (refusal_of(pushing), pushing.last_error) == (refusal, f"{code}: because")
    assert held_of(pushing) == HeldDelta(batch[2].number, RetryPause(0, is_long=True))
    pushing.release()
    assert (held_of(pushing), pushing.deltas_max) == (None, 100)
    assert pushing.handle_answer(batch[2:], PushReply(EPOCH)) is None
    assert (refusal_of(pushing), pushing.refused_number) == (None, 0)
    assert (pushing.last_error, held_of(pushing)) == (None, None)


def test_discarded_delta_does_not_block_other_deltas() -> None:
    pushing, batch = PushProtocol(100), entries(2)
    pushing.handle_answer(batch, fault("INVALID", 0))
    pushing.on_discarded()
    assert (pushing.refusal, held_of(pushing)) == (None, None)
    assert pushing.discards == 1


@pytest.mark.rule("DE-8")
def test_delta_with_clock_drift_does_not_delay_earlier_deltas() -> None:
    pushing, batch = PushProtocol(100), entries(3)
    assert pushing.handle_answer(batch, fault("CLOCK_DRIFT", 1, 900)) is None
    assert (held_of(pushing), pushing.clock_wait_ms) == (HeldDelta(batch[1].number, RetryPause(900)), 900)
    assert pushing.handle_answer(batch[:1], PushReply(EPOCH)) is None
    assert held_of(pushing) is not None
    assert pushing.clock_wait_ms == 900
    pushing.release()
    assert pushing.handle_answer(batch[1:], PushReply(EPOCH)) is None
    assert (pushing.clock_wait_ms, pushing.refusal) == (0, None)
    assert pushing.handle_answer(batch, fault("CLOCK_DRIFT", None, 5)) is None
    assert held_of(pushing) == HeldDelta(batch[0].number, RetryPause(5))


def test_refused_credentials_cause_long_pauses() -> None:
    pushing, batch = PushProtocol(100), entries(2)
    for one in (fault("AUTH_FAILED"), fault("FORBIDDEN"), fault("BAD_REQUEST"), fault("INVALID", 7)):
        assert pushing.handle_answer(batch, one) == RetryPause(0, is_long=True)
        assert not pushing.is_authorized
        assert pushing.refusal is None
        assert held_of(pushing) is None
    assert pushing.handle_answer(batch, LOST) == RetryPause()
    assert not pushing.is_authorized
    pushing.handle_answer(batch, PushReply(EPOCH))
    assert pushing.is_authorized


@pytest.mark.parametrize("code", ["RATE_LIMITED", "SERVER_BUSY"])
def test_push_that_is_too_large_or_too_frequent_is_split(code: str) -> None:
    pushing, batch = PushProtocol(100), entries(9)
    assert pushing.handle_answer(batch, fault(code, None, 30)) == RetryPause(30)
    assert pushing.deltas_max == 4
    pushing.handle_answer(batch[:4], PushReply(EPOCH))
    assert pushing.deltas_max == 8
    assert pushing.handle_answer(batch[:8], fault("TOO_LARGE")) is None
    assert pushing.deltas_max == 4
    pushing.handle_answer(batch[:4], PushReply(EPOCH))
    assert pushing.deltas_max == 4
    assert pushing.handle_answer(batch[:1], fault(code)) == RetryPause()
    assert pushing.deltas_max == 1
    assert pushing.handle_answer(batch[:1], fault("TOO_LARGE")) is None
    assert pushing.refusal is not None
    assert pushing.refusal.code == "TOO_LARGE"


@pytest.mark.rule("CO-34")
def test_push_is_split_to_isolate_the_failing_delta() -> None:
    """A store that rejects one of several deltas does not report which one."""
    pushing, outbox = PushProtocol(100), entries(20)
    bad = outbox[13]
    sizes = []
    while (refusal := refusal_of(pushing)) is None:
        batch = outbox[: pushing.deltas_max]
        sizes.append(len(batch))
        if bad not in batch:
            pushing.handle_answer(batch, PushReply(EPOCH))
            del outbox[: len(batch)]
        else:
            pushing.handle_answer(batch, fault("BAD_REQUEST", 0) if len(batch) == 1 else fault("TOO_LARGE"))
    assert refusal.delta_id == bad.delta_id.hex()
    assert sizes == [20, 10, 10, 5, 2, 2, 1, 1]
    assert outbox[0] is bad
    pushing.on_discarded()
    for size in (2, 4, 8, 16, 32):
        pushing.handle_answer(outbox[1:2], PushReply(EPOCH))
        assert pushing.deltas_max == size


# --- pulling


def page_of(
    deltas: tuple[RowDelta, ...], cursor: int, epoch: str = EPOCH, *, has_more: bool = False
) -> DeltaPage[RowDelta]:
    return DeltaPage(deltas, cursor, has_more, epoch)


def pulling_at(cursor: int = 0, epoch: str = EPOCH) -> PullProtocol:
    return PullProtocol(cursor, epoch)


def following(cursor: int = 0) -> PullProtocol:
    pulling = pulling_at(cursor)
    pulling.confirm(page_of((), cursor))
    return pulling


def request_of(pulling: PullProtocol, *, is_reset_wanted: bool = False) -> Any:
    return pulling.next_request(is_reset_wanted=is_reset_wanted)


@pytest.mark.rule("DE-9")
def test_pages_are_pulled_until_the_end_and_then_followed_live() -> None:
    pulling = pulling_at(epoch="")
    request = request_of(pulling)
    assert request == ReadDeltas(0, "")
    deltas = (delta(1, a=1),)
    effect = pulling.handle_answer(request, DeltaPage(deltas, 3, has_more=True, epoch=EPOCH))
    assert effect == page_of(deltas, 3, has_more=True)
    assert request_of(pulling) == ReadDeltas(0, "")  # it is not stored yet
    assert isinstance(effect, DeltaPage)
    pulling.confirm(effect)
    request = request_of(pulling)
    assert request == ReadDeltas(3, EPOCH)
    effect = pulling.handle_answer(request, DeltaPage((), 3, has_more=False, epoch=EPOCH))
    assert isinstance(effect, DeltaPage)
    pulling.confirm(effect)
    request = request_of(pulling)
    assert request == ReadDeltas(3, EPOCH, is_live=True)
    effect = pulling.handle_answer(request, page_of(deltas, 5))
    assert effect == page_of(deltas, 5)
    assert isinstance(effect, DeltaPage)
    pulling.confirm(effect)
    assert request_of(pulling) == ReadDeltas(5, EPOCH, is_live=True)
    pulling.pull_again()
    assert request_of(pulling) == ReadDeltas(5, EPOCH)
    assert pulling.handle_answer(request, page_of(deltas, 4)) == page_of(deltas, 5)


def test_client_pulls_before_following_after_a_failure() -> None:
    pulling = following(4)
    assert pulling.handle_answer(request_of(pulling), LOST) == RetryPause()
    assert (request_of(pulling), pulling.last_error) == (ReadDeltas(4, EPOCH), "lost")
    assert pulling.handle_answer(request_of(pulling), fault("SERVER_BUSY", None, 9)) == RetryPause(9)
    assert (pulling.is_authorized, pulling.last_error) == (True, "SERVER_BUSY: because")
    assert pulling.handle_answer(request_of(pulling), fault("FORBIDDEN")) == RetryPause(0, is_long=True)
    assert (pulling.is_authorized, pulling.last_error) == (False, "FORBIDDEN: because")
    pulling.confirm(page_of((), 4))
    assert (pulling.is_authorized, pulling.last_error) == (True, None)


@pytest.mark.rule("DE-12")
@pytest.mark.parametrize("is_live", [False, True])
def test_compacted_deltas_are_read_from_a_snapshot(is_live: bool) -> None:
    pulling = following(2)
    if not is_live:
        pulling.pull_again()
    page: DeltaPage[RowDelta] = DeltaPage((), 2, has_more=True, epoch=EPOCH, is_compacted=True)
    effect = pulling.handle_answer(request_of(pulling), page)
    assert effect == RestartSnapshot()
    pulling.confirm(RestartSnapshot())
    request = request_of(pulling)
    assert request == ReadSnapshot("")
    joined = pulling.handle_answer(request, SnapshotPage((), 9, "next", EPOCH))
    assert joined == SnapshotPage((), 9, "next", EPOCH)
    assert isinstance(joined, SnapshotPage)
    pulling.confirm(joined)
    assert (request_of(pulling), pulling.cursor) == (ReadSnapshot("next"), 2)
    assert pulling.handle_answer(request_of(pulling), LOST) == RetryPause()
    assert request_of(pulling) == ReadSnapshot("next")
    last = pulling.handle_answer(request_of(pulling), SnapshotPage((), 9, "", EPOCH))
    assert isinstance(last, SnapshotPage)
    pulling.confirm(last)
    assert request_of(pulling) == ReadDeltas(9, EPOCH)


@pytest.mark.parametrize("epoch", ["other", EPOCH])
def test_snapshot_is_restarted_when_its_history_changes(epoch: str) -> None:
    pulling = following(2)
    pulling.confirm(RestartSnapshot())
    pulling.confirm(SnapshotPage((), 9, "next", EPOCH))
    cursor = 9 if epoch == "other" else 8
    assert pulling.handle_answer(request_of(pulling), SnapshotPage((), cursor, "", epoch)) == RestartSnapshot()
    pulling.confirm(RestartSnapshot())
    assert request_of(pulling) == ReadSnapshot("")


def test_snapshot_is_restarted_when_its_page_token_is_refused() -> None:
    pulling = following(2)
    pulling.confirm(RestartSnapshot())
    pulling.confirm(SnapshotPage((), 9, "next", EPOCH))
    assert pulling.handle_answer(request_of(pulling), fault("BAD_REQUEST")) == RetryPause()
    assert request_of(pulling) == ReadSnapshot("")
    assert pulling.handle_answer(request_of(pulling), fault("BAD_REQUEST")) == RetryPause(0, is_long=True)


@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("answer", [fault("BAD_REQUEST"), SnapshotPage((), 9, "", "other")])
def test_history_that_changes_between_the_pages_of_the_first_snapshot_starts_a_reset(answer: Any) -> None:
    pulling = pulling_at(epoch="")
    pulling.confirm(RestartSnapshot())
    pulling.confirm(SnapshotPage((), 9, "next", EPOCH))
    effect = pulling.handle_answer(request_of(pulling), answer)
    if isinstance(effect, RestartSnapshot):
        pulling.confirm(effect)
    assert request_of(pulling) == ReadSnapshot("")
    assert isinstance(pulling.handle_answer(ReadSnapshot(""), SnapshotPage((), 2, "next", "other")), ResetRows)


@pytest.mark.parametrize(
    "answer",
    [
        fault("HISTORY_CHANGED"),
        DeltaPage((), 2, has_more=False, epoch="other"),
        DeltaPage((), 2, has_more=True, epoch="other", is_compacted=True),
    ],
)
def test_changed_history_starts_a_reset(answer: Any) -> None:
    pulling = pulling_at(2)
    effect = pulling.handle_answer(request_of(pulling), answer)
    assert isinstance(effect, ResetRows)
    pulling.confirm(effect)
    request = request_of(pulling, is_reset_wanted=True)
    assert request == ReadSnapshot("")
    assert pulling.is_resetting
    first = pulling.handle_answer(request, SnapshotPage((), 1, "next", "other"))
    assert first == StageRows(SnapshotPage((), 1, "next", "other"), is_first=True)
    assert isinstance(first, StageRows)
    pulling.confirm(first)
    assert pulling.handle_answer(ReadSnapshot("next"), fault("HISTORY_CHANGED")) == RestartSnapshot()
    request = request_of(pulling, is_reset_wanted=True)
    assert request == ReadSnapshot("next")
    last = pulling.handle_answer(request, SnapshotPage((), 1, "", "other"))
    assert last == StageRows(SnapshotPage((), 1, "", "other"), is_first=False)
    assert isinstance(last, StageRows)
    pulling.confirm(last)
    assert (request_of(pulling), pulling.is_resetting) == (ReadDeltas(1, "other"), False)


def test_requested_reset_interrupts_a_snapshot() -> None:
    pulling = following(2)
    pulling.confirm(RestartSnapshot())
    pulling.confirm(SnapshotPage((), 9, "next", EPOCH))
    assert request_of(pulling, is_reset_wanted=True) == ReadSnapshot("")
    last = RowPage((), 9, "", EPOCH)
    assert pulling.handle_answer(ReadSnapshot(""), last) == StageRows(last, is_first=True)


def test_live_connection_with_a_changed_epoch_starts_a_reset() -> None:
    pulling = following(2)
    request = request_of(pulling)
    assert pulling.handle_answer(request, page_of((), 2)) == page_of((), 2)
    assert isinstance(pulling.handle_answer(request, page_of((), 2, "other")), ResetRows)
    assert isinstance(pulling.handle_answer(request_of(pulling), fault("HISTORY_CHANGED")), ResetRows)


def test_inconsistent_page_is_a_protocol_error() -> None:
    pulling = pulling_at(5)
    for page in (page_of((), 4), page_of((), 5, has_more=True)):
        with pytest.raises(ProtocolError):
            pulling.handle_answer(ReadDeltas(5, EPOCH), page)
    with pytest.raises(ProtocolError):
        pulling.handle_answer(ReadDeltas(5, EPOCH), SnapshotPage((), 5, "", EPOCH))


# --- messages


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\xff", b'{"epoch":"e","results":[{"deltaId":"00","sequence":1}]}', b'{"epoch":"e","results":[]}'],
)
def test_acknowledgement_of_other_deltas_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_push_reply(body, entries(1))


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"deltas":[{}],"cursor":1,"hasMore":false,"epoch":"e"}',
        b'{"deltas":[],"cursor":-1,"hasMore":false,"epoch":"e"}',
        b'{"deltas":[%b],"cursor":1,"hasMore":false,"epoch":"e"}' % FORGED,
        b'{"deltas":[%b],"cursor":1,"hasMore":false,"epoch":"e"}' % (b"[" * 5000 + b"]" * 5000),
    ],
)
def test_malformed_page_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_delta_page(body)


def test_malformed_snapshot_is_a_protocol_error() -> None:
    row = b'{"table":"t","rowId":"1","columns":[],"written":{"hlc":"01","clientId":"c","deltaId":"00"},"deleted":null}'
    for rows in (row, row.replace(b'"01"', b'"1"').replace(b'"00"', b'"x"'), b"{}"):
        with pytest.raises(ProtocolError):
            decode_snapshot_page(b'{"rows":[%b],"cursor":1,"next":"","epoch":"e"}' % rows)


def test_live_messages_are_decoded() -> None:
    assert decode_connected('{"type":"connected","epoch":"e"}') == "e"
    for decode in (decode_connected, lambda text: decode_live(text, EPOCH)):
        with pytest.raises(GatewayRefusedError, match="auth_failed: no"):
            decode('{"type":"error","error":"no","code":"AUTH_FAILED"}')
    assert decode_live('{"type":"snapshot"}', EPOCH).is_compacted
    assert decode_deltas(decode_live('{"type":"deltas","deltas":[],"cursor":3}', EPOCH)) == page_of((), 3)
    for text in ('{"type":"hello"}', "x", "[]"):
        with pytest.raises(ProtocolError):
            decode_live(text, EPOCH)


def test_errors_with_and_without_a_gateway_body_are_decoded() -> None:
    body = b'{"error":"no","code":"CLOCK_DRIFT","index":3,"retryAfterMs":70,"serverTime":1}'
    error = decode_error(409, body, 50)
    assert (error.code, error.message, error.index, error.retry_after_ms) == ("clock_drift", "no", 3, 70)
    for status, code in (
        (502, "server_busy"),
        (500, "server_error"),
        (401, "auth_failed"),
        (404, "bad_request"),
        (413, "too_large"),
    ):
        assert decode_error(status, b"<html>", 50).code == code
    assert decode_error(503, b"\xff", 50).retry_after_ms == 50


# --- pauses


class HighestRandom:
    def uniform(self, _low: float, high: float) -> float:
        return high


def test_pauses_grow_and_respect_retry_after() -> None:
    limits = DeltasLimits(
        pause_ms_min=100,
        pause_ms_max=300,
        refused_pause_ms_min=1000,
        refused_pause_ms_max=5000,
        retry_after_ms_max=10_000,
    )
    patience = Backoff(limits, HighestRandom())  # type: ignore[arg-type]
    assert [patience.next_pause_s(RetryPause()) for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]
    assert [patience.next_pause_s(RetryPause(0, is_long=True)) for _ in range(4)] == [1, 2, 4, 5]
    assert patience.next_pause_s(RetryPause(2000)) == 2.4
    assert patience.next_pause_s(RetryPause(10**9)) == 12
    patience.reset()
    assert patience.next_pause_s(RetryPause()) == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"push_deltas_max": 0}, "push_deltas_max must be a whole number"),
        ({"push_deltas_max": 10_001}, "push_deltas_max must be at most 10000"),
        ({"pause_ms_min": 2, "pause_ms_max": 1}, "pause_ms_min must not be more than pause_ms_max"),
        ({"refused_pause_ms_min": 2, "refused_pause_ms_max": 1}, "refused_pause_ms_min must not be more"),
    ],
)
def test_invalid_limits_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        DeltasLimits(**given)
