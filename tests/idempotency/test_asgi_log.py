"""The log behind the idempotency middleware: leases, failures, quotas, retention, and logs opened from a path."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import Gate, WatchedLog
from idempotency.asgi_application import (
    START,
    WHOLE,
    Scripted,
    Shop,
    bare,
    body_part,
    check_answers,
    check_problem,
    exchange,
    is_replay,
    lifespan,
    list_types,
)
from idempotency.conftest import Waiters
from oncelog import Log, kept_for
from oncelog.core.tenants import Tenant
from oncelog.core.values import Submission
from oncelog.errors import ClockJumpedError, CorruptError, OncelogError, StoreUnavailableError
from oncelog.idempotency.asgi import Receive, Scope, Send

DAY_MS: Final = 24 * 3600 * 1000

# --- leases ----------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-7")
@pytest.mark.parametrize("is_done", [False, True])
async def test_request_that_lost_its_lease_is_answered_with_409(kind: str, is_done: bool) -> None:
    async with WatchedLog() as log:
        late, other = Shop(kind, log), Shop(kind, log)
        lost = await late.start_running()
        log.clock.advance(30_000)
        taking_over = await other.start_running()
        if is_done:
            other.gate.open()
            await taking_over
        late.runs.append(b"makes its answer differ")
        late.gate.open()
        response = await lost
        check_problem(response, 409, "taken-over")
        assert response.headers["retry-after"] == "1"
        other.gate.open()
        check_answers([await taking_over, await late.send("k")], ("1", False), ("1", True))


async def test_expired_lease_can_still_complete_before_a_takeover(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, lease_s=5)
        running = await shop.start_running()
        log.clock.advance(4_999)
        check_problem(await shop.send("k"), 409, "in-flight")
        log.clock.advance(1)
        shop.gate.open()
        check_answers([await running, await shop.send("k")], ("1", False), ("1", True))


# --- failures of the log -------------------------------------------------------------------------------

LOG_ERRORS: Final = [StoreUnavailableError("disk full"), CorruptError("torn"), ClockJumpedError(10**9, 600_000)]


@pytest.mark.parametrize("error", LOG_ERRORS, ids=lambda error: type(error).__name__)
async def test_request_is_not_run_when_the_log_fails(
    kind: str, error: OncelogError, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)

        async def fail(_: object) -> None:
            raise error

        before, log.store.before_commit = log.store.before_commit, fail
        response = await shop.send("k")
        check_problem(response, 503, "log-unavailable")
        assert response.headers["retry-after"] == "1"
        assert str(error) not in response.text
        assert str(error) in caplog.text
        assert shop.runs == []
        check_answers([await shop.send()], ("1", False))
        log.store.before_commit = before
        check_answers([await shop.send("k")], ("2", False))


async def test_closed_log_is_answered_with_503(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, lambda: log)
    check_problem(await shop.send("k"), 503, "log-unavailable")
    assert shop.runs == []


async def test_waiting_requests_are_answered_with_503_when_the_log_closes(kind: str, waiters: Waiters) -> None:
    log = await WatchedLog().__aenter__()
    shop = Shop(kind, log, in_flight="wait")
    running = await shop.start_running()
    waiting = shop.start_sending("k")
    await waiters.until(1)
    await log.close()
    check_problem(await waiting, 503, "log-unavailable")
    shop.gate.open()
    check_problem(await running, 503, "log-unavailable")


async def fail_to_commit(requests: Sequence[oncelog.Request]) -> None:
    if any(isinstance(item, Submission) for request in requests for item in request.items):
        raise CorruptError("torn")


async def test_answer_that_cannot_be_committed_is_not_sent(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        before, log.store.before_commit = log.store.before_commit, fail_to_commit
        check_problem(await shop.send("k"), 503, "log-unavailable")
        log.store.before_commit = before
        check_problem(await shop.send("k"), 409, "in-flight")
        log.clock.advance(30_000)
        check_answers([await shop.send("k")], ("2", False))


async def test_rest_of_a_streamed_answer_is_not_sent_when_its_commit_fails() -> None:
    async with WatchedLog() as log:
        log.store.before_commit = fail_to_commit
        app = Scripted(START, body_part(b"12345", more=True), body_part(b"6", more=True), body_part(b"7"))
        start, body = await exchange(bare(app, log, answer_bytes_max=4), WHOLE)
        assert (start["status"], body["more_body"]) == (503, False)
        assert b"log-unavailable" in body["body"]


async def test_full_queue_is_answered_with_503(kind: str) -> None:
    async with WatchedLog(queue_items_max=1) as log:
        shop = Shop(kind, log)
        log.hold_commits()
        first = shop.start_sending("a")
        await log.gate.reached.wait()
        queued = shop.start_sending("b")  # fills the queue as a lookup of its key
        refused = await shop.start_sending("c")
        assert not queued.done()
        log.gate.open()
        check_answers([await first], ("1", False))
        for response in (await queued, refused):
            check_problem(response, 503, "busy")
            assert int(response.headers["retry-after"]) >= 1
        assert len(shop.runs) == 1


@pytest.mark.parametrize(
    ("tenant", "status", "problem"),
    [
        (None, 503, "read-only"),
        (Tenant("http", records_max=1), 507, "quota-exceeded"),
        (Tenant("http", new_writes_per_second_max=1), 429, "rate-limited"),
    ],
)
async def test_read_only_quota_and_rate_limit_return_distinct_problems(
    kind: str, tenant: Tenant | None, status: int, problem: str
) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        if tenant is not None:
            await log.set_tenants([tenant])
        check_answers([await shop.start_sending("a")], ("1", False))
        if tenant is None:
            log.set_read_only()
        response = await shop.start_sending("b")
        check_problem(response, status, problem)
        assert int(response.headers["retry-after"]) >= 1
        check_answers([await shop.start_sending("a")], ("1", True))
        assert len(shop.runs) == 1


async def test_erased_answer_is_neither_replayed_nor_rerun(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        await shop.send("k")
        assert await log.erase(stream="http/ann") == 1
        check_problem(await shop.send("k"), 410, "answer-erased")
        assert len(shop.runs) == 1


# --- retention -------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize(("options", "kept_ms"), [({}, DAY_MS), ({"retention": kept_for(seconds=60)}, 60_000)])
async def test_keys_expire_after_a_day_or_the_configured_retention(
    kind: str, options: dict[str, Any], kept_ms: int
) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, **options)
        answers = [await shop.send("k")]
        log.clock.advance(kept_ms - 1)
        answers.append(await shop.send("k"))
        log.clock.advance(1)
        answers.append(await shop.send("k", content=b"another request"))
        check_answers(answers, ("1", False), ("1", True), ("2", False))


async def test_equal_keys_under_two_names_are_separate(kind: str) -> None:
    async with WatchedLog() as log:
        shops = [Shop(kind, log), Shop(kind, log, name="http.long", retention=kept_for(days=30))]
        for shop in shops:
            check_answers([await shop.send("k") for _ in range(2)], ("1", False), ("1", True))


# --- logs opened from a path ----------------------------------------------------------------------------


async def test_lifespan_opens_and_closes_the_log_of_a_path(kind: str, tmp_path: Path) -> None:
    shop = Shop(kind, tmp_path / "log.db")
    for number in (1, 2):
        async with lifespan(shop.app) as sent:
            assert list_types(sent) == ["startup.complete"]
            assert (tmp_path / "log.db-wal").exists()
            check_answers([await shop.send("k") for _ in range(2)], ("1", number == 2), ("1", True))
        assert list_types(sent) == ["startup.complete", "shutdown.complete"]
        assert not (tmp_path / "log.db-wal").exists(), "the end of the lifespan closes the log"
    assert shop.events == ["startup", "shutdown"] * 2


@BOTH_STORES
async def test_first_requests_open_the_log_once_without_a_lifespan(kind: str, tmp_path: Path) -> None:
    shop = Shop(kind, log_at(tmp_path / "log.db"), in_flight="wait")
    answers = await asyncio.gather(*[shop.send("k") for _ in range(10)])
    check_answers(sorted(answers, key=is_replay), ("1", False), *[("1", True)] * 9)
    async with lifespan(shop.app):
        pass  # closes the log
    assert not (tmp_path / "log.db-wal").exists()


@BOTH_STORES
async def test_cancelled_request_does_not_cancel_the_opening_of_the_log(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, enter = Gate(), Log.__aenter__

    async def open_behind_gate(log: Log) -> Log:
        await gate()
        return await enter(log)

    monkeypatch.setattr(Log, "__aenter__", open_behind_gate)
    shop = Shop(kind, log_at(tmp_path / "log.db"))
    gate.shut()
    cancelled, other = shop.start_sending("a"), shop.start_sending("b")
    await gate.reached.wait()
    cancelled.cancel()
    gate.open()
    check_answers([await other], ("1", False))
    async with lifespan(shop.app):
        check_answers([await shop.send("a")], ("2", False))


def test_each_request_may_use_a_separate_event_loop(kind: str, tmp_path: Path) -> None:
    shop = Shop(kind, tmp_path / "log.db")

    async def send_in_lifespan() -> httpx.Response:
        async with lifespan(shop.app):
            return await shop.send("k")

    answers = [asyncio.run(shop.send(key)) for key in ("k", "l", "k", "l")]
    check_answers(answers, ("1", False), ("2", False), ("1", True), ("2", True))
    check_answers([asyncio.run(send_in_lifespan())], ("1", True))


async def test_file_that_is_not_a_log_fails_the_startup(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes\n" * 100)
    shop = Shop(kind, path)
    async with lifespan(shop.app) as sent:
        assert list_types(sent) == ["startup.failed"]
        assert "NotALogError" in sent[0]["message"]
        assert str(path) in sent[0]["message"]
    assert list_types(sent) == ["startup.failed"]
    assert shop.events == []
    check_problem(await shop.send("k"), 503, "log-unavailable")
    path.unlink()
    check_answers([await shop.send("k")], ("1", False))
    async with lifespan(shop.app):
        pass


@BOTH_STORES
async def test_different_retention_under_the_same_name_fails_the_startup(kind: str, tmp_path: Path) -> None:
    for retention, expected in ((kept_for(days=1), "startup.complete"), (kept_for(days=2), "startup.failed")):
        async with lifespan(Shop(kind, log_at(tmp_path / "log.db"), retention=retention).app) as sent:
            assert list_types(sent) == [expected]
    assert "http" in sent[0]["message"]


async def test_failed_startup_of_the_application_closes_the_log(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no"})

    async with lifespan(bare(app, tmp_path / "log.db")) as sent:
        assert sent == [{"type": "lifespan.startup.failed", "message": "no"}]
        assert not (tmp_path / "log.db-wal").exists()
