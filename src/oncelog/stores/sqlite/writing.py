"""What happens inside of a write transaction, whoever began it and on whose connection: load, decide, save.

Nothing that is remembered here is believed before the transaction has taken the write lock and what others have written
since has been seen (`state`, `caught_up`); and nothing follows in memory before COMMIT has returned (`confirm`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final

import msgspec
import orjson

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
from oncelog.stores.about import About
from oncelog.stores.clock import Clock, ClockMark
from oncelog.stores.leaps import leaps_of, text_with
from oncelog.stores.protocol import Decided, Draw, decide, newly_declared, partitions_text
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.filters import read_filters
from oncelog.stores.sqlite.index import POSITION_BITS, SEAL_KEYS, KeyIndex, Lane, lane_and_position
from oncelog.stores.sqlite.moved import demand_not_moved, moved_error
from oncelog.stores.sqlite.recent import Recent
from oncelog.stores.sqlite.statements import SQL, Insert
from oncelog.stores.sqlite.sweeping import Sweep
from oncelog.stores.tenants import tenants_of

ERASURE_BYTES: Final = 20
"""By so much a row grows, at most, when a hash takes the place of salt and body: shorter bodies are padded."""
FILL_AT_ONCE_KEYS: Final = 100_000
_POLICY: Final = msgspec.json.Decoder(Policy)

_RECORD: Final = (
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
_insert_records: Final = Insert("oncelog_records", _RECORD)
_insert_padded_records: Final = Insert("oncelog_records", (*_RECORD, "padding"))
_insert_partitions: Final = Insert("oncelog_partition_records", ("lane", "partition", "position"))
_insert_streams: Final = Insert("oncelog_stream_records", ("lane", "scope", "sequence", "position"))


class State(msgspec.Struct):
    """What the log says right after the lock was taken."""

    commits: int
    erasures: int
    clock: ClockMark
    heads: dict[int, LaneHead]
    lanes: dict[int, Lane]
    tenants: Tenants | None
    """Whom to count for; None for nobody."""
    moved: str | None
    """Where the log is written to in place of here (moved.py)."""
    leaps: tuple[int, ...] = ()
    """The numbers above which the log continued after restores."""


class Writing:
    """Of one log. Used by one transaction at a time; whoever shares it between threads has a lock for that."""

    def __init__(
        self,
        file: About,
        clock: Clock,
        draw: Draw,
        jump_ms_max: int,
        seal_keys: int = SEAL_KEYS,
        *,
        fills_later: bool = True,
    ) -> None:
        self.file = file
        self.index: KeyIndex | None = None
        """As of the newest transaction; None until the first one."""
        self._clock = clock
        self._draw = draw
        self._jump_ms_max = jump_ms_max
        self.seal_keys = seal_keys
        self._fills_later = fills_later
        """Who has it fills the filter of a large index beside the commits."""
        self._sweep = Sweep()
        self._recent = Recent()

    def commit(
        self, connection: Any, batch: Sequence[Request], validate: Validate | None, seen: State | None = None
    ) -> Decided:
        """Decides a batch and writes what came of it. The caller ends the transaction, then calls `confirm`.

        With what was `seen` in this transaction (`soon_caught_up`) the caller says that no other thread wants the
        interpreter for long (`tables.save`). If it raises, or the transaction comes to nothing, the caller calls
        `roll_back`.
        """
        self.roll_back()
        state = seen or self.state(connection)
        if state.moved is not None:
            raise moved_error(connection, state.moved)
        index = self.caught_up(connection, state)
        mark, jumped = self.proposed(state)
        needs = footprint(batch, self.file.settings)
        if state.tenants is not None:
            needs.usage, needs.past_members = quota_needs(batch, state.tenants, needs.faults)
            needs.keys |= event_id_needs(batch, state.tenants, needs.faults)
        if state.leaps:
            needs.floors = needs.streams
        self._recent.begin(state.commits, state.heads)
        snapshot, hashes = self._load_identities(connection, index, needs, state)
        asked = tables.load(connection, needs, snapshot, self._recent)
        decided = decide(batch, snapshot, mark.time_ms, validate, self._draw, needs.faults)
        decided.erasures = state.erasures
        if decided.changes.is_empty:
            self._recent.stage(asked, snapshot)
            return decided
        if jumped is not None and not decided.changes.leap:
            raise jumped
        self._save(connection, decided, None if seen is None else snapshot)
        decided.evicted_clients = self._sweep(connection, state.commits, state.heads, decided.changes)
        index.stage(_added(decided, hashes), _positions(state.heads, decided))
        index.maintain(connection)
        if decided.changes.leap:
            connection.execute(SQL["set_leaps"], (text_with(state.leaps, decided.changes.leap),))
            connection.execute(SQL["set_floors"], (decided.changes.leap,))
        if jumped is None:
            connection.execute(SQL["save_state"], (mark.boot, mark.elapsed_ms, mark.time_ms))
        else:
            connection.execute(SQL["touch_state"])
        self._recent.stage(asked, snapshot, decided.changes)
        return decided

    def confirm(self) -> None:
        """The transaction has been committed: only now does memory follow."""
        if self.index is not None:
            self.index.confirm()
        self._recent.confirm()

    def roll_back(self) -> None:
        """The transaction came to nothing. What had been prepared for its end is thrown away with the index."""
        if self.index is not None and self.index.is_staged:
            self.index = None
        self._recent.roll_back()

    def forget(self) -> None:
        """Nothing that is remembered is believed any more: the next transaction finds it out anew."""
        self.index = None
        self._recent.forget()

    def declare(self, connection: Any, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """Keeps what is new and gives all; raises PolicyError for what contradicts."""
        demand_not_moved(connection)
        rows = connection.execute(SQL["policies"]).fetchall()
        known = {name: _POLICY.decode(declaration) for name, declaration in rows}
        declared = newly_declared(known, policies)
        declarations = [(name, msgspec.json.encode(policy).decode()) for name, policy in declared.items()]
        connection.executemany(SQL["declare_policy"], declarations)
        return known | declared

    def proposed(self, state: State) -> tuple[ClockMark, Exception | None]:
        """The time of this transaction, and what stands in the way of new writes at it."""
        return state.clock.proposed(self._clock, self._jump_ms_max)

    def state(self, connection: Any) -> State:
        """What the log says by now."""
        commits, erasures, *clock, tenants, moved, leaps = connection.execute(SQL["state_and_move"]).fetchone()
        rows = connection.execute(SQL["lanes"]).fetchall()
        heads = {row[0]: LaneHead(*row[1:8]) for row in rows}
        lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in rows}
        tenants = tenants_of(tenants)
        return State(commits, erasures, ClockMark(*clock), heads, lanes, tenants, moved, leaps_of(leaps))

    def caught_up(self, connection: Any, state: State) -> KeyIndex:
        """The key index, with all that others have committed."""
        if self.index is not None and state.commits < self.index.commits:
            self.forget()  # another file has been put in the place of this one
        if self.index is None:
            index = KeyIndex(self.file.index_secret, self.seal_keys)
            index.catch_up(connection, state.commits, state.lanes)
            if index.sealed_keys <= FILL_AT_ONCE_KEYS:
                index.use_filters(read_filters(connection, index.sealed_keys))
            elif not self._fills_later:
                index.do_without_filter()
            self.index = index
        else:
            self.index.catch_up(connection, state.commits, state.lanes)
        return self.index

    def soon_caught_up(self, connection: Any) -> State | None:
        """What the log says, if little has been written by others since this one has looked; else None."""
        index = self.index
        if index is None:
            return None
        state = self.state(connection)
        is_soon = state.commits == index.commits or (
            state.commits > index.commits and index.is_soon_caught_up(state.lanes)
        )
        return state if is_soon else None

    def load(
        self, connection: Any, index: KeyIndex, needs: Footprint, state: State
    ) -> tuple[Snapshot, dict[KeyIdentity | SequenceIdentity, int]]:
        """What a decision needs, all of it from the file, and the hashes by which it was looked for."""
        snapshot, hashes = self._load_identities(connection, index, needs, state)
        tables.load(connection, needs, snapshot)
        return snapshot, hashes

    def _load_identities(
        self, connection: Any, index: KeyIndex, needs: Footprint, state: State
    ) -> tuple[Snapshot, dict[KeyIdentity | SequenceIdentity, int]]:
        snapshot = Snapshot(settings=self.file.settings, heads=state.heads, tenants=state.tenants)
        hashes = index.hashes_of(chain(needs.keys, needs.sequences))
        found = index.find(connection, hashes.values())
        if found:
            places = set(chain.from_iterable(found.values()))
            snapshot.keys, snapshot.sequences = _remembered(connection, places, needs)
        return snapshot, hashes

    def _save(self, connection: Any, decided: Decided, there: Snapshot | None) -> None:
        changes = decided.changes
        _save_records(connection, changes.records, decided.salts)
        blocks = [msgspec.structs.astuple(block) for block in decided.sealed.blocks]
        connection.executemany(SQL["save_block"], blocks)
        heads = [(lane, *msgspec.structs.astuple(head)) for lane, head in changes.heads.items()]
        connection.executemany(SQL["save_lane"], heads)
        tables.save(connection, changes, self.file.settings.lanes, there)


def _save_records(connection: Any, records: Sequence[Record], salts: Sequence[bytes]) -> None:
    if records and min([len(one.body) for one in records]) < ERASURE_BYTES:
        _insert_padded_records(connection, map(_padded_columns, records, salts), len(records))
    else:
        _insert_records(connection, map(_columns, records, salts), len(records))
    # In the order in which they lie, page by page. Positions come in order already, and two stable sorts by one column
    # take half as long as one that compares rows.
    partitions = [(one.lane, name, one.position) for one in records for name in one.partitions]
    partitions.sort(key=itemgetter(1))
    partitions.sort(key=itemgetter(0))
    _insert_partitions(connection, partitions, len(partitions))
    streams = [(one.lane, one.scope, one.sequence, one.position) for one in records if one.sequence]
    streams.sort(key=itemgetter(1))
    streams.sort(key=itemgetter(0))
    _insert_streams(connection, streams, len(streams))


def _columns(record: Record, salt: bytes) -> tuple[Any, ...]:
    # A value that is neither a number, a text nor a bytearray is asked by sqlite3 whether it wants to be adapted. That
    # takes three times as long as to copy it into a bytearray.
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
        partitions_text(record.partitions),
        bytearray(salt),
        bytearray(record.body),
    )


def _padded_columns(record: Record, salt: bytes) -> tuple[Any, ...]:
    missing = ERASURE_BYTES - len(record.body)
    return (*_columns(record, salt), bytes(missing) if missing > 0 else None)


def _remembered(
    connection: Any, places: Iterable[int], needs: Footprint
) -> tuple[dict[KeyIdentity, Remembered], dict[SequenceIdentity, Remembered]]:
    """What the records at those places say, as far as it was asked for. The newest counts."""
    keys: dict[KeyIdentity, Remembered] = {}
    sequences: dict[SequenceIdentity, Remembered] = {}
    parameters = (orjson.dumps(sorted(places)).decode(),)
    for row in connection.execute(SQL["remembered"], parameters).fetchall():
        place, sequence, log_time_ms, height, client_sequence, policy, scope, client, key, fingerprint, erased = row
        receipt = Receipt(*lane_and_position(place), sequence, log_time_ms, height, client_sequence)
        remembered = Remembered(receipt, fingerprint, bool(erased))
        identity = (policy, scope, client if client_sequence else "", key)
        if identity in needs.keys:
            keys[identity] = remembered
        if (policy, scope, client, client_sequence) in needs.sequences:
            sequences[policy, scope, client, client_sequence] = remembered
    return keys, sequences


def _added(decided: Decided, hashes: Mapping[KeyIdentity | SequenceIdentity, int]) -> list[tuple[int, int]]:
    """What new records are found by. Their hashes were made when they were looked for."""
    changes = decided.changes
    added: Iterable[tuple[KeyIdentity | SequenceIdentity, Remembered]] = chain(
        changes.keys.items(), changes.sequences.items()
    )
    return [
        (hashes[identity], remembered.receipt.lane << POSITION_BITS | remembered.receipt.position)
        for identity, remembered in added
    ]


def _positions(heads: Mapping[int, LaneHead], decided: Decided) -> dict[int, int]:
    positions = {lane: head.position for lane, head in heads.items()}
    positions.update((lane, head.position) for lane, head in decided.changes.heads.items())
    return positions
