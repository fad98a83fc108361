"""Limits with the unmodified npm package `insieme`: no draft is lost or blocks later drafts."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import force_setattr

from cli.server_process import reserve_port
from databases import BOTH_STORES, log_at
from deadlines import soon, until
from insieme.clients import PROJECT, card, node_client
from oncelog.core.tenants import Tenant
from oncelog.server.events import subscriber
from oncelog.server.limits import INSIEME_FRAME_BYTES
from oncelog.testing.clock import ManualClock
from server.rejecting_store import MARK, reject_marked_bodies
from server.running_server import serving

pytestmark = pytest.mark.rule("EV-18")

NOW_MS = 1_763_000_000_000
"""A value with as many digits as the package's timestamps."""
BAD_IDS = ("b" + "x" * 300, "c\0", "d\ud800")


@BOTH_STORES
async def test_drafts_with_unusable_ids_are_rejected_and_other_drafts_commit(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, node_client("ada", tmp_path) as ada:
        await ada.open(served.url)
        await ada.do("start")
        await ada.wait_for_report("synced")
        # The package sends drafts of one call in id order.
        await ada.do("submit", events=[card(name[0], id=name) for name in ("a", *BAD_IDS, "e")])
        await ada.wait_for_report("committed", 2)
        assert ada.known == {1: "a", 2: "e"}
        assert [(one["id"], one["reason"]) for one in ada.reports("rejected")] == [
            (name, "validation_failed") for name in BAD_IDS
        ]
        assert ada.reports("error") == []
        assert await ada.do("drafts") == []


@BOTH_STORES
@pytest.mark.rule("CO-34")
async def test_draft_that_the_store_rejects_does_not_affect_other_drafts(tmp_path: Path) -> None:
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with serving(tmp_path) as served, node_client("ada", tmp_path) as ada:
        await ada.open(served.url)
        await ada.do("submit", events=[card(MARK if name == "b" else name, id=name) for name in "abc"])
        await ada.do("start")  # the drafts exist before the start
        await ada.wait_for_report("committed", 2)
        await ada.do("submit", events=[card(MARK, id="d"), card("e", id="e")])
        await ada.wait_for_report("committed", 3)
        assert ada.known == {1: "a", 2: "c", 3: "e"}
        assert [(one["id"], one["reason"]) for one in ada.reports("rejected")] == [
            ("b", "validation_failed"),
            ("d", "validation_failed"),
        ]
        await ada.do("stop")
        await ada.do("start")
        await ada.do("submit", events=[card("f", id="f")])
        await ada.wait_for_events(4)
        assert ada.reports("error") == []
        assert await ada.do("drafts") == []


@BOTH_STORES
@pytest.mark.rule("EV-8", "CO-15")
async def test_drafts_above_the_rate_limit_are_committed_later(tmp_path: Path) -> None:
    """The package gets `server_error`, reconnects automatically, and sends the batch again."""
    clock = ManualClock()
    async with (
        serving(tmp_path, clock=clock, new_events_per_second_max=10) as served,
        node_client("ada", tmp_path) as ada,
        node_client("bob", tmp_path) as bob,
    ):
        for package in (ada, bob):
            await package.open(served.url)
            await package.do("start")
            await package.wait_for_report("synced")
        requests = served.server.counts.requests
        await ada.submit(15)  # above the burst, but admitted because the rate is unused
        await ada.wait_for_events(15)
        await ada.submit(70, "more ")  # sent as two batches
        for known, count in ((15, 65), (65, 85)):
            requests["events", "websocket", "rate_limited"] = 0
            await until(lambda: requests["events", "websocket", "rate_limited"])
            assert len(ada.known) == known, "a batch is committed as a whole"
            clock.advance(5000)
            await ada.wait_for_events(count)
        await bob.wait_for_events(85)
        assert ada.known == bob.known
        assert {one["code"] for one in ada.reports("error")} == {"server_error"}
        assert await ada.do("drafts") == []


@pytest.mark.rule("EV-8")
async def test_drafts_wait_while_the_server_accepts_no_new_events(tmp_path: Path) -> None:
    """The package gets `server_error`, and sends the drafts again on later connections."""
    async with serving(tmp_path) as served, node_client("ada", tmp_path) as ada:
        log, requests = served.server.log, served.server.counts.requests
        await log.set_tenants([Tenant(f"project/{PROJECT}", records_max=1)])
        await ada.open(served.url)
        await ada.do("start")
        await ada.do("submit", events=[card("a", id="a")])
        await ada.wait_for_events(1)
        await ada.do("submit", events=[card(name, id=name) for name in "bc"])
        await until(lambda: requests["events", "websocket", "quota_exceeded"] >= 2)
        log.set_read_only()
        await until(lambda: requests["events", "websocket", "read_only"] >= 2)
        assert [one["id"] for one in await ada.do("drafts")] == ["b", "c"]
        await log.set_tenants([])
        log.set_read_only(False)
        await ada.wait_for_events(3)
        assert [ada.known[number] for number in sorted(ada.known)] == ["a", "b", "c"]
        assert {one["code"] for one in ada.reports("error")} == {"server_error"}
        assert await ada.do("drafts") == []


@pytest.mark.rule("EV-8")
async def test_drafts_above_the_frame_rate_are_committed_on_the_next_connection(tmp_path: Path) -> None:
    """The package gets `server_error`, and reconnects automatically."""
    async with (
        serving(tmp_path, clock=ManualClock(), frames_per_second_max=4) as served,
        node_client("ada", tmp_path) as ada,
    ):
        await ada.open(served.url)
        await ada.do("start")
        await ada.wait_for_report("synced")
        for count in range(1, 10):
            await ada.do("submit", events=[card(str(count), id=str(count))])
            await ada.wait_for_events(count)
        assert served.server.counts.requests["events", "websocket", "rate_limited"] >= 3
        assert {one["code"] for one in ada.reports("error")} == {"server_error"}
        assert ada.known == {count: str(count) for count in range(1, 10)}
        assert await ada.do("drafts") == []


def frame_bytes(event: dict[str, Any], msg_id: str) -> int:
    """Return the size of the package's frame for an event."""
    item = {**event, "projectId": PROJECT, "meta": {"clientId": "ada", "clientTs": NOW_MS}}
    frame = {"type": "submit_events", "protocolVersion": "1.0", "timestamp": NOW_MS, "msgId": msg_id}
    text = json.dumps({**frame, "payload": {"events": [item]}}, separators=(",", ":"), ensure_ascii=False)
    return len(text.encode())


@pytest.mark.rule("CO-30")
async def test_largest_package_frame_is_accepted_at_the_lowest_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(tmp_path, frame_bytes_max=INSIEME_FRAME_BYTES) as served,
        node_client("ada", tmp_path) as ada,
    ):
        await ada.open(served.url)
        await ada.do("start")
        largest = card("", id="a")
        largest["payload"]["text"] = "x" * (64 * 1024 - frame_bytes(largest, "batch-preview"))
        assert frame_bytes(largest, str(UUID(int=0))) == INSIEME_FRAME_BYTES
        await ada.do("submit", events=[largest])
        await ada.wait_for_events(1)
        larger = {**largest, "id": "b", "payload": {**largest["payload"], "more": ""}}
        with pytest.raises(AssertionError, match=r"exceeds submitBatch\.maxBytes"):
            await ada.do("submit", events=[larger])
        assert await ada.do("drafts") == []
        assert "insieme" not in caplog.text


@pytest.mark.rule("EV-8", "CO-30")
async def test_drafts_above_the_frame_limit_are_kept_until_the_limit_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The package sends up to 64 KiB at a time. A close during a batch goes unnoticed (docs/reference/events.md)."""
    with reserve_port() as port:
        async with node_client("ada", tmp_path) as ada:
            async with serving(tmp_path, port=port, frame_bytes_max=4000) as served:
                assert "limits.frame_bytes_max is 4000: clients of the npm package insieme send up to" in caplog.text
                await ada.open(served.url)
                await ada.do("start")
                await ada.wait_for_report("synced")
                await ada.do("submit", events=[card("first", id="a")])
                await ada.wait_for_events(1)
                await ada.submit(40, has_ids=True)
                await ada.wait_for_report("socket_closed")
                assert [one["code"] for one in ada.reports("socket_closed")] == [1009]
                assert served.server.counts.requests["events", "websocket", "too_large"] == 1
                assert len(await ada.do("drafts")) == 40
                await ada.do("stop")
            async with serving(tmp_path, port=port):
                await ada.do("start")
                await ada.wait_for_events(41)
                assert await ada.do("drafts") == []


@pytest.mark.rule("EV-8", "EV-14")
async def test_batch_in_flight_commits_after_own_events_of_an_open_cycle_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may not notice the close (1008), so it first gets `server_error`, and reconnects automatically."""
    monkeypatch.setattr(subscriber, "RANGES_MAX", 2)
    async with (
        serving(tmp_path, page_events_max=2) as served,
        node_client("ada", tmp_path) as ada,
        node_client("bob", tmp_path) as bob,
    ):
        for package in (ada, bob):
            await package.open(served.url)
            await package.do("start")
            await package.wait_for_report("synced")
        for number in range(1, 13):
            await (ada, bob)[number % 2].submit(1, f"{number} ")
            for reader in (ada, bob):
                await reader.wait_for_events(number)
        pages = served.hold_pages(monkeypatch)
        await ada.do("submitDuringSync", events=[card("13", id="13")], since=0)
        await soon(pages.reached.wait())
        pages.open()
        pages.shut()  # after the first page
        await soon(pages.reached.wait())
        await bob.wait_for_events(13)  # The result waits for the pages of the cycle.
        force_setattr(served.server.settings.api_limits, "cycle_idle_ms", 0)  # the cycle ends before the next request
        pages.open()
        await ada.wait_for_report("error")
        await ada.wait_for_events(13)
        await ada.do("submit", events=[card("14", id="14")])
        for package in (ada, bob):
            await package.wait_for_events(14)
        assert ada.known == bob.known
        (error,) = (one for one in ada.reports("error") if one["code"] == "server_error")
        assert "the sync cycle was left open for too long" in error["message"]
        assert await ada.do("drafts") == []
