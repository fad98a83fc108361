"""A write transaction on the writer's session or a borrowed one: load, decide, save.

The caller has locked the lanes in ascending order. The transaction reads everything from the database, and updates
memory only after COMMIT has returned (`confirm`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.tenants import Tenants
from oncelog.core.values import KeyIdentity, LaneHead, Receipt, Record, Remembered, Request, SequenceIdentity, Snapshot
from oncelog.errors import LogReplacedError, StoreUnavailableError
from oncelog.storage.clock import ClockMark
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.metadata import LogMetadata, decode_leaps
from oncelog.storage.postgres import side_state_tables
from oncelog.storage.postgres.database_clock import DatabaseClock
from oncelog.storage.postgres.query_driver import is_storable, run_query
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries import side_state
from oncelog.storage.queries.expiry import ExpirySweep
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.queries.traces import save_traces
from oncelog.storage.queries.writes import complete_read_set, declare_policies, save_leap
from oncelog.storage.record_rows import decode_record
from oncelog.storage.store import BatchResult, BatchTraces, Draw, KeyStatus, plan_batch
from oncelog.storage.tenants import decode_tenants, encode_partitions

_LANE_COLUMN: Final = 8
"""Index of the first lane column in a row of the statement `state`."""


class TransactionState(msgspec.Struct):
    """The state of the log after its lanes have been locked."""

    database_ms: int
    erasures: int
    confirmations: int
    clock: tuple[int | None, int | None]
    heads: dict[int, LaneHead]
    tenants: Tenants | None
    """None for a log without quotas."""
    leaps: tuple[int, ...] = ()
    """Numbers above which numbering resumed after restores."""


def build_begin(lanes: Iterable[int]) -> str:
    """Return the SQL that begins a transaction and locks the lanes, in one round trip.

    The next statement has a newer snapshot, so it sees all commits of earlier lock holders.
    """
    numbers = ", ".join(str(int(lane)) for lane in sorted(lanes))
    if not numbers:
        return "BEGIN"
    return f"BEGIN; SELECT 1 FROM oncelog_lanes WHERE lane IN ({numbers}) ORDER BY lane FOR NO KEY UPDATE"  # noqa: S608


class StoreTransaction:
    """Runs write transactions on one log, one at a time."""

    def __init__(self, metadata: LogMetadata, clock: DatabaseClock, draw: Draw) -> None:
        self.metadata = metadata
        self.clock = clock
        self._draw = draw
        self._expiry_sweep = ExpirySweep()
        self._mark: ClockMark | None = None
        self.next_epoch = ""
        """Epoch that this store's `renew_epoch` may have committed."""
        self.renewed_epoch = ""
        """Epoch that another process has set, or "" if none is known."""

    def check_epoch(self, epoch: str) -> None:
        """Raise LogReplacedError if another process has renewed the log's epoch (`oncelog epoch --renew`)."""
        if epoch in (self.metadata.epoch, self.next_epoch):
            return
        self.renewed_epoch = epoch
        self.check_renewed()

    def check_renewed(self) -> None:
        """Raise LogReplacedError if an earlier check has found a different epoch."""
        if self.renewed_epoch:
            raise LogReplacedError(
                f"the log's epoch is {self.renewed_epoch}, but it was opened with epoch {self.metadata.epoch}: restart "
                "this process"
            )

    def compute_read_set(self, batch: Sequence[Request]) -> ReadSet:
        """Return the read set of a batch. The caller must lock its lanes."""
        return build_read_set(batch, self.metadata.settings)

    async def commit(
        self,
        connection: Any,
        batch: Sequence[Request],
        read_set: ReadSet | None = None,
        validate: Validate | None = None,
        traces: BatchTraces | None = None,
    ) -> BatchResult:
        """Decide a batch and save its changes. The caller ends the transaction, then calls `confirm`."""
        read_set = read_set or self.compute_read_set(batch)
        self._mark = None
        state = await self.load_state(connection, read_set.lanes)
        mark, jumped = self.clock.propose(state.database_ms, state.confirmations, state.clock)
        complete_read_set(read_set, batch, state.tenants, state.leaps)
        snapshot = await self.load_snapshot(connection, read_set, state.heads)
        snapshot.tenants = state.tenants
        result = plan_batch(batch, snapshot, mark.time_ms, validate, self._draw, read_set.faults, jumped)
        result.erasures = state.erasures
        if result.changes.is_empty:
            return result
        await self._save(connection, result)
        self._expiry_sweep.add_commit(result.changes)
        lane = self._expiry_sweep.find_due_lane(state.heads)
        if lane is not None:
            result.evicted_clients = await run_query(connection, self._expiry_sweep.run, state.heads, lane)
        if result.changes.leap:
            await run_query(connection, save_leap, state.leaps, result.changes.leap)
        if jumped is None:
            if self.clock.is_save_due(mark, state.clock):
                await connection.execute(SQL["save_clock"], mark.boot, mark.elapsed_ms, mark.time_ms)
            self._mark = mark
        if traces is not None:
            await run_query(connection, save_traces, result, traces)
        return result

    def confirm(self) -> None:
        """Update memory after the transaction has been committed."""
        if self._mark is not None:
            self.clock.remember(self._mark)
            self._mark = None

    async def load_state(self, connection: Any, lanes: Iterable[int]) -> TransactionState:
        """Load the state of the log. Raises LogReplacedError if the epoch has changed since the log was opened."""
        wanted = sorted(lanes)
        rows = await connection.fetch(SQL["state"], wanted, self.clock.boot)
        if len(rows) != len(wanted):
            raise StoreUnavailableError("lanes of the log are missing; it is not the log that was opened")
        heads = {row[_LANE_COLUMN]: LaneHead(*tuple(row)[_LANE_COLUMN + 1 :]) for row in rows}
        database_ms, erasures, confirmations, elapsed_ms, time_ms, tenants, leaps, epoch = tuple(rows[0])[:_LANE_COLUMN]
        self.check_epoch(epoch)
        clock = (elapsed_ms, time_ms)
        return TransactionState(
            database_ms, erasures, confirmations, clock, heads, decode_tenants(tenants), decode_leaps(leaps)
        )

    async def load_snapshot(self, connection: Any, read_set: ReadSet, heads: Mapping[int, LaneHead]) -> Snapshot:
        """Load the entries that a read set requests."""
        snapshot = Snapshot(settings=self.metadata.settings, heads=heads)
        if read_set.keys:
            snapshot.keys = await self._load_remembered(connection, "keys", read_set.keys)
        if read_set.sequences:
            snapshot.sequences = await self._load_remembered(connection, "sequences", read_set.sequences)
        await run_query(connection, side_state.load_tables, read_set, snapshot)
        return snapshot

    async def _load_remembered(self, connection: Any, statement: str, wanted: set[Any]) -> dict[Any, Remembered]:
        """Load the newest record of each wanted key or client sequence. Other identities may have the same hash."""
        rows = await connection.fetch(SQL[statement], [self.hash_identity(identity) for identity in wanted])
        found = {}
        for lane, position, sequence, log_time_ms, height, number, fingerprint, erased, *identity in rows:
            if tuple(identity) in wanted:
                receipt = Receipt(lane, position, sequence, log_time_ms, height, number)
                found[tuple(identity)] = Remembered(receipt, fingerprint, erased)
        return found

    def hash_identity(self, identity: KeyIdentity | SequenceIdentity) -> int:
        """Return the hash under which an identity's records are indexed."""
        return hash_identity(self.metadata.index_secret, identity)

    async def _save(self, connection: Any, result: BatchResult) -> None:
        changes = result.changes
        heads = side_state_tables.to_columns(
            [(lane, *msgspec.structs.astuple(head)) for lane, head in sorted(changes.heads.items())]
        )
        records = changes.records
        if records:
            partitions = sorted(
                (record.lane, name, record.position) for record in records for name in record.partitions
            )
            # COPY would be faster. However, the server does not treat a session inside COPY as idle, so it would not
            # close one that is frozen or cut off, and asyncpg would wait indefinitely if the session were lost.
            await connection.execute(
                SQL["save"],
                *side_state_tables.to_columns(
                    [self._encode_record(*record) for record in zip(records, result.salts, strict=True)]
                ),
                *(side_state_tables.to_columns(partitions) or [()] * 3),
                *side_state_tables.to_columns([msgspec.structs.astuple(block) for block in result.sealed.blocks]),
                *heads,
            )
        else:
            await connection.execute(SQL["save_lanes"], *heads)
        await side_state_tables.save_tables(connection, changes, self.metadata.settings.lanes)

    def _encode_record(self, record: Record, salt: bytes) -> tuple[Any, ...]:
        number = record.client_sequence
        sequence = (record.policy, record.scope, record.client, number)
        return (
            record.lane,
            record.position,
            record.sequence,
            record.log_time_ms,
            record.height,
            number,
            self.hash_identity(record.identity) if record.key else None,
            self.hash_identity(sequence) if number else None,
            record.policy,
            record.scope,
            record.client,
            record.key,
            record.fingerprint,
            record.actor,
            encode_partitions(record.partitions),
            salt,
            record.body,
        )


def declare_alone(policies: Sequence[Policy]) -> QuerySteps[Mapping[str, Policy]]:
    """Like `declare_policies`, but locks out other processes that declare policies or migrate the log."""
    yield Statement("alone")
    return (yield from declare_policies(policies))


def load_key_status(metadata: LogMetadata, identity: KeyIdentity) -> QuerySteps[KeyStatus]:
    """Like `queries.side_state.load_key_status`. Records of other identities may have the same hash."""
    if not all(map(is_storable, identity[:3])):
        return KeyStatus(None, None, LaneHead())
    rows = yield Statement("standing", hash_identity(metadata.index_secret, identity))
    records = [record for record in map(decode_record, rows) if record.identity == identity]
    return (yield from side_state.load_key_status(identity, records, metadata.settings.lanes))
