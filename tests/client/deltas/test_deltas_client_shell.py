"""The deltas client's tasks against a model of the gateway: cancellation, failures and races."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from client.deltas.deltas_clients import SHORT, UNREACHABLE_URL, client_of, rows_of
from client.deltas.model_gateway import BAD, ModelGateway
from client.deltas.model_transport import ModelWire
from deadlines import WAIT_S, soon, until
from oncelog.client.deltas import DELETE, ConnectionState, DeltasClient, DeltasLimits, Edits, LocalRow
from oncelog.client.deltas.codec import DeltaPage, GatewayRefusedError
from oncelog.client.deltas.store import DeltasStore
from oncelog.client.runtime.backoff import RetryPause
from oncelog.client.runtime.client import get_wall_ms
from oncelog.error_codes import FORBIDDEN, SERVER_ERROR
from oncelog.errors import (
    CanonicalError,
    ClientError,
    ClosedError,
    LostError,
    SettingsError,
    StoreUnavailableError,
)

AHEAD_MS = 3_600_000
"""Lead of the model's stopped clock, so that edits of a slow test stay within the drift limit."""


def client_of_model(gateway: ModelGateway | None = None) -> tuple[ModelGateway, ModelWire]:
    chosen = gateway or ModelGateway()
    chosen.now_ms = get_wall_ms() + AHEAD_MS
    return chosen, ModelWire(chosen)


async def test_edit_of_a_cancelled_caller_is_reported_and_pushed() -> None:
    gateway, wire = client_of_model()
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        changes = ann.changes()
        loop, is_begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def edit_slowly(edits: Edits) -> None:
            loop.call_soon_threadsafe(is_begun.set)
            assert may_end.wait(WAIT_S)
            edits.put("products", "1", {"a": 1})

        editing = asyncio.create_task(ann.transact(edit_slowly))
        await soon(is_begun.wait())
        editing.cancel()
        await asyncio.wait([editing])
        may_end.set()
        assert (await soon(anext(changes))).after == {"a": 1}
        await soon(ann.synced())
        assert gateway.rows() == {("products", "1"): {"a": 1}}


async def test_synced_waits_for_the_deltas_that_the_gateway_has_at_the_call() -> None:
    gateway, wire = client_of_model()
    async with client_of(UNREACHABLE_URL, wire=wire, client_id="ann") as ann:
        await soon(ann.synced())
        async with client_of(UNREACHABLE_URL, wire=ModelWire(gateway), client_id="bob") as bob:
            await bob.put("products", "1", {"a": 1})
            await soon(bob.synced())
        assert await ann.row("products", "1") is None  # `wake_live` has not been called
        pulls = wire.requests.count("pull")
        await soon(ann.synced())
        assert await ann.row("products", "1") == {"a": 1}
        assert wire.requests.count("pull") == pulls + 1
        assert "hang up" not in wire.requests


async def test_synced_ignores_a_page_requested_before_the_call() -> None:
    gateway, wire = client_of_model()
    gate, is_answered = asyncio.Event(), asyncio.Event()

    async def hold_pull(name: str) -> None:
        if name == "pull":
            is_answered.set()
            await gate.wait()

    wire.after = hold_pull
    async with client_of(UNREACHABLE_URL, wire=wire, client_id="ann") as ann:
        await soon(is_answered.wait())
        async with client_of(UNREACHABLE_URL, wire=ModelWire(gateway), client_id="bob") as bob:
            await bob.put("products", "1", {"a": 1})
            await soon(bob.synced())
        syncing = asyncio.create_task(ann.synced())
        await until(lambda: ann._puller._rounds_requested == 1)
        gate.set()
        await soon(syncing)
        assert await ann.row("products", "1") == {"a": 1}


async def test_synced_raises_timeout_error_or_closed_error() -> None:
    async with client_of(UNREACHABLE_URL) as ann:
        with pytest.raises(TimeoutError):
            await ann.synced(timeout_s=0.01)
        await ann.put("products", "1", {"a": 1})
        with pytest.raises(TimeoutError):
            await ann.synced(timeout_s=0.01)
        waiting = asyncio.create_task(ann.synced())
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await soon(waiting)


@pytest.mark.rule("DE-6")
async def test_whole_queue_is_pushed_again_after_a_lost_answer() -> None:
    gateway, wire = client_of_model()
    sent: list[list[str]] = []
    push = wire.push

    async def record_push(entries: Any) -> Any:
        sent.append([one.decode().row_id for one in entries])
        answer = await push(entries)
        if len(sent) < 3:
            raise LostError("lost")
        return answer

    wire.push = record_push  # type: ignore[method-assign]
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:

        def both(edits: Any) -> None:
            edits.put("products", "1", {"a": 1})
            edits.put("products", "2", {"a": 1})

        await ann.transact(both)
        await soon(ann.synced())
        assert sent == [["1", "2"]] * 3
        assert len(gateway.log) == 2


async def test_temporarily_unwritable_store_delays_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, wire = client_of_model()
    failures = {"acknowledge": 1, "apply": 1}
    for name in ("acknowledge", "apply"):
        function = getattr(DeltasStore, name)

        def fail_once(self: DeltasStore, *given: Any, name: str = name, function: Any = function) -> Any:
            if failures[name]:
                failures[name] -= 1
                raise StoreUnavailableError("the disk is full")
            return function(self, *given)

        monkeypatch.setattr(DeltasStore, name, fail_once)
    monkeypatch.setattr("oncelog.client.runtime.backoff.STORE_PAUSE", RetryPause())
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        await ann.put("products", "1", {"a": 1})
        await soon(ann.synced())
        assert failures == {"acknowledge": 0, "apply": 0}
        assert (ann.status().pending, len(gateway.log)) == (0, 1)
        assert ann.status().last_error is None


async def test_unexpected_error_is_raised_in_all_callers() -> None:
    _, wire = client_of_model()
    is_broken = asyncio.Event()

    async def raise_unexpected(name: str) -> None:
        if name == "push":
            await is_broken.wait()
            raise ZeroDivisionError("broken")

    wire.before = raise_unexpected
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        changes = ann.changes()
        await ann.put("products", "1", {"a": 1})
        waiting = asyncio.create_task(ann.synced())
        await asyncio.sleep(0)
        is_broken.set()
        with pytest.raises(ClientError, match="has failed: ZeroDivisionError: broken"):
            await soon(waiting)
        assert (await anext(changes)).row_id == "1"
        with pytest.raises(ClientError, match="has failed"):
            await soon(anext(changes))
        with pytest.raises(ClientError, match="has failed"):
            await ann.put("products", "1", {"a": 2})


async def test_request_with_an_invalid_answer_is_repeated() -> None:
    _, wire = client_of_model()
    nonsense = [DeltaPage((), 0, has_more=True, epoch="e"), GatewayRefusedError(SERVER_ERROR, "x")]

    async def answer_malformed(name: str) -> Any:
        if name == "pull" and nonsense:
            return nonsense.pop(0)
        return None

    wire.before = answer_malformed
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        await soon(ann.synced())
        assert not nonsense
        assert ann.status().last_error is None


async def test_repeated_compacted_answers_are_followed_by_a_pause() -> None:
    gateway, wire = client_of_model()
    limits = DeltasLimits(**{**SHORT, "pause_ms_min": 600_000, "pause_ms_max": 600_000})

    async def answer_compacted(name: str) -> Any:
        return DeltaPage((), 0, True, gateway.epoch, is_compacted=True) if name == "pull" else None

    wire.before = answer_compacted
    async with client_of(UNREACHABLE_URL, wire=wire, limits=limits):
        await until(lambda: wire.requests == ["pull", "snapshot", "pull"])
        for _ in range(100):
            await asyncio.sleep(0)
        assert wire.requests == ["pull", "snapshot", "pull"]


async def test_push_detects_a_changed_history() -> None:
    gateway, wire = client_of_model()
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        await ann.put("products", "1", {"a": 1})
        await soon(ann.synced())
        await until(lambda: ann.status().state is ConnectionState.LIVE)
        gateway.restore()
        wire.wake_live = lambda: None  # type: ignore[method-assign] # the live connection is not woken
        history_change = asyncio.ensure_future(anext(ann.history_changes()))
        await ann.put("products", "2", {"a": 1})
        changed = await soon(history_change)
        assert (changed.known_epoch, changed.epoch) == ("epoch 1", "epoch 2")
        await soon(ann.synced())
        assert await rows_of(ann) == gateway.rows() == {("products", "2"): {"a": 1}}


async def test_client_that_may_only_push_continues_after_a_restore() -> None:
    gateway, wire = client_of_model()
    may_read = False

    async def refuse_pull(name: str) -> GatewayRefusedError | None:
        return None if name == "push" or may_read else GatewayRefusedError(FORBIDDEN, "may not read")

    wire.before = refuse_pull
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        await ann.put("products", "1", {"a": 1})
        await soon(ann.until_status(lambda status: status.pending == 0))
        gateway.restore()
        for number in ("2", "3"):
            await ann.put("products", number, {"a": 1})
            await soon(ann.until_status(lambda status: status.pending == 0))
        assert gateway.rows().keys() == {("products", "2"), ("products", "3")}
        may_read = True
        ann.reconnect_now()
        await soon(ann.synced())
        assert await rows_of(ann) == gateway.rows()
        assert str(ann.status().history_change).count("epoch 2") == 1


async def test_delta_discarded_during_its_push_leaves_no_refusal() -> None:
    gateway, wire = client_of_model()
    limits = DeltasLimits(**{**SHORT, "refused_pause_ms_min": 600_000, "refused_pause_ms_max": 600_000})
    gate, is_pushing = asyncio.Event(), asyncio.Event()

    async def hold_push(name: str) -> None:
        if name == "push":
            is_pushing.set()
            await gate.wait()

    wire.after = hold_push
    async with client_of(UNREACHABLE_URL, wire=wire, limits=limits) as ann:
        made = await ann.put("products", "1", {"a": BAD})
        await soon(is_pushing.wait())
        assert made is not None
        await ann.withdraw(made)
        await ann.put("products", "2", {"a": 1})
        gate.set()
        await soon(ann.synced())
        assert ann.status().refusal is None
        assert await rows_of(ann) == gateway.rows() == {("products", "2"): {"a": 1}}


async def test_edits_during_a_reset_are_not_lost() -> None:
    gateway, wire = client_of_model()
    gate, is_reading = asyncio.Event(), asyncio.Event()
    async with client_of(UNREACHABLE_URL, wire=wire) as ann:
        await ann.put("products", "1", {"a": 1})
        await soon(ann.synced())

        async def hold_snapshot(name: str) -> None:
            if name == "snapshot":
                is_reading.set()
                await gate.wait()

        wire.after = hold_snapshot
        gateway.back_up()
        gateway.restore()
        wire.wake_live()
        ann.reconnect_now()
        await soon(is_reading.wait())
        assert ann.status().is_resetting
        await ann.put("products", "1", {"a": 2})
        await soon(ann.until_status(lambda status: status.pending == 0))  # Acknowledged after the page was read.
        changes = ann.changes()
        gate.set()
        await soon(ann.until_status(lambda status: not status.is_resetting))
        assert await ann.row("products", "1") == {"a": 2}
        await ann.put("products", "9", {})
        assert (await soon(anext(changes))).row_id == "9"  # no other change was reported
        await soon(ann.synced())
        assert await rows_of(ann) == gateway.rows()


async def test_edit_function_gets_the_current_row() -> None:
    async with client_of(UNREACHABLE_URL) as ann:

        async def count() -> None:
            await ann.edit("products", "1", lambda row: {"n": (row or {"n": 0})["n"] + 1})

        await asyncio.gather(*(count() for _ in range(20)))
        assert await ann.row("products", "1") == {"n": 20}
        assert await ann.edit("products", "1", lambda _: DELETE) is not None
        assert await ann.row("products", "1") is None
        assert await ann.edit("products", "1", lambda _: DELETE) is None

        def raise_error(_row: Any) -> Any:
            raise StopIteration("of the application")

        with pytest.raises(RuntimeError, match="StopIteration"):
            await ann.edit("products", "1", raise_error)


async def test_edit_function_without_a_return_value_changes_nothing() -> None:
    async with client_of(UNREACHABLE_URL) as ann:
        await ann.put("products", "1", {"n": 1})

        def return_nothing(row: Any) -> Any:
            row["n"] += 1

        with pytest.raises(ClientError, match=r"return the columns to set, or oncelog\.client\.deltas\.DELETE"):
            await ann.edit("products", "1", return_nothing)
        with pytest.raises(CanonicalError, match="columns must be a mapping"):
            await ann.edit("products", "1", lambda _: [])  # type: ignore[arg-type,return-value]
        assert await ann.row("products", "1") == {"n": 1}
        assert ann.status().pending == 1
        assert await ann.edit("products", "1", lambda row: {"n": (row or {})["n"] + 1}), "the client still works"


async def test_rows_are_returned_in_order_and_in_pages() -> None:
    async with client_of(UNREACHABLE_URL) as ann:
        names = ["", *(f"{number:04}" for number in range(1001)), "\U0001f600", "\uffff"]

        def edit_many_rows(edits: Any) -> None:
            for name in names[1:]:
                edits.put("products", name, {"name": name})

        await ann.transact(edit_many_rows)
        found = [row async for row in ann.each_row("products")]
        assert [row.row_id for row in found] == sorted(names[1:])
        assert (await ann.rows("products", after="0998", limit=2))[1] == LocalRow("1000", {"name": "1000"})
        for call in (ann.row("a b", "1"), ann.row("a", ""), ann.rows("")):
            with pytest.raises(CanonicalError):
                await call
        with pytest.raises(CanonicalError):
            ann.changes("a b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1"}, "url must be http://HOST:PORT"),
        ({"gateway": ""}, "gateway must "),
        ({"gateway": ".."}, "gateway must "),
        ({"gateway": "x" * 600}, "gateway must "),
        ({"gateway": 7}, "gateway must "),
        ({"path": ""}, "must be the path"),
        ({"client_id": ""}, "client_id must be a string"),
        ({"client_id": None}, "client_id must be given"),
        ({"token": "ü"}, "token must be a string of printable ASCII"),
        ({"limits": 7}, "limits must be DeltasLimits"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], words: str) -> None:
    chosen = {"url": UNREACHABLE_URL, "gateway": "shop", "path": ":memory:", "client_id": "ann", **options}
    with pytest.raises(SettingsError, match=words):
        DeltasClient(chosen.pop("url"), chosen.pop("gateway"), **chosen)


async def test_client_can_be_opened_only_once(tmp_path: Path) -> None:
    ann = client_of(UNREACHABLE_URL, tmp_path / "ann.db")
    with pytest.raises(ClosedError, match="not open"):
        await ann.put("products", "1", {})
    await ann.close()
    async with ann:
        pass
    with pytest.raises(ClosedError, match="opened only once"):
        await ann.__aenter__()
    await ann.close()


async def test_failing_token_function_is_reported() -> None:
    def token() -> str:
        raise KeyError("none")

    async with client_of(UNREACHABLE_URL, token=token) as ann:
        status = await soon(ann.until_status(lambda status: status.last_error is not None))
        assert "the token function failed: KeyError" in str(status.last_error)
