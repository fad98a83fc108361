"""Dropping tombstones (DE-13): in any order of deltas and drops, no deleted row is restored and all replicas agree."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.plan_model_rules import row_of
from oncelog.core.deltas import decode_delta, delta
from oncelog.core.hlc import HLC_MAX, format_hlc
from oncelog.core.identity import delta_id
from oncelog.core.merge import Op, Row, RowDelta, merge
from oncelog.core.rules.compaction import HORIZON_CLIENT, build_horizon_delete, list_delete_ids
from oncelog.core.values import (
    Applied,
    Committed,
    DropTombstones,
    Item,
    Reason,
    Refused,
    Replayed,
    Request,
    SetCursor,
    Settings,
    Submission,
    Tombstone,
    Verdict,
)
from oncelog.testing.memory_log import MemoryLog

GATEWAY: Final = "deltas/shop"
START_MS: Final = 1_000_000
ROWS: Final = ("r", "s")
UNCHANGED: Final = Applied(changed=False)


def change(hlc: int, row_id: str = "r", op: Op = Op.UPDATE, client: str = "c", **columns: int) -> RowDelta:
    listed = [{"column": name, "value": value} for name, value in columns.items()]
    identity = delta_id(client, format_hlc(hlc), "t", row_id, listed)
    forms = tuple((name, str(value).encode()) for name, value in columns.items())
    return RowDelta(op, "t", row_id, client, hlc, forms, identity)


def delete(hlc: int, row_id: str = "r", client: str = "c") -> RowDelta:
    return change(hlc, row_id, Op.DELETE, client)


class Gateway:
    """A gateway in memory."""

    def __init__(self) -> None:
        self.log = MemoryLog(Settings(lanes=1))
        self.now_ms = START_MS

    def __call__(self, item: Item) -> Verdict:
        ((verdict,),) = self.log.submit([Request((item,))], self.now_ms)
        return verdict

    def push(self, *deltas: RowDelta) -> list[Verdict]:
        return [self(delta(GATEWAY, one)) for one in deltas]

    @property
    def delivered(self) -> list[RowDelta]:
        """Return the deltas that readers of the stream receive, in order."""
        return [decode_delta(record.body) for record in self.log.records if record.sequence]

    @property
    def newest(self) -> int:
        """Return the sequence of the newest delta. Audit records, such as the record of a drop, have none."""
        return self.log.snapshot.streams.get(GATEWAY, 0)

    @property
    def horizon(self) -> int | None:
        return self.log.snapshot.horizons.get(GATEWAY)

    def row(self, row_id: str = "r") -> Row | None:
        return self.log.snapshot.rows.get((GATEWAY, "t", row_id))

    def values(self, row_id: str = "r") -> dict[str, bytes] | None:
        row = self.row(row_id)
        return row.values if row is not None and row.exists else None

    def tombstones(self) -> tuple[Tombstone, ...]:
        """Return the deleted rows, each with the record of its DELETE."""
        records = {record.key: record for record in self.log.records}
        return tuple(
            Tombstone(table, row_id, row.deleted, record.sequence, record.log_time_ms)
            for (_, table, row_id), row in self.log.snapshot.rows.items()
            if not row.exists and (record := records.get(list_delete_ids(table, row_id, row)[-1])) is not None
        )

    def drop(self, *tombstones: Tombstone, age_ms: int = 0, consumers: Sequence[str] = ()) -> Verdict:
        return self(DropTombstones(GATEWAY, tombstones or self.tombstones(), age_ms, tuple(consumers)))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# --- tombstones that are dropped -----------------------------------------------------------------------


@pytest.mark.rule("DE-13")
def test_tombstone_is_dropped_when_its_delete_reaches_the_minimum_age(gateway: Gateway) -> None:
    gateway.push(change(5, a=1), delete(6), change(7, "s", a=1))
    gateway.now_ms += 99
    assert gateway.drop(age_ms=100) == UNCHANGED
    assert gateway.row() is not None
    gateway.now_ms += 1
    assert gateway.drop(age_ms=100) == Applied(changed=True, count=1)
    assert (gateway.row(), gateway.horizon) == (None, 7)
    assert gateway.values("s") == {"a": b"1"}


@pytest.mark.rule("DE-13")
def test_age_of_a_late_delete_counts_from_its_commit(gateway: Gateway) -> None:
    gateway.push(change(5, "s", a=1))
    gateway.now_ms += 1000
    gateway.push(delete(2))
    assert gateway.drop(age_ms=500) == UNCHANGED


@pytest.mark.rule("DE-13")
def test_tombstone_that_a_consumer_has_not_read_is_kept(gateway: Gateway) -> None:
    gateway.push(delete(5), delete(6, "s"))
    gateway(SetCursor("mail", 1, GATEWAY))
    assert gateway.drop(consumers=["mail", "removed"]) == Applied(changed=True, count=1)
    assert (gateway.row(), gateway.horizon) == (None, 6)
    assert gateway.row("s") is not None
    gateway(SetCursor("mail", None, GATEWAY))
    assert gateway.drop(consumers=["mail"]) == Applied(changed=True, count=1)
    assert (gateway.row("s"), gateway.horizon) == (None, 7)


@pytest.mark.rule("DE-13")
def test_row_that_changed_since_it_was_read_is_not_dropped(gateway: Gateway) -> None:
    gateway.push(delete(5), delete(5, "s"))
    read = gateway.tombstones()
    gateway.push(delete(8), change(9, "s", a=1))
    assert gateway.drop(*read) == UNCHANGED
    assert gateway.horizon is None
    assert gateway.values("s") == {"a": b"1"}


@pytest.mark.rule("DE-13")
def test_horizon_never_decreases(gateway: Gateway) -> None:
    gateway.push(delete(9), delete(5, "s"))
    first, second = sorted(gateway.tombstones(), key=lambda one: one.row_id)
    gateway.drop(first)
    assert gateway.horizon == 10
    gateway.drop(second)
    assert gateway.horizon == 10


@pytest.mark.rule("DE-13")
def test_delete_of_the_last_clock_reading_is_never_dropped(gateway: Gateway) -> None:
    """No horizon can be above that reading."""
    gateway.now_ms = HLC_MAX >> 16
    gateway.push(delete(HLC_MAX), delete(HLC_MAX - 1, "s"))
    assert gateway.drop() == Applied(changed=True, count=1)
    assert gateway.row() is not None
    assert gateway.horizon == HLC_MAX


@pytest.mark.rule("DE-13")
@pytest.mark.parametrize(
    ("item", "field"),
    [
        (DropTombstones("", (), 0, ()), "scope"),
        (DropTombstones(GATEWAY, (), -1, ()), "age_ms"),
        (DropTombstones(GATEWAY, (), True, ()), "age_ms"),
        (DropTombstones(GATEWAY, (), 0, ("a\0",)), "consumers"),
        (DropTombstones(GATEWAY, (Tombstone("t", "r\0", (0, b"", b""), 1, 1),), 0, ()), "tombstones"),
        (DropTombstones(GATEWAY, (Tombstone("t", "r", (0, b"", b""), 1, 1),) * 501, 0, ()), "tombstones"),
    ],
)
def test_malformed_drop_request_is_refused(gateway: Gateway, item: DropTombstones, field: str) -> None:
    verdict = gateway(item)
    assert isinstance(verdict, Refused)
    assert (verdict.reason, verdict.field) == (Reason.MALFORMED, field)


# --- late deltas ----------------------------------------------------------------------------------------


@pytest.mark.rule("DE-13", "CO-18")
def test_validation_gets_the_client_delta_that_loses_to_the_horizon(gateway: Gateway) -> None:
    gateway.push(delete(5))
    gateway.drop()
    late = delta(GATEWAY, change(4, a=1))
    seen: list[bytes] = []

    def refuse(submission: Submission) -> str | None:
        seen.append(submission.body)
        return "a must not be 1" if b'"a"' in submission.body else None

    ((verdict,),) = gateway.log.submit([Request((late,))], gateway.now_ms, refuse)
    assert isinstance(verdict, Refused)
    assert (verdict.reason, verdict.message) == (Reason.INVALID, "a must not be 1")
    assert seen == [late.body]
    assert isinstance(gateway(late), Committed)
    assert gateway.delivered[-1] == build_horizon_delete(6, "t", "r"), "readers get the DELETE, as without validation"


@pytest.mark.rule("DE-13", "DE-7", "DE-4")
def test_older_delta_of_a_dropped_row_loses_and_remains_known(gateway: Gateway) -> None:
    gateway.push(change(5, a=1), delete(6))
    gateway.drop()
    late = change(3, b=2)
    (verdict,) = gateway.push(late)
    assert isinstance(verdict, Committed)
    assert gateway.row() == Row({}, late.stamp, build_horizon_delete(7, "t", "r").stamp)
    assert gateway.delivered[-1] == build_horizon_delete(7, "t", "r")
    assert gateway.delivered[-1].client_id == HORIZON_CLIENT
    (again,) = gateway.push(late)
    assert isinstance(again, Replayed)
    assert len(gateway.delivered) == 3


@pytest.mark.rule("DE-13")
def test_tombstone_of_a_late_delta_is_dropped_again(gateway: Gateway) -> None:
    gateway.push(delete(6))
    gateway.drop()
    gateway.push(change(3, b=2), delete(2, "s"))
    gateway.now_ms += 10
    assert gateway.drop(age_ms=11) == UNCHANGED
    assert gateway.drop(age_ms=10) == Applied(changed=True, count=1)
    assert (gateway.row(), gateway.row("s"), gateway.horizon) == (None, None, 7)


@pytest.mark.rule("DE-13", "DE-7")
def test_newer_delta_restores_a_dropped_row_without_its_older_columns(gateway: Gateway) -> None:
    gateway.push(change(5, a=1), delete(6))
    gateway.drop()
    gateway.push(change(8, b=1))
    gateway.push(change(3, c=1))  # older than the dropped DELETE
    assert gateway.values() == {"b": b"1"}
    assert gateway.delivered[-1] == build_horizon_delete(7, "t", "r")
    gateway.push(change(9, c=2), change(10, b=3))
    assert gateway.values() == {"b": b"3", "c": b"2"}


@pytest.mark.rule("DE-13", "DE-7")
def test_delta_with_the_hlc_of_the_horizon_is_ordered_by_client(gateway: Gateway) -> None:
    gateway.push(delete(6))
    gateway.drop()
    gateway.push(change(7, a=1, client="a"))
    assert gateway.values() is None
    gateway.push(change(7, a=2, client="z"))
    assert gateway.values() == {"a": b"2"}


@pytest.mark.rule("DE-13", "DE-7")
def test_delta_that_loses_to_another_delete_is_delivered_unchanged(gateway: Gateway) -> None:
    deltas = [delete(9), change(8, a=1), change(9, "s", Op.DELETE, HORIZON_CLIENT, a=1), change(8, "s", a=1)]
    gateway.push(*deltas)
    assert gateway.delivered == deltas


@pytest.mark.rule("DE-13")
def test_each_gateway_has_a_separate_horizon(gateway: Gateway) -> None:
    gateway.push(delete(6))
    gateway.drop()
    assert isinstance(gateway(delta("deltas/other", change(3, a=1))), Committed)
    row = gateway.log.snapshot.rows["deltas/other", "t", "r"]
    assert (row.exists, row.values) == (True, {"a": b"1"})


# --- any order of arrival and of drops ------------------------------------------------------------------


class Replica:
    """A reader that starts with a snapshot and merges the deltas delivered after it."""

    def __init__(self, gateway: Gateway) -> None:
        self.rows = {row_id: gateway.row(row_id) or Row() for row_id in ROWS}
        self.cursor = gateway.newest

    def values(self, gateway: Gateway) -> dict[str, dict[str, bytes] | None]:
        for one in gateway.delivered[self.cursor :]:
            self.rows[one.row_id] = merge(self.rows[one.row_id], one)
        return {row_id: row.values if row.exists else None for row_id, row in self.rows.items()}


class Drop(NamedTuple):
    """Drop the tombstones of these rows."""

    rows: tuple[str, ...]


class NewReplica(NamedTuple):
    """A new reader takes a snapshot."""


CHANGES: Final = st.builds(
    change,
    st.integers(1, 12),
    st.sampled_from(ROWS),
    st.sampled_from([Op.INSERT, Op.UPDATE]),
    st.sampled_from(["a", "z"]),
    a=st.integers(1, 2),
) | st.builds(change, st.integers(1, 12), st.sampled_from(ROWS), client=st.sampled_from(["a", "z"]), b=st.just(1))
DELETES: Final = st.builds(delete, st.integers(1, 12), st.sampled_from(ROWS), st.sampled_from(["a", "z"]))
DROPS: Final = st.builds(Drop, st.sampled_from([("r",), ("s",), ROWS]))
STEPS: Final = st.lists(CHANGES | DELETES | DELETES | DROPS | DROPS | st.builds(NewReplica), max_size=30)


@pytest.mark.rule("DE-13", "DE-7")
@given(STEPS)
@example(  # the snapshot is taken after an audit record and before a delta
    [
        delete(1, client="a"),
        Drop(("r",)),
        change(1, op=Op.INSERT, client="a", a=1),
        change(1, op=Op.INSERT, client="a", a=1),
        NewReplica(),
        change(2, client="z", b=1),
    ]
)
def test_all_replicas_agree_and_no_row_is_restored(steps: Sequence[RowDelta | Drop | NewReplica]) -> None:
    gateway = Gateway()
    replicas = [Replica(gateway)]
    pushed: dict[bytes, RowDelta] = {}
    for step in steps:
        if isinstance(step, RowDelta):
            gateway.push(step)
            pushed.setdefault(step.delta_id, step)
        elif isinstance(step, Drop):
            tombstones = [one for one in gateway.tombstones() if one.row_id in step.rows]
            if tombstones:
                gateway.drop(*tombstones)
        else:
            replicas.append(Replica(gateway))
    values = {row_id: gateway.values(row_id) for row_id in ROWS}
    assert [replica.values(gateway) for replica in replicas] == [values] * len(replicas)
    replaced = {one.row_id for one in gateway.delivered if one.client_id == HORIZON_CLIENT}
    for row_id in ROWS:
        without_drops = row_of([one for one in pushed.values() if one.row_id == row_id])
        if row_id not in replaced:
            assert values[row_id] == without_drops
        # Only deltas that lost to the horizon are missing. In particular, no deleted row exists.
        found = values[row_id]
        assert found is None or (without_drops is not None and found.items() <= without_drops.items())
