"""A deltas client without tasks or sockets: its store, its protocol, and a network that the test advances stepwise."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from client.deltas.model_gateway import ModelGateway, Refusal
from oncelog.client.deltas.codec import (
    DeltaPage,
    GatewayRefusedError,
    OutboxEntry,
    PushReply,
    SnapshotPage,
    decode_delta_page,
    decode_deltas,
    decode_error,
    decode_live,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.protocol import (
    PullEffect,
    PullProtocol,
    PullRequest,
    PushProtocol,
    ReadSnapshot,
    ResetRows,
    StageRows,
)
from oncelog.client.deltas.store import DeltasStore
from oncelog.client.deltas.values import DeltasLimits
from oncelog.client.runtime.backoff import RetryPause
from oncelog.core.canonical import parse
from oncelog.core.deltas import decode_delta, encode_push
from oncelog.core.merge import RowDelta, merge
from oncelog.errors import LostError

LOST = LostError("lost")
GATEWAY = "shop"
ALL = 10**9


class Replica:
    def __init__(self, name: str, gateway: ModelGateway, chance: Random, path: Path | None, ahead_ms: int) -> None:
        self.name = name
        self.gateway = gateway
        self.chance = chance
        self.path = path
        self.ahead_ms = ahead_ms
        self.limits = DeltasLimits(
            push_deltas_max=chance.choice((1, 2, 5, 100)),
            push_bytes_max=chance.choice((300, 1000, 10**6)),
            page_deltas=chance.choice((1, 2, 7, 100)),
            page_rows=chance.choice((1, 2, 100)),
        )
        self.seen: Counter[str] = Counter()
        self.made: dict[str, RowDelta] = {}
        self.discarded: set[str] = set()
        self.store = self._open_store()
        self._begin()

    def _open_store(self) -> DeltasStore:
        store = DeltasStore(":memory:" if self.path is None else str(self.path), self.limits)
        store.open(self.name, GATEWAY)
        return store

    def _begin(self) -> None:
        self.pushing = PushProtocol(self.limits.push_deltas_max)
        self.pulling = PullProtocol(self.store.sync_state.cursor, self.store.sync_state.epoch)
        self.pushed: tuple[list[OutboxEntry], bytes] | None = None
        self.push_answer: PushReply | GatewayRefusedError | LostError | None = None
        self.pull_request: PullRequest | None = None
        self.pull_answer: Any = None

    def crash(self) -> None:
        """Crash between two transactions. Requests in flight still reach the gateway."""
        if self.path is not None:
            self.store.close()
            self.store = self._open_store()
        else:
            connection = self.store._file.connection
            connection.execute("DELETE FROM temp.staged")
        self._begin()

    # --- edits

    def edit(self, table: str, row_id: str, columns: dict[str, Any] | None) -> None:
        now_ms = self.gateway.now_ms + self.ahead_ms
        if columns is None:
            made, changes = self.store.transact(lambda edits: edits.delete(table, row_id), now_ms)
        else:
            made, changes = self.store.transact(lambda edits: edits.put(table, row_id, columns), now_ms)
        assert len(changes) == (made is not None)
        if made is not None:
            self.made[made] = decode_delta(self.store.list_pending(None, ALL, ALL)[-1].body)

    def discard(self) -> None:
        """Discard the refused delta, as an application would."""
        refusal = self.pushing.refusal
        if refusal is not None:
            self.store.discard([bytes.fromhex(refusal.delta_id)])
            self.discarded.add(refusal.delta_id)
            self.pushing.on_discarded()
            self.pushed = self.push_answer = None  # the client also ignores an earlier answer

    # --- push

    def send(self) -> bytes | None:
        """Send the next push. The test may deliver copies of it at any time."""
        if self.pushed is None:
            held, deltas_max = self.pushing.held, self.pushing.deltas_max
            before = None if held is None else held.number
            batch = self.store.list_pending(before, deltas_max, self.limits.push_bytes_max)
            if not batch:
                self.pushing.release()
                return None
            self.pushed = (batch, encode_push([one.body for one in batch]))
        return self.pushed[1]

    def deliver(self, *, is_lost: bool, is_answer_lost: bool) -> None:
        if self.pushed is None or self.push_answer is not None:
            return
        if is_lost:
            self.push_answer = LOST
            return
        batch, body = self.pushed
        answer = self._exchange(lambda: self.gateway.push(body), lambda answer: decode_push_reply(answer, batch))
        self.push_answer = LOST if is_answer_lost else answer

    def receive_push_reply(self) -> None:
        if self.pushed is None or self.push_answer is None:
            return
        (batch, _), answer = self.pushed, self.push_answer
        self.pushed = self.push_answer = None
        if isinstance(answer, PushReply):
            if not self.store.acknowledge(batch[-1].number, answer):
                answer = LostError("acknowledged in another history")
            self.pulling.on_acknowledged(self.store.sync_state.epoch)
        self.seen[answer.code if isinstance(answer, GatewayRefusedError) else type(answer).__name__] += 1
        if self.pushing.handle_answer(batch, answer) is not None:
            self.pushing.release()

    # --- pull

    def send_pull(self, *, is_lost: bool) -> None:
        if self.pull_request is not None:
            return
        request = self.pulling.next_request(is_reset_wanted=self.store.sync_state.is_reset_wanted)
        self.pull_request = request
        gateway, limits = self.gateway, self.limits
        if is_lost:
            self.pull_answer = LOST
        elif isinstance(request, ReadSnapshot):
            self.pull_answer = self._exchange(
                lambda: gateway.snapshot(request.page, limits.page_rows), decode_snapshot_page
            )
        elif request.is_live:
            self.pull_answer = self._exchange(
                lambda: gateway.live(request.since, request.epoch, 3),
                lambda answer: decode_deltas(decode_live(answer.decode(), request.epoch)),
            )
        else:
            self.pull_answer = self._exchange(
                lambda: gateway.pull(request.since, request.epoch, limits.page_deltas), decode_delta_page
            )

    def receive_page(self) -> None:
        if self.pull_request is None:
            return
        request, answer, self.pull_request, self.pull_answer = self.pull_request, self.pull_answer, None, None
        effect = self.pulling.handle_answer(request, answer)
        self.seen[type(effect).__name__] += 1
        if not isinstance(effect, RetryPause):
            self._apply(effect)
            self._check_own_edits()

    def _apply(self, effect: PullEffect) -> None:
        store = self.store
        match effect:
            case DeltaPage():
                store.apply(effect.deltas, effect.cursor, effect.epoch)
            case SnapshotPage():
                store.join(effect.rows, None if effect.next else effect.cursor, effect.epoch)
            case StageRows(page, is_first):
                store.stage(page.rows, is_first, page.horizon)
                if not page.next:
                    store.replace(page.cursor, page.epoch, 10, page.horizon)
            case ResetRows():
                store.request_reset()
        self.pulling.confirm(effect)

    def _check_own_edits(self) -> None:
        """Check that only a new history, the application or a higher horizon has undone edits of this replica."""
        if self.store.sync_state.epoch != self.gateway.epoch:
            return
        connection = self.store._file.connection
        horizon = -1 if self.gateway.horizon is None else self.gateway.horizon
        for name, delta in self.made.items():
            if name not in self.discarded and name not in self.gateway.lost and delta.hlc > horizon:
                row = self.store._load_state(connection, delta.table, delta.row_id)
                assert merge(row, delta) is row, f"{self.name} has lost its own {delta}"

    def _exchange(self, call: Callable[[], bytes], read: Callable[[bytes], Any]) -> Any:
        try:
            return read(call())
        except Refusal as refusal:
            return decode_error(refusal.status, refusal.body, 0)
        except GatewayRefusedError as error:
            return error

    # --- state

    @property
    def is_settled(self) -> bool:
        pulling, sync_state = self.pulling, self.store.sync_state
        has_all_deltas = pulling.is_caught_up and pulling.cursor == len(self.gateway.log)
        is_same_epoch = pulling.epoch == self.gateway.epoch
        return not sync_state.pending and not sync_state.is_reset_wanted and has_all_deltas and is_same_epoch

    def settle(self) -> None:
        """Run without faults until the replica is idle."""
        for _ in range(1000):
            if self.is_settled:
                return
            if self.pushing.refusal is not None:
                self.discard()
            self.send()
            self.deliver(is_lost=False, is_answer_lost=False)
            self.receive_push_reply()
            self.send_pull(is_lost=False)
            self.receive_page()
        raise AssertionError(f"{self.name} does not become idle: {self.store.sync_state}")

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        found = {}
        for table in ("notes", "things"):
            for row in self.store.list_rows(table, "", 10_000):
                assert self.store.load_row(table, row.row_id) == row.columns
                found[table, row.row_id] = row.columns
        return found

    def states(self) -> dict[tuple[str, str], Any]:
        """Return the merge state of all rows, including deleted ones."""
        select = "SELECT table_name, row_id FROM row_states"
        names = self.store._file.connection.execute(select).fetchall()
        shown = {}
        for table, row_id in names:
            row = self.store._load_state(self.store._file.connection, table, row_id)
            columns = {name: (parse(value), stamp) for name, (value, stamp) in row.columns.items()}
            shown[table, row_id] = (columns, row.written, row.deleted)
        return shown
