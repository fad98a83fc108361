"""The Events API over HTTP: full queues, rate limits and store failures."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from deadlines import WAIT_S, soon
from oncelog.errors import StoreUnavailableError
from oncelog.storage.migrate.migration import migrate_log
from oncelog.testing.clock import ManualClock
from server.running_server import ShiftedClock, item, numbers, serving


@BOTH_STORES
@pytest.mark.rule("CO-32", "CO-15")
async def test_full_queue_refuses_new_events_and_answers_retries_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, queue_items_max=2) as served:
        first = await served.submit(item(1))
        gate = served.hold_commits(monkeypatch)
        waiting = [asyncio.ensure_future(served.submit(item(2)))]
        await soon(gate.reached.wait())
        waiting += [asyncio.ensure_future(served.submit(item(number))) for number in range(3, 10)]
        done, held = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        busy = done.pop().result()
        assert busy.refusal == (503, "server_busy")
        assert busy.error["details"]["retry_after_ms"] > 0
        assert int(busy.headers["Retry-After"]) >= 1
        # Retries and pages are still answered.
        assert (await served.submit(item(1))).body == first.body
        assert (await served.page("a")).status == 200
        gate.open()
        assert 200 in {(await soon(one)).status for one in held}
        assert (await served.submit(item(5))).status == 200


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-15")
async def test_new_events_per_actor_are_rate_limited_but_retries_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as served:
        first = await served.submit(item(1), item(2))
        late = await served.submit(item(3))
        assert late.refusal == (429, "rate_limited")
        assert late.headers["Retry-After"] == "1"
        assert (await served.submit(item(1), item(2))).body == first.body
        clock.advance(late.error["details"]["retry_after_ms"])
        assert (await served.submit(item(3))).status == 200


@pytest.mark.rule("EV-16")
async def test_page_includes_the_commits_of_another_server(tmp_path: Path) -> None:
    """The second server gets no notification and polls only once an hour."""
    async with serving(tmp_path, poll_ms=3_600_000) as one, serving(tmp_path, poll_ms=3_600_000) as two:
        assert await one.commit(item(1), item(2)) == [1, 2]
        assert two.server.apis.hub.position == 0
        assert [event["committed_id"] for event in (await two.page("a")).json["events"]] == [1, 2]


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-15")
async def test_rate_limit_spans_restarts_and_all_servers_of_a_log(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as one:
        assert (await one.submit(item(1))).status == 200
        async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as two:
            assert await two.commit(item(2)) == [2]
            assert (await one.submit(item(3))).refusal == (429, "rate_limited")
            assert (await two.submit(item(1), item(2), item(3))).refusal == (429, "rate_limited")
            assert await one.commit(item(2)) == [2]
    async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as again:
        late = await again.submit(item(3))
        assert (late.refusal, late.error["details"]) == ((429, "rate_limited"), {"retry_after_ms": 500})
        clock.advance(500)
        assert await again.commit(item(3)) == [3]


@BOTH_STORES
@pytest.mark.rule("CO-30", "EV-8")
async def test_request_above_the_rate_limit_commits_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as served:
        assert await served.commit(item(1)) == [1]
        late = await served.submit(item(1), item(2), item(3), item(4))
        assert (late.refusal, late.error["details"]) == ((429, "rate_limited"), {"retry_after_ms": 500})
        assert late.headers["Retry-After"] == "1"
        assert served.server.counts.events_committed == 1
        assert numbers((await served.page("a")).json["events"]) == [1]
        clock.advance(500)
        assert await served.commit(item(1), item(2), item(3), item(4)) == [1, 2, 3, 4]
        assert (await served.submit(item(5))).error["details"] == {"retry_after_ms": 1000}


@BOTH_STORES
@pytest.mark.rule("CO-17", "CO-16")
async def test_clock_jump_refuses_new_events_and_answers_retries(tmp_path: Path) -> None:
    clock = ShiftedClock()
    async with serving(tmp_path, clock=clock) as served:
        first = await served.submit(item(1))
        clock.ahead_ms = 3_600_000
        answer = await served.submit(item(2))
        assert answer.refusal == (503, "server_busy")
        assert "clock" in answer.error["message"]
        assert (await served.submit(item(1))).body == first.body


@BOTH_STORES
@pytest.mark.rule("CO-16")
async def test_store_failure_during_commit_is_answered_with_server_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as served:
        store: Any = served.server.log._store

        async def fail_commit(*_: object, **__: object) -> None:
            raise RuntimeError("internal detail")

        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", fail_commit)
            answer = await served.submit(item(1))
        assert answer.refusal == (500, "server_error")
        assert b"internal detail" not in answer.body
        assert await served.commit(item(1)) == [1]


@BOTH_STORES
@pytest.mark.rule("CO-16")
async def test_store_failure_during_a_read_is_answered_with_a_retry_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed read has no uncertain outcome, so the client can repeat it."""
    async with serving(tmp_path) as served:
        assert await served.commit(item(1)) == [1]
        store: Any = served.server.log._store

        async def fail_read(*_: object, **__: object) -> None:
            raise StoreUnavailableError("internal detail")

        with monkeypatch.context() as patched:
            patched.setattr(store, "read_views", fail_read)
            answer = await served.page("a")
        assert answer.refusal == (500, "server_error")
        assert answer.error["message"] == "the log cannot be read at the moment; try again"
        assert answer.error["details"]["retry_after_ms"] > 0
        assert numbers((await served.page("a")).json["events"]) == [1]


@pytest.mark.rule("CO-12")
async def test_server_refuses_writes_after_its_log_was_moved(tmp_path: Path, database: str) -> None:
    async with serving(tmp_path) as served:
        assert await served.commit(item(1)) == [1]
        await asyncio.to_thread(migrate_log, str(tmp_path / "events.db"), database, lambda _: None)
        answer = await served.submit(item(2))
        assert answer.refusal == (500, "server_error")
        assert answer.error["message"] == "the log has been moved; nothing was written here"
        assert numbers((await served.page("a")).json["events"]) == [1]
    async with serving(tmp_path, store=database) as served:
        assert await served.commit(item(2)) == [2]


@BOTH_STORES
@pytest.mark.rule("CO-33")
async def test_incomplete_requests_do_not_affect_other_clients(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        port = served.port
        begun = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for data in (
            begun,
            begun + b"Content-Length: 99\r\n\r\n{",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # start of a TLS handshake
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(data)
        assert await served.commit(item(1)) == [1]
