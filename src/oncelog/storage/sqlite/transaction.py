"""A write transaction on the writer's connection or a borrowed one: load, decide, save.

The transaction uses cached state only after it has taken the write lock and seen other processes' changes
(`load_state`, `get_current_index`). It updates the caches only after COMMIT has returned (`confirm`).
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from oncelog.core.latency import Cause
from oncelog.core.plan import Validate
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.tenants import Tenants
from oncelog.core.values import (
    POSITION_BITS,
    KeyIdentity,
    LaneHead,
    Receipt,
    Record,
    Remembered,
    Request,
    SequenceIdentity,
    Snapshot,
    decode_place,
)
from oncelog.storage.clock import JUMP_MS_MAX, Clock, ClockMark
from oncelog.storage.metadata import LogMetadata, decode_leaps
from oncelog.storage.pauses import PauseLog
from oncelog.storage.queries import side_state
from oncelog.storage.queries.expiry import EXPIRY_INTERVAL_COMMITS, ExpirySweep
from oncelog.storage.queries.records import find_record
from oncelog.storage.queries.traces import save_traces
from oncelog.storage.queries.writes import complete_read_set, save_leap
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.sqlite import side_state_tables
from oncelog.storage.sqlite.key_index.filters import load_filters
from oncelog.storage.sqlite.key_index.index import SEAL_KEYS, KeyIndex, LaneIndexState
from oncelog.storage.sqlite.moved_marker import build_moved_error, decode_marker
from oncelog.storage.sqlite.query_driver import run_query, run_steps
from oncelog.storage.sqlite.row_cache import CACHED_TABLES, RowCache
from oncelog.storage.sqlite.statements import SQL, BulkInsert
from oncelog.storage.store import BatchResult, BatchTraces, Draw, KeyStatus, plan_batch
from oncelog.storage.tenants import decode_tenants, encode_partitions

ERASURE_BYTES: Final = 20
"""Maximum growth of a row when a hash replaces its salt and body. Shorter bodies are padded, so that rows never
move."""
IMMEDIATE_FILL_KEYS_MAX: Final = 100_000

_RECORD_COLUMNS: Final = (
    "place",
    "sequence",
    "log_time_ms",
    "height",
    "client_sequence",
    "policy",
    "scope",
    "client",
    "key",
    "fingerprint",
    "actor",
    "partitions",
    "salt",
    "body",
)
_insert_records: Final = BulkInsert("oncelog_records", _RECORD_COLUMNS)
_insert_padded_records: Final = BulkInsert("oncelog_records", (*_RECORD_COLUMNS, "padding"))
_insert_partitions: Final = BulkInsert("oncelog_partition_records", ("lane", "partition", "position"))
_insert_streams: Final = BulkInsert("oncelog_stream_records", ("lane", "scope", "sequence", "position"))


class TransactionState(msgspec.Struct):
    """State of the log right after the transaction has taken the write lock."""

    commits: int
    erasures: int
    clock: ClockMark
    heads: dict[int, LaneHead]
    lanes: dict[int, LaneIndexState]
    tenants: Tenants | None
    """Tenants whose usage is counted, or None for a log without quotas."""
    moved: str | None
    """Marker of a log that has moved (`moved_marker.py`), otherwise None."""
    leaps: tuple[int, ...] = ()
    """Numbers above which numbering resumed after restores."""


class TransactionOptions(NamedTuple):
    """How a process commits to a log."""

    clock: Clock
    draw: Draw = os.urandom
    jump_ms_max: int = JUMP_MS_MAX
    seal_keys: int = SEAL_KEYS
    fills_later: bool = True
    """Whether the caller fills a large key index's filter while commits continue. If not, a large index has no
    filter."""
    pauses: PauseLog | None = None
    """Records how long the work on the key index delays commits."""


class StoreTransaction:
    """Runs transactions on one log, one at a time. Threads that share this object must hold a lock."""

    def __init__(self, metadata: LogMetadata, options: TransactionOptions) -> None:
        self.metadata = metadata
        self.options = options
        self.index: KeyIndex | None = None
        """Index as of the newest transaction, or None before the first one."""
        self._expiry_sweep = ExpirySweep()
        self._row_cache = RowCache()

    def commit(
        self,
        connection: Any,
        batch: Sequence[Request],
        validate: Validate | None = None,
        current_state: TransactionState | None = None,
        traces: BatchTraces | None = None,
    ) -> BatchResult:
        """Decide a batch and save its changes. The caller ends the transaction, then calls `confirm`.

        The caller passes this transaction's `current_state` (`load_state_if_current`) unless other threads need the
        GIL (see `save_tables`). If the method or the transaction fails, the caller calls `roll_back`.
        """
        self.roll_back()
        state = current_state or self.load_state(connection)
        if state.moved is not None:
            raise build_moved_error(connection, decode_marker(state.moved))
        index = self.get_current_index(connection, state)
        mark, jumped = self.propose_clock(state.clock)
        needs = build_read_set(batch, self.metadata.settings)
        complete_read_set(needs, batch, state.tenants, state.leaps)
        self._row_cache.begin(state.commits, state.heads)
        snapshot, hashes = self.load_identities(connection, index, needs, state)
        loaded_keys = self._load_tables(connection, needs, snapshot)
        result = plan_batch(batch, snapshot, mark.time_ms, validate, self.options.draw, needs.faults, jumped)
        result.erasures = state.erasures
        if result.changes.is_empty:
            self._row_cache.stage(loaded_keys, snapshot)
            return result
        self._save(connection, result, None if current_state is None else snapshot)
        self._expiry_sweep.add_commit(result.changes)
        if state.commits % EXPIRY_INTERVAL_COMMITS == 0:
            result.evicted_clients = run_query(connection, self._expiry_sweep.run, state.heads)
        positions = {lane: head.position for lane, head in {**state.heads, **result.changes.heads}.items()}
        index.stage(_list_added_keys(result, hashes), positions)
        self._measure_merge(index.maintain, connection)
        if result.changes.leap:
            run_query(connection, save_leap, state.leaps, result.changes.leap)
        if jumped is None:
            connection.execute(SQL["save_state"], (mark.boot, mark.elapsed_ms, mark.time_ms))
        else:
            connection.execute(SQL["touch_state"])
        self._row_cache.stage(loaded_keys, snapshot, result.changes)
        if traces is not None:
            run_query(connection, save_traces, result, traces)
        return result

    def confirm(self) -> None:
        """Update the caches after COMMIT."""
        if self.index is not None:
            self._measure_merge(self.index.confirm)
        self._row_cache.confirm()

    def _measure_merge(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do work on the key index, and record it as a pause if pauses are recorded."""
        pauses = self.options.pauses
        if pauses is None or not pauses.is_on:
            work(*arguments)
            return
        with pauses.measure(Cause.MERGE):
            work(*arguments)

    def roll_back(self) -> None:
        """Discard staged changes. The index is discarded with them."""
        if self.index is not None and self.index.is_staged:
            self.index = None
        self._row_cache.roll_back()

    def reset(self) -> None:
        """Discard all cached state. The next transaction loads it again."""
        self.index = None
        self._row_cache.clear()

    def propose_clock(self, newest: ClockMark) -> tuple[ClockMark, Exception | None]:
        """Return the time for a commit after the newest one, and an error if the clock prevents new writes."""
        return newest.propose(ClockMark.read(self.options.clock), self.options.jump_ms_max)

    def load_state(self, connection: Any) -> TransactionState:
        """Return the current state of the log."""
        commits, erasures, *clock, tenants, moved, leaps = connection.execute(SQL["state_and_move"]).fetchone()
        rows = connection.execute(SQL["lanes"]).fetchall()
        heads = {row[0]: LaneHead(*row[1:8]) for row in rows}
        lanes = {row[0]: LaneIndexState(row[1], row[8], row[9]) for row in rows}
        tenants = decode_tenants(tenants)
        return TransactionState(commits, erasures, ClockMark(*clock), heads, lanes, tenants, moved, decode_leaps(leaps))

    def get_current_index(self, connection: Any, state: TransactionState) -> KeyIndex:
        """Return the key index, brought up to date with the commits of all processes."""
        if self.index is not None and state.commits < self.index.commits:
            self.reset()  # another file has replaced this one
        if self.index is None:
            index = KeyIndex(self.metadata.index_secret, self.options.seal_keys)
            index.catch_up(connection, state.commits, state.lanes)
            if index.segment_keys <= IMMEDIATE_FILL_KEYS_MAX:
                index.set_filters(load_filters(connection, index.segment_keys))
            elif not self.options.fills_later:
                index.awaits_filter = False
            self.index = index
        else:
            self.index.catch_up(connection, state.commits, state.lanes)
        return self.index

    def load_state_if_current(self, connection: Any) -> TransactionState | None:
        """Return the state of the log, or None if other processes have written much since the last transaction."""
        index = self.index
        if index is None:
            return None
        state = self.load_state(connection)
        is_soon = state.commits == index.commits or (
            state.commits > index.commits and index.is_nearly_current(state.lanes)
        )
        return state if is_soon else None

    def _load_tables(self, connection: Any, read_set: ReadSet, snapshot: Snapshot) -> dict[str, list[Any]]:
        """Load side state, taking cached rows from memory.

        Returns the keys of cached tables that were not in the cache.
        """
        loaded: dict[str, list[Any]] = {}

        def load_rows(connection: Any, table: SideStateTable, keys: Collection[Any], lanes: int) -> dict[Any, Any]:
            if table.name not in CACHED_TABLES:
                return side_state_tables.load_table(connection, table, keys, lanes)
            known, missing = self._row_cache.find_rows(table.name, keys)
            loaded[table.name] = missing
            return known | side_state_tables.load_table(connection, table, missing, lanes) if missing else known

        run_steps(connection, side_state.load_tables(read_set, snapshot), load_rows)
        return loaded

    def load_identities(
        self, connection: Any, index: KeyIndex, read_set: ReadSet, state: TransactionState
    ) -> tuple[Snapshot, dict[KeyIdentity | SequenceIdentity, int]]:
        """Return a snapshot of everything stored under the keys and sequences of a read set, and their hashes."""
        snapshot = Snapshot(settings=self.metadata.settings, heads=state.heads, tenants=state.tenants)
        hashes = index.hash_identities(chain(read_set.keys, read_set.sequences))
        found = index.find_places(connection, hashes.values())
        if found:
            places = set(chain.from_iterable(found.values()))
            snapshot.keys, snapshot.sequences = load_remembered(connection, places, read_set)
        return snapshot, hashes

    def _save(self, connection: Any, result: BatchResult, stored: Snapshot | None) -> None:
        changes = result.changes
        _save_records(connection, changes.records, result.salts)
        blocks = [msgspec.structs.astuple(block) for block in result.sealed.blocks]
        connection.executemany(SQL["save_block"], blocks)
        heads = [(lane, *msgspec.structs.astuple(head)) for lane, head in changes.heads.items()]
        connection.executemany(SQL["save_lane"], heads)
        side_state_tables.save_tables(connection, changes, self.metadata.settings.lanes, stored)


def _save_records(connection: Any, records: Sequence[Record], salts: Sequence[bytes]) -> None:
    if records and min([len(record.body) for record in records]) < ERASURE_BYTES:
        _insert_padded_records(connection, map(_encode_padded_record, records, salts), len(records))
    else:
        _insert_records(connection, map(_encode_record, records, salts), len(records))
    # Insert in table order, page by page. Positions are in order already, and two stable sorts by one column take half
    # as long as one sort that compares rows.
    partitions = [(record.lane, name, record.position) for record in records for name in record.partitions]
    partitions.sort(key=itemgetter(1))
    partitions.sort(key=itemgetter(0))
    _insert_partitions(connection, partitions, len(partitions))
    streams = [(record.lane, record.scope, record.sequence, record.position) for record in records if record.sequence]
    streams.sort(key=itemgetter(1))
    streams.sort(key=itemgetter(0))
    _insert_streams(connection, streams, len(streams))


def _encode_record(record: Record, salt: bytes) -> tuple[Any, ...]:
    # sqlite3 looks for an adapter for every value that is not a number, a str or a bytearray. The search takes three
    # times as long as a copy into a bytearray.
    return (
        record.lane << POSITION_BITS | record.position,
        record.sequence,
        record.log_time_ms,
        record.height,
        record.client_sequence,
        record.policy,
        record.scope,
        record.client,
        bytearray(record.key),
        bytearray(record.fingerprint),
        record.actor,
        encode_partitions(record.partitions),
        bytearray(salt),
        bytearray(record.body),
    )


def _encode_padded_record(record: Record, salt: bytes) -> tuple[Any, ...]:
    padding = ERASURE_BYTES - len(record.body)
    return (*_encode_record(record, salt), bytes(padding) if padding > 0 else None)


def load_remembered(
    connection: Any, places: Iterable[int], read_set: ReadSet
) -> tuple[dict[KeyIdentity, Remembered], dict[SequenceIdentity, Remembered]]:
    """Return the stored answers for a read set's keys and sequences, from the records at the given places.

    The newest record wins.
    """
    keys: dict[KeyIdentity, Remembered] = {}
    sequences: dict[SequenceIdentity, Remembered] = {}
    parameters = (orjson.dumps(sorted(places)).decode(),)
    for row in connection.execute(SQL["remembered"], parameters).fetchall():
        place, sequence, log_time_ms, height, client_sequence, policy, scope, client, key, fingerprint, erased = row
        receipt = Receipt(*decode_place(place), sequence, log_time_ms, height, client_sequence)
        remembered = Remembered(receipt, fingerprint, bool(erased))
        identity = (policy, scope, client if client_sequence else "", key)
        if identity in read_set.keys:
            keys[identity] = remembered
        if (policy, scope, client, client_sequence) in read_set.sequences:
            sequences[policy, scope, client, client_sequence] = remembered
    return keys, sequences


def load_key_status(connection: Any, index: KeyIndex, identity: KeyIdentity, lanes: int) -> KeyStatus:
    """Like `queries.side_state.load_key_status`. The candidate places come from the index, which must be current."""
    hashes = index.hash_identities([identity])
    places = index.find_places(connection, hashes.values()).get(hashes[identity], [])
    found = [run_query(connection, find_record, *decode_place(place)) for place in sorted(set(places))]
    records = [record for record in found if record is not None and record.identity == identity]
    return run_query(connection, side_state.load_key_status, identity, records, lanes)


def _list_added_keys(
    result: BatchResult, hashes: Mapping[KeyIdentity | SequenceIdentity, int]
) -> list[tuple[int, int]]:
    """Return the hashes and places of new records. The hashes are those computed for the lookup."""
    changes = result.changes
    added: Iterable[tuple[KeyIdentity | SequenceIdentity, Remembered]] = chain(
        changes.keys.items(), changes.sequences.items()
    )
    return [
        (hashes[identity], remembered.receipt.lane << POSITION_BITS | remembered.receipt.position)
        for identity, remembered in added
    ]
