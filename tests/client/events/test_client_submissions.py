"""Client submissions: outcomes, ids, rejections and limits."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest

from client.events.event_clients import UNREACHABLE_URL, client_of, committed, numbered_draft, outcome, take
from databases import BOTH_STORES
from deadlines import WAIT_S, soon, until
from oncelog.client import Client, ClientLimits, Committed, Draft, Event, Refused
from oncelog.client.events import store as store_module
from oncelog.client.runtime import backoff
from oncelog.errors import (
    CanonicalError,
    ClientError,
    IdReusedError,
    LimitExceededError,
    SettingsError,
    StoreUnavailableError,
)
from server.running_server import api_key, serving

# --- submissions --------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_submission_is_committed_and_received_as_an_event(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url, client_id="laptop") as client:
        assert client.client_id == "laptop"
        pending = await client.submit({"type": "placed", "order": 17})
        found = await soon(pending.outcome())
        assert found == pending.result
        assert isinstance(found, Committed)
        event = await soon(anext(client.events()))
        content, time_ms = {"type": "placed", "order": 17}, found.status_updated_at
        assert event == Event(pending.id, "laptop", ("a",), 1, content, time_ms, actor="user:developer")
        assert client.pending() == []
        (shown,) = (await served.page("a")).json["events"]
        assert shown["id"] == pending.id


@BOTH_STORES
async def test_event_content_round_trips_unchanged(tmp_path: Path) -> None:
    deep: Any = {"type": "deep"}
    for _ in range(500):
        deep = {"type": "deep", "in": deep}
    shapes: list[Any] = [
        deep,
        {"type": "text", "text": '\0 \u2028 \U0001f600 é\\"</script>', "": [None, True, []]},
        {"type": "numbers", "numbers": [0, -1, 1.5, 1e300, 5e-324, 2**53, 10**20, 10**21, 295147905179352830000]},
        {"type": "long", "text": "x" * 200_000},
    ]
    async with serving(tmp_path) as served, client_of(served.url) as own, client_of(served.url) as other:
        for shape in shapes:
            assert await committed(own, shape)
        for client in (own, other):
            events = client.events()
            async with asyncio.timeout(WAIT_S):
                assert [(await anext(events)).event for _ in shapes] == shapes


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_submissions_with_the_same_id_share_one_event_and_outcome(client: Client) -> None:
    one = UUID(int=7)
    first, second = await asyncio.gather(
        client.submit(numbered_draft(1), id=one), client.submit(numbered_draft(1), id=str(one).upper())
    )
    assert first is second
    number = await committed(client, numbered_draft(1), id=one)
    assert await committed(client, numbered_draft(1), id=one) == number == 1
    assert await committed(client, numbered_draft(2)) == 2
    assert await take(client.events(), 2) == [1, 2]
    found = await outcome(client, numbered_draft(3), id=one)
    assert isinstance(found, Refused)
    assert found.reason == "validation_failed"
    (rejection,) = await client.refused()
    assert (rejection.id, rejection.event) == (str(one), numbered_draft(3))


async def test_refused_event_can_be_sent_again_under_its_id(client: Client) -> None:
    refused = await client.submit(numbered_draft(1), expected_committed_id=9)
    assert isinstance(await soon(refused.outcome()), Refused)
    with pytest.raises(ClientError, match="no refused event has the id x"):
        await client.send_again("x")
    again = await client.send_again(refused.id.upper())
    assert (again.id, again.event) == (refused.id, numbered_draft(1))
    assert client.status().refused == 0
    assert await soon(again.outcome()) == Committed(1, ANY)
    assert await client.refused() == []


async def test_pending_id_with_a_different_event_is_refused() -> None:
    one = UUID(int=7)
    async with client_of(UNREACHABLE_URL) as client:
        await client.submit(numbered_draft(1), id=one)
        with pytest.raises(IdReusedError, match=str(one)):
            await client.submit(numbered_draft(2), id=one)
        with pytest.raises(IdReusedError):
            await client.submit(numbered_draft(1), id=one, expected_committed_id=3)
        with pytest.raises(IdReusedError):
            await client.submit_many([Draft(numbered_draft(3)), Draft(numbered_draft(4), id=one)])
        other = UUID(int=8)
        with pytest.raises(IdReusedError):
            await client.submit_many([Draft(numbered_draft(5), id=other), Draft(numbered_draft(6), id=other)])
        assert len(client.pending()) == 1, "`submit_many` accepts all drafts or none"
        first, again = await client.submit_many(
            [Draft(numbered_draft(5), id=other), Draft(numbered_draft(5), id=other)]
        )
        assert first is again


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_refused_events_are_kept_until_the_application_forgets_them(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "laptop", read=["a"], write=["a"])
        async with client_of(served.url, store, client_id="laptop", token=key.text) as client:
            forbidden = await outcome(client, numbered_draft(1), ["b"])
            assert isinstance(forbidden, Refused)
            assert forbidden.reason == "forbidden"
            stale = await outcome(client, numbered_draft(2), expected_committed_id=99)
            assert isinstance(stale, Refused)
            assert stale.errors[0].current_committed_id == 0
            assert await committed(client, numbered_draft(3)) == 1
            assert client.status().refused == 2
        async with client_of(served.url, store, client_id="laptop", token=key.text) as client:
            assert client.status().refused == 2
            first, second = await client.refused()
            assert (first.outcome, first.event, first.partitions) == (forbidden, numbered_draft(1), ("b",))
            await client.forget_refused(first.id)
            assert [one.id for one in await client.refused()] == [second.id]
            assert client.status().refused == 1
            with pytest.warns(DeprecationWarning, match="forget_rejected"):
                await client.forget_rejected()  # the deprecated method forgets nothing
            with pytest.warns(DeprecationWarning, match="Status.rejected"):
                assert client.status().rejected == 1
            with pytest.warns(DeprecationWarning, match="Client.rejected"):
                assert await client.rejected() == [second]
            await client.forget_refused()  # without ids, forget all
            assert client.status().refused == 0


@pytest.mark.parametrize(
    ("arguments", "options", "where"),
    [
        (("no event",), {}, r"\$\.event"),
        (({},), {}, r"\$\.event\.type"),
        (({"type": ""},), {}, r"\$\.event\.type"),
        (({"type": 7},), {}, r"\$\.event\.type"),
        (({"type": "t", "x": float("nan")},), {}, r"\$\.event\.x"),
        (({"type": "t", "x": [2**60]},), {}, r"\$\.event\.x\[0\]"),
        (({"type": "t", "x": "\ud800"},), {}, r"\$\.event\.x"),
        (({"type": "t", "x": object()},), {}, r"\$\.event\.x"),
        (({"type": "t"}, []), {}, r"\$\.partitions"),
        (({"type": "t"}, [""]), {}, r"\$\.partitions"),
        (({"type": "t"}, "orders"), {}, r"\$\.partitions"),
        (({"type": "t"}, ["\ud800"]), {}, r"\$\.partitions"),
        (({"type": "t"}, [f"p{number}" for number in range(65)]), {}, r"\$\.partitions"),
        (({"type": "t"},), {"id": "7"}, r"\$\.id"),
        (({"type": "t"},), {"expected_committed_id": -1}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": 2**70}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": "7"}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": True}, r"\$\.expected_committed_id"),
    ],
)
async def test_malformed_event_is_refused_with_the_name_of_the_field(
    arguments: tuple[Any, ...], options: dict[str, Any], where: str
) -> None:
    async with client_of(UNREACHABLE_URL) as client:
        with pytest.raises(CanonicalError, match=where):
            await client.submit(*arguments, **options)
        assert client.pending() == []
        await client.submit(numbered_draft(1))


async def test_submission_without_partitions_needs_a_client_with_one_partition() -> None:
    for partitions in ((), ("a", "b")):
        async with client_of(UNREACHABLE_URL, partitions=partitions) as client:
            with pytest.raises(ValueError, match="partitions must be given"):
                await client.submit(numbered_draft(1))
            await client.submit(numbered_draft(1), ["c"])


def test_invalid_client_settings_are_refused() -> None:
    for url in ("", "localhost:7171", "ftp://host", "http://", "http://host:0", "http://host:x", "http://host/?a=1"):
        with pytest.raises(SettingsError, match="url must be"):
            client_of(url)
    with pytest.raises(SettingsError) as caught:
        client_of("http://ada:geheim@host:1")
    assert "geheim" not in str(caught.value)
    with pytest.raises(SettingsError, match="partitions must be a list of strings"):
        client_of(UNREACHABLE_URL, partitions="orders")
    with pytest.raises(SettingsError, match="pause_ms_min"):
        ClientLimits(pause_ms_min=0)
    with pytest.raises(SettingsError, match="pause_ms_max"):
        ClientLimits(pause_ms_min=10, pause_ms_max=9)


async def test_outbox_and_event_size_limits_are_enforced() -> None:
    limits = ClientLimits(outbox_events_max=2, body_bytes_max=100, pause_ms_min=1)
    async with client_of(UNREACHABLE_URL, limits=limits) as client:
        with pytest.raises(CanonicalError, match=r"at most 100 bytes \(body_bytes_max\)"):
            await client.submit({"type": "t", "x": "x" * 100})
        with pytest.raises(LimitExceededError, match="outbox_events_max is 2"):
            await client.submit_many([Draft(numbered_draft(number)) for number in range(3)])
        await client.submit(numbered_draft(1), id=UUID(int=1))
        await client.submit(numbered_draft(2))
        with pytest.raises(LimitExceededError):
            await client.submit(numbered_draft(3))
        await client.submit(numbered_draft(1), id=UUID(int=1))
        assert len(client.pending()) == 2


async def test_failed_store_write_fails_all_submissions_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))
    write = store_module.ClientStore.save_outbox
    failures = iter(range(1))
    is_writing, may_fail = threading.Event(), threading.Event()

    def fail_once(*arguments: Any) -> int:
        if next(failures, None) is not None:
            is_writing.set()
            assert may_fail.wait(WAIT_S)
            raise StoreUnavailableError("the disk is full")
        return write(*arguments)

    async with client_of(UNREACHABLE_URL) as client:
        monkeypatch.setattr(store_module.ClientStore, "save_outbox", fail_once)
        first = asyncio.ensure_future(client.submit(numbered_draft(1), id=UUID(int=1)))
        await until(is_writing.is_set)
        second = asyncio.ensure_future(client.submit(numbered_draft(1), id=UUID(int=1)))
        await until(lambda: len(client._outbox._pending_accepts) == 1)
        may_fail.set()
        for one in (first, second):
            with pytest.raises(StoreUnavailableError, match="full"):
                await one
        assert client.pending() == []
        await client.submit(numbered_draft(1), id=UUID(int=1))
        assert len(client.pending()) == 1


async def test_each_submission_fails_while_the_store_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))

    def fail(*_arguments: Any) -> None:
        raise StoreUnavailableError("the disk is full")

    async with client_of(UNREACHABLE_URL) as client:
        with monkeypatch.context() as patched:
            patched.setattr(store_module.ClientStore, "save_outbox", fail)
            for number in range(3):
                with pytest.raises(StoreUnavailableError, match="full"):
                    await soon(client.submit(numbered_draft(number)))
            assert client.pending() == []
            assert client.status().last_error == "the disk is full"
        await soon(client.until_status(lambda status: status.last_error != "the disk is full"))
        await soon(client.submit(numbered_draft(4)))
        assert len(client.pending()) == 1
