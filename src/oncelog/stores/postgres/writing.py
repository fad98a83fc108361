"""What happens inside of a write transaction, whoever began it and on whose session: load, decide, save.

The lanes have been locked, in ascending order, and nothing that is remembered from before is believed. Nothing follows
in memory before COMMIT has returned (`confirm`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from oncelog.core.event_ids import event_id_needs
from oncelog.core.footprint import Footprint, footprint
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.quotas import quota_needs
from oncelog.core.tenants import Tenants
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Receipt,
    Record,
    Remembered,
    Request,
    SequenceIdentity,
    Snapshot,
)
from oncelog.errors import LogReplacedError, StoreUnavailableError
from oncelog.stores.about import About
from oncelog.stores.clock import ClockMark
from oncelog.stores.key_hash import hash_of
from oncelog.stores.leaps import leaps_of, text_with
from oncelog.stores.postgres import tables
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.sweeping import Sweep
from oncelog.stores.postgres.timing import DatabaseTime
from oncelog.stores.protocol import Decided, Draw, decide, newly_declared, partitions_text
from oncelog.stores.tenants import tenants_of

_POLICY: Final = msgspec.json.Decoder(Policy)
_LANE: Final = 8
"""In a row of the statement `state`: here the columns of the lane begin."""


def encoded(policy: Policy) -> str:
    """A policy's declaration."""
    return msgspec.json.encode(policy).decode()


class State(msgspec.Struct):
    """What the log says once its lanes are locked."""

    database_ms: int
    erasures: int
    confirmations: int
    clock: tuple[int | None, int | None]
    heads: dict[int, LaneHead]
    tenants: Tenants | None
    """Whom to count for; None for nobody."""
    leaps: tuple[int, ...] = ()
    """The numbers above which the log continued after restores."""


def begin(lanes: Iterable[int]) -> str:
    """Begins a transaction and locks lanes, on one way to the server: all that others did before is seen after it."""
    numbers = ", ".join(str(int(lane)) for lane in sorted(lanes))
    if not numbers:
        return "BEGIN"
    return f"BEGIN; SELECT 1 FROM oncelog_lanes WHERE lane IN ({numbers}) ORDER BY lane FOR NO KEY UPDATE"  # noqa: S608


class Writing:
    """Of one log. Used by one transaction at a time."""

    def __init__(self, about: About, time: DatabaseTime, draw: Draw) -> None:
        self.about = about
        self.time = time
        self._draw = draw
        self._sweep = Sweep()
        self._mark: ClockMark | None = None
        self.next_epoch = ""
        """Epoch that `renew` of this store may have committed."""
        self.renewed_epoch = ""
        """Epoch that another process has set; empty if none is known."""

    def check_epoch(self, epoch: str) -> None:
        """Raise LogReplacedError if another process has renewed the epoch of the log: `oncelog epoch --renew`."""
        if epoch in (self.about.epoch, self.next_epoch):
            return
        self.renewed_epoch = epoch
        self.check_renewed()

    def check_renewed(self) -> None:
        """Raise LogReplacedError if it is known that another process has renewed the epoch."""
        if self.renewed_epoch:
            raise LogReplacedError(
                f"the log has a new epoch, {self.renewed_epoch}, and was opened with {self.about.epoch}: start this "
                "process again"
            )

    def footprint(self, batch: Sequence[Request]) -> Footprint:
        """What a batch needs; its lanes are to be locked."""
        return footprint(batch, self.about.settings)

    async def commit(
        self, connection: Any, batch: Sequence[Request], needs: Footprint, validate: Validate | None
    ) -> Decided:
        """Decides a batch and writes what came of it. The caller ends the transaction, then calls `confirm`."""
        self._mark = None
        state = await self.state(connection, needs.lanes)
        mark, jumped = self.time.proposed(state.database_ms, state.confirmations, state.clock)
        if state.tenants is not None:
            needs.usage, needs.past_members = quota_needs(batch, state.tenants, needs.faults)
            needs.keys |= event_id_needs(batch, state.tenants, needs.faults)
        if state.leaps:
            needs.floors = needs.streams
        snapshot = await self.load(connection, needs, state.heads)
        snapshot.tenants = state.tenants
        decided = decide(batch, snapshot, mark.time_ms, validate, self._draw, needs.faults)
        decided.erasures = state.erasures
        if decided.changes.is_empty:
            return decided
        if jumped is not None and not decided.changes.leap:
            raise jumped
        await self._save(connection, decided)
        decided.evicted_clients = await self._sweep(connection, state.heads, decided.changes)
        if decided.changes.leap:
            await connection.execute(SQL["set_leaps"], text_with(state.leaps, decided.changes.leap))
            await connection.execute(SQL["set_floors"], decided.changes.leap)
        if jumped is not None:
            return decided
        if self.time.is_to_be_kept(mark, state.clock):
            await connection.execute(SQL["save_clock"], mark.boot, mark.elapsed_ms, mark.time_ms)
        self._mark = mark
        return decided

    def confirm(self) -> None:
        """The transaction has been committed: only now does memory follow."""
        if self._mark is not None:
            self.time.remember(self._mark)
            self._mark = None

    async def declare(self, connection: Any, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """Keeps what is new and gives all; raises PolicyError for what contradicts."""
        await connection.execute(SQL["alone"])
        rows = await connection.fetch(SQL["policies"])
        known = {name: _POLICY.decode(declaration) for name, declaration in rows}
        declared = newly_declared(known, policies)
        for name, policy in declared.items():
            await connection.execute(SQL["declare_policy"], name, encoded(policy))
        return known | declared

    async def state(self, connection: Any, lanes: Iterable[int]) -> State:
        """What the log says by now. Raises LogReplacedError if it has another epoch than when it was opened."""
        wanted = sorted(lanes)
        rows = await connection.fetch(SQL["state"], wanted, self.time.boot)
        if len(rows) != len(wanted):
            raise StoreUnavailableError("the log's lanes are not all there; it is not the log that was opened")
        heads = {row[_LANE]: LaneHead(*tuple(row)[_LANE + 1 :]) for row in rows}
        database_ms, erasures, confirmations, elapsed_ms, time_ms, tenants, leaps, epoch = tuple(rows[0])[:_LANE]
        self.check_epoch(epoch)
        clock = (elapsed_ms, time_ms)
        return State(database_ms, erasures, confirmations, clock, heads, tenants_of(tenants), leaps_of(leaps))

    async def load(self, connection: Any, needs: Footprint, heads: Mapping[int, LaneHead]) -> Snapshot:
        """What a decision needs."""
        snapshot = Snapshot(settings=self.about.settings, heads=heads)
        if needs.keys:
            snapshot.keys = await self._keys(connection, needs.keys)
        if needs.sequences:
            snapshot.sequences = await self._sequences(connection, needs.sequences)
        await tables.load(connection, needs, snapshot)
        return snapshot

    async def _keys(self, connection: Any, wanted: set[KeyIdentity]) -> dict[KeyIdentity, Remembered]:
        rows = await connection.fetch(SQL["keys"], [self.hash_of(identity) for identity in wanted])
        keys = {}
        for row in rows:
            _, _, _, _, _, client_sequence, policy, scope, client, key, _, _ = row
            identity = (policy, scope, client if client_sequence else "", key)
            if identity in wanted:
                keys[identity] = _remembered(row)
        return keys

    async def _sequences(self, connection: Any, wanted: set[SequenceIdentity]) -> dict[SequenceIdentity, Remembered]:
        rows = await connection.fetch(SQL["sequences"], [self.hash_of(identity) for identity in wanted])
        sequences = {}
        for row in rows:
            identity = (row[6], row[7], row[8], row[5])
            if identity in wanted:
                sequences[identity] = _remembered(row)
        return sequences

    def hash_of(self, identity: KeyIdentity | SequenceIdentity) -> int:
        """What an identity is found by."""
        return hash_of(self.about.index_secret, identity)

    async def _save(self, connection: Any, decided: Decided) -> None:
        changes = decided.changes
        heads = tables.columns_of(
            [(lane, *msgspec.structs.astuple(head)) for lane, head in sorted(changes.heads.items())]
        )
        records = changes.records
        if records:
            partitions = sorted((one.lane, name, one.position) for one in records for name in one.partitions)
            # Not by COPY, which would be faster: a session that is frozen or cut off inside of one is not idle, so that
            # the server does not end it, and asyncpg waits for ever where it is lost.
            await connection.execute(
                SQL["save"],
                *tables.columns_of([self._columns(*one) for one in zip(records, decided.salts, strict=True)]),
                *(tables.columns_of(partitions) or [()] * 3),
                *tables.columns_of([msgspec.structs.astuple(block) for block in decided.sealed.blocks]),
                *heads,
            )
        else:
            await connection.execute(SQL["save_lanes"], *heads)
        await tables.save(connection, changes, self.about.settings.lanes)

    def _columns(self, record: Record, salt: bytes) -> tuple[Any, ...]:
        number = record.client_sequence
        sequence = (record.policy, record.scope, record.client, number)
        return (
            record.lane,
            record.position,
            record.sequence,
            record.log_time_ms,
            record.height,
            number,
            self.hash_of(record.identity) if record.key else None,
            self.hash_of(sequence) if number else None,
            record.policy,
            record.scope,
            record.client,
            record.key,
            record.fingerprint,
            record.actor,
            partitions_text(record.partitions),
            salt,
            record.body,
        )


def _remembered(row: Sequence[Any]) -> Remembered:
    lane, position, sequence, log_time_ms, height, client_sequence, _, _, _, _, fingerprint, erased = row
    return Remembered(Receipt(lane, position, sequence, log_time_ms, height, client_sequence), fingerprint, erased)
