"""Mistakes of the application raise a clear error and lose no data."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from client.events.event_clients import UNREACHABLE_URL, client_of, numbered_draft
from deadlines import WAIT_S, until
from oncelog.client import BlockingClient, Client, ClientLimits, ConnectionState, Event
from oncelog.client.events.blocking_base import wrap_handler
from oncelog.errors import ClientError, LimitExceededError, SettingsError, StoreUnavailableError
from server.running_server import Serving, item, serving


async def as_coroutine(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": None}, "url"),
        ({"url": "http://a..b:80"}, "url"),
        ({"path": ""}, "path"),
        ({"path": None}, "path"),
        ({"path": b"a"}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"partitions": None}, "partitions"),
        ({"partitions": [5]}, "partitions"),
        ({"partitions": [""]}, "partitions must each have 1 to 256"),
        ({"partitions": ["x" * 257]}, "partitions must each have 1 to 256"),
        ({"partitions": ["a\0"]}, "partitions"),
        ({"partitions": map(str, range(65))}, "partitions must have at most 64 different names, not 65"),
        ({"client_id": ""}, "client_id"),
        ({"client_id": 5}, "client_id"),
        ({"client_id": "x" * 1000}, "client_id must be a string of 1 to 512"),
        ({"client_id": "\ud800"}, "client_id"),
        ({"token": b"secret"}, "token"),
        ({"token": "sec\nret"}, "token"),
        ({"limits": 5}, "limits"),
        ({"apply": 5}, "apply"),
        ({"apply": as_coroutine}, "apply must not be async"),
        ({"reset": as_coroutine}, "reset must not be async"),
    ],
)
def test_invalid_setting_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"url": UNREACHABLE_URL, "path": ":memory:", "partitions": ["a"], **options}
    with pytest.raises(SettingsError, match=named) as caught:
        client_of(given.pop("url"), given.pop("path"), **given)
    assert "secret" not in str(caught.value)


def test_limit_out_of_range_is_refused() -> None:
    with pytest.raises(SettingsError, match="answer_timeout_ms must be a whole number from 1 to"):
        ClientLimits(answer_timeout_ms=10**400)


@pytest.mark.parametrize("number", [-1, 2**53, 1.5, "1", None, True])
async def test_invalid_committed_ids_are_refused(number: Any) -> None:
    async with client_of(UNREACHABLE_URL) as client:
        for method in (client.start_over, client.reached, client.forget_set_aside):
            with pytest.raises(SettingsError, match="must be a whole number from 0 to"):
                await method(number)


@pytest.mark.parametrize("kind", [Client, BlockingClient])
def test_deprecated_parameter_name_for_the_path_still_works(
    kind: type[Client | BlockingClient], tmp_path: Path
) -> None:
    with pytest.warns(DeprecationWarning, match=r"use Client\(path=…\)") as warned:
        client: Any = kind(UNREACHABLE_URL, store=tmp_path / "client.db", partitions=["a"])
    assert [warning.filename for warning in warned] == [__file__]
    runtime = getattr(client, "_client", client)._runtime
    assert runtime.store._file.path == str(tmp_path / "client.db")


def test_path_and_its_deprecated_name_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="must not both be given"):
        Client(UNREACHABLE_URL, path=tmp_path / "client.db", store=tmp_path / "other.db", partitions=["a"])


def test_invalid_handlers_are_refused() -> None:
    client: Any = client_of(UNREACHABLE_URL)
    for register in (client.on_event, client.on_status, client.on_history_changed):
        with pytest.raises(SettingsError, match="must be a function"):
            register(5)
    blocking: Any = BlockingClient(UNREACHABLE_URL, path=":memory:", partitions=["a"])
    for adding in (blocking.on_event, blocking.on_status):
        with pytest.raises(SettingsError, match="not async"):
            adding(as_coroutine)


async def test_stop_iteration_raised_in_a_handler_sets_the_event_aside(served: Serving, client: Client) -> None:
    def raise_stop_iteration(_: object) -> None:
        next(iter(()))

    seen: list[int] = []
    client.on_event(wrap_handler(raise_stop_iteration), name="raises")
    client.on_event(lambda event: seen.append(event.committed_id), name="sees")
    await served.commit(item(1), item(2))
    await until(lambda: seen == [1, 2])
    await until(lambda: client.status().set_aside == 2)
    await client.forget_set_aside(1)
    assert client.status().set_aside == 1
    with pytest.raises(RuntimeError, match="StopIteration"):
        await client.start_over(reset=raise_stop_iteration)


async def test_handler_that_cancels_the_client_task_closes_the_client_with_an_error(client: Client) -> None:

    async def cancel_client_task(_: Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    client.on_event(cancel_client_task)
    await client.submit(numbered_draft(1))
    await until(lambda: client.status().state is ConnectionState.CLOSED)
    assert "other code has cancelled a task" in str(client.status().last_error)
    with pytest.raises(ClientError, match="has failed"):
        await client.submit(numbered_draft(2))


async def test_removed_store_accepts_no_submissions(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    async with client_of(UNREACHABLE_URL, store) as client:
        await client.submit(numbered_draft(1))
        store.unlink()
        with pytest.raises(StoreUnavailableError, match="was removed or replaced"):
            await client.submit(numbered_draft(2))


async def test_apply_can_change_row_and_text_factories(tmp_path: Path) -> None:
    def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        connection.row_factory = lambda _, row: {"a": row[0]}
        connection.text_factory = bytes
        connection.execute("CREATE TABLE IF NOT EXISTS n (n)")
        connection.executemany("INSERT INTO n VALUES (?)", [(one.committed_id,) for one in events])
        assert connection.execute("SELECT 1").fetchone() == {"a": 1}

    async with (
        serving(tmp_path) as served,
        client_of(served.url, tmp_path / "client.db", apply=apply) as client,
    ):
        pending = await client.submit(numbered_draft(1))
        async with asyncio.timeout(WAIT_S):
            await pending.outcome()
            await client.reached(1)
        assert await client.refused() == []
        assert client.status().set_aside == 0


async def test_outbox_is_limited_in_bytes() -> None:
    limits = ClientLimits(outbox_bytes_max=100)
    async with client_of(UNREACHABLE_URL, limits=limits) as client:
        await client.submit({"type": "t", "text": "x" * 60})
        with pytest.raises(LimitExceededError, match="outbox_bytes_max is 100"):
            await client.submit({"type": "t", "text": "x" * 60})
        assert len(client.pending()) == 1
