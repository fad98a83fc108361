"""The writer: one connection, one thread, one transaction at a time.

Several processes may have a writer on one file. So nothing that this one remembers is believed before it has taken the
write lock (BEGIN IMMEDIATE) and seen what the others have written since.
"""

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import msgspec
import orjson

from oncelog.core.footprint import Footprint, footprint
from oncelog.core.plan import Validate
from oncelog.core.policy import Policy
from oncelog.core.proof import body_hash
from oncelog.core.values import (
    KeyIdentity,
    LaneHead,
    Receipt,
    Record,
    Remembered,
    Request,
    SequenceIdentity,
    Settings,
    Snapshot,
)
from oncelog.errors import ClosedError, CorruptError, StoreUnavailableError
from oncelog.stores.clock import Clock, ClockMark
from oncelog.stores.protocol import Decided, Draw, Standing, decide, newly_declared
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.files import BUSY_TIMEOUT_MS, Driver, LogFile, connect, make_or_open, translated
from oncelog.stores.sqlite.index import POSITION_BITS, SEAL_KEYS, Filter, KeyIndex, Lane, lane_and_position, place_of
from oncelog.stores.sqlite.reading import partitions_text
from oncelog.stores.sqlite.standing import standing_of
from oncelog.stores.sqlite.statements import SQL, Insert

logger: Final = logging.getLogger("oncelog.sqlite")

ERASURE_BYTES: Final = 20
"""By so much a row grows, at most, when a hash takes the place of salt and body: shorter bodies are padded."""
FILL_AT_ONCE_KEYS: Final = 100_000
_FILL_ROWS: Final = 50_000
_POLICY: Final = msgspec.json.Decoder(Policy)

_insert_records: Final = Insert(
    "oncelog_records",
    (
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
        "padding",
    ),
)
_insert_partitions: Final = Insert("oncelog_partition_records", ("lane", "partition", "position"))
_insert_streams: Final = Insert("oncelog_stream_records", ("lane", "scope", "sequence", "position"))


class _State(msgspec.Struct):
    """What the log says right after the lock was taken."""

    commits: int
    erasures: int
    clock: ClockMark
    heads: dict[int, LaneHead]
    lanes: dict[int, Lane]


class Session:
    """All that needs the writer's connection. Not for two threads at once."""

    def __init__(
        self,
        path: str,
        driver: Driver,
        clock: Clock,
        draw: Draw,
        jump_ms_max: int,
        seal_keys: int = SEAL_KEYS,
    ) -> None:
        self._path = path
        self._driver = driver
        self._clock = clock
        self._draw = draw
        self._jump_ms_max = jump_ms_max
        self._seal_keys = seal_keys
        self._connection: Any = None
        self._index: KeyIndex | None = None
        self._file: LogFile | None = None
        self._settings: Settings | None = None
        self._has_begun = False
        self._mark: object = None

    def open(self, settings: Settings | None) -> LogFile:
        """Makes or opens the file, and gets the key index ready."""
        self._settings = settings
        self._driver.check(self._path)
        with self._translating():
            connection = self._connected()
            with self._transaction(connection, "BEGIN"):
                self._caught_up(connection, self._state(connection))
            return self.file

    def close(self) -> None:
        """Lets the file go. The last one out moves the write-ahead log into it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- the commit

    def commit(self, batch: Sequence[Request], validate: Validate | None) -> Decided:
        """One transaction: load, decide, save. Raises StoreUnavailableError, and then nothing is told to anyone."""
        with self._translating("; submit again under the same identity"):
            connection = self._connected()
            with self._transaction(connection, "BEGIN IMMEDIATE"):
                state = self._state(connection)
                index = self._caught_up(connection, state)
                mark, jumped = state.clock.proposed(self._clock, self._jump_ms_max)
                needs = footprint(batch, self.file.settings)
                snapshot, hashes = self._load(connection, index, needs, state)
                decided = decide(batch, snapshot, mark.time_ms, validate, self._draw, needs.faults)
                decided.erasures = state.erasures
                if decided.changes.is_empty:
                    return decided
                if jumped is not None:
                    raise jumped
                self._save(connection, decided)
                index.stage(_added(decided, hashes), _positions(state.heads, decided))
                index.maintain(connection)
                connection.execute(SQL["save_state"], (mark.boot, mark.elapsed_ms, mark.time_ms))
            # Only now does memory follow: before COMMIT returned, nothing of this had happened.
            index.confirm()
            return decided

    def _load(
        self, connection: Any, index: KeyIndex, needs: Footprint, state: _State
    ) -> tuple[Snapshot, dict[KeyIdentity | SequenceIdentity, int]]:
        snapshot = Snapshot(settings=self.file.settings, heads=state.heads)
        identities: Iterable[KeyIdentity | SequenceIdentity] = chain(needs.keys, needs.sequences)
        hashes = {identity: index.hash_of(identity) for identity in identities}
        found = index.find(connection, hashes.values())
        if found:
            places = set(chain.from_iterable(found.values()))
            snapshot.keys, snapshot.sequences = _remembered(connection, places, needs)
        tables.load(connection, needs, snapshot)
        return snapshot, hashes

    def _save(self, connection: Any, decided: Decided) -> None:
        changes = decided.changes
        records = list(map(_columns, changes.records, decided.salts))
        partitions = {(one.lane, name, one.position) for one in changes.records for name in one.partitions}
        streams = [(one.lane, one.scope, one.sequence, one.position) for one in changes.records if one.sequence]
        _insert_records(connection, records)
        _insert_partitions(connection, sorted(partitions))  # in the order in which they lie, page by page
        _insert_streams(connection, streams)
        blocks = [msgspec.structs.astuple(block) for block in decided.sealed.blocks]
        connection.executemany(SQL["save_block"], blocks)
        heads = [(lane, *msgspec.structs.astuple(head)) for lane, head in changes.heads.items()]
        connection.executemany(SQL["save_lane"], heads)
        tables.save(connection, changes, self.file.settings.lanes)

    # --- other uses of the writer

    def declare(self, policies: Sequence[Policy]) -> Mapping[str, Policy]:
        """Keeps what is new; raises PolicyError for what contradicts."""
        with self._translating():
            connection = self._connected()
            with self._transaction(connection, "BEGIN IMMEDIATE"):
                rows = connection.execute(SQL["policies"]).fetchall()
                known = {name: _POLICY.decode(declaration) for name, declaration in rows}
                declared = newly_declared(known, policies)
                declarations = [(name, msgspec.json.encode(policy).decode()) for name, policy in declared.items()]
                connection.executemany(SQL["declare_policy"], declarations)
        return known | declared

    def remembered(self, identities: Sequence[KeyIdentity]) -> list[Remembered | None]:
        """Of each identity, what its newest record left to remember."""
        with self._reading() as (connection, state):
            snapshot, _ = self._load(connection, self.index, Footprint(keys=set(identities)), state)
        return [snapshot.keys.get(identity) for identity in identities]

    def standing(self, identity: KeyIdentity) -> Standing:
        """Its newest record, its lease, and the head to judge both by."""
        with self._reading() as (connection, state):
            mark, _ = state.clock.proposed(self._clock, self._jump_ms_max)
            standing = standing_of(connection, self.index, identity, state.heads, self.file.settings.lanes)
            return msgspec.structs.replace(standing, time_ms=mark.time_ms)

    def erase(self, lane: int, positions: Sequence[int]) -> int:
        """In one transaction. The bytes are overwritten in the file when `scrub` has moved it there."""
        with self._translating():
            connection = self._connected()
            connection.execute("PRAGMA secure_delete = ON")
            try:
                with self._transaction(connection, "BEGIN IMMEDIATE"):
                    places = {place_of(lane, position) for position in positions}
                    erased = [row for place in sorted(places) for row in _erasure(connection, place)]
                    if erased:
                        connection.executemany(SQL["erase"], erased)
                        connection.execute(SQL["touch_lane"], (lane,))
                        connection.execute(SQL["count_erasure"])
            finally:
                connection.execute("PRAGMA secure_delete = FAST")
            return len(erased)

    def scrub(self) -> bool:
        """Moves the write-ahead log into the file and empties it; False if a reader is in the way of that.

        It does not wait for the reader: commits would have to wait with it.
        """
        with self._translating():
            connection = self._connected()
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    def confirm_clock(self) -> None:
        """Believes the wall clock."""
        with self._translating():
            connection = self._connected()
            with self._transaction(connection, "BEGIN IMMEDIATE"):
                mark = ClockMark(self._clock.boot(), self._clock.elapsed_ms(), self._clock.wall_ms())
                connection.execute(SQL["save_state"], (mark.boot, mark.elapsed_ms, mark.time_ms))

    # --- the key index and its filter

    @property
    def file(self) -> LogFile:
        """What the file says about itself."""
        if self._file is None:
            raise ClosedError(f"the log {self._path} has not been opened")
        return self._file

    @property
    def index(self) -> KeyIndex:
        """As of the newest transaction."""
        if self._index is None:
            raise ClosedError(f"the log {self._path} has not been opened")
        return self._index

    @property
    def connection(self) -> Any:
        """The writer's own, for readers that can have no other."""
        return self._connected()

    @property
    def unfiltered(self) -> KeyIndex | None:
        """The index, if it waits for its filter."""
        index = self._index  # once: the writer's thread may let go of it at any moment
        return index if index is not None and not index.has_filter else None

    # --- connection and transaction

    def _connected(self) -> Any:
        if self._connection is not None and self._driver.mark(self._path) != self._mark:
            raise StoreUnavailableError(f"{self._path} has been removed or replaced since it was opened")
        if self._connection is None:
            if self._file is not None:
                self._driver.check(self._path)
            connection = connect(self._driver, self._path)
            try:
                self._file = self._same_log(make_or_open(connection, self._path, self._settings, self._clock.wall_ms()))
                self._mark = self._driver.mark(self._path)
                _make_durable(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _same_log(self, file: LogFile) -> LogFile:
        """After an error the file is opened again, and somebody may have put another one in its place."""
        if self._file is not None and self._file.epoch != file.epoch:
            raise StoreUnavailableError(f"{self._path} is another log than the one that was opened; open it anew")
        return file

    @contextmanager
    def _translating(self, hint: str = "") -> Iterator[None]:
        """After an error of SQLite's nothing in memory is believed: the index is made anew.

        But the connection stays while it is only the disk that fails. A commit whose sync failed stands in the
        write-ahead log, readable and never to be written by Linux. This connection knows that it is void and will write
        over it; a new one could find it, believe it, and append what the next loss of power would take away with it.
        """
        try:
            yield
        except sqlite3.Error as error:
            if self._has_begun:  # else nothing was read or written: another process holds the lock
                self._index = None
            ours = translated(error, self._path, hint)
            connection = self._connection
            if connection is not None and (connection.in_transaction or not isinstance(ours, StoreUnavailableError)):
                connection.close()
                self._connection = None
            if ours is error:
                raise
            raise ours from error
        except (UnicodeError, msgspec.MsgspecError) as error:  # what sqlite3 and msgspec make of damage
            raise CorruptError(f"{self._path} is damaged: {error}; see `oncelog verify`") from error

    @contextmanager
    def _transaction(self, connection: Any, begin: str) -> Iterator[None]:
        self._has_begun = False
        connection.execute(begin)
        self._has_begun = True
        try:
            yield
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                _roll_back(connection)

    @contextmanager
    def _reading(self) -> Iterator[tuple[Any, _State]]:
        with self._translating():
            connection = self._connected()
            with self._transaction(connection, "BEGIN"):
                state = self._state(connection)
                self._caught_up(connection, state)
                yield connection, state

    def _state(self, connection: Any) -> _State:
        commits, erasures, *clock = connection.execute(SQL["state"]).fetchone()
        rows = connection.execute(SQL["lanes"]).fetchall()
        heads = {row[0]: LaneHead(*row[1:8]) for row in rows}
        lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in rows}
        return _State(commits, erasures, ClockMark(*clock), heads, lanes)

    def _caught_up(self, connection: Any, state: _State) -> KeyIndex:
        if self._index is None:
            index = KeyIndex(self.file.index_secret, self._seal_keys)
            index.catch_up(connection, state.commits, state.lanes)
            if index.sealed_keys <= FILL_AT_ONCE_KEYS:
                index.use_filter(fill_filter(connection, index.sealed_keys))
            self._index = index
        else:
            self._index.catch_up(connection, state.commits, state.lanes)
        return self._index


def fill_filter(connection: Any, keys: int) -> Filter:
    """A filter over all sealed keys."""
    sealed = Filter(keys)
    cursor = connection.execute(SQL["all_hashes"])
    while rows := cursor.fetchmany(_FILL_ROWS):
        sealed.update([row[0] for row in rows])
    return sealed


def _make_durable(connection: Any) -> None:
    """Syncs what others have left, before anybody is told of it.

    A process that dies between writing a commit and syncing it leaves it in the write-ahead log, and whoever opens the
    file next finds it there as committed: the outcome that nobody knew. Losing the power could still undo it. A
    commit of our own syncs the log, and with it all that stands there before.

    Unless that process died of a sync that failed: what Linux has given up once it does not write with the next sync.
    So the log is moved into the file first, where it is written anew, and begun anew. If others have the file open that
    may not be possible; but then they were here before, and have done it.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(SQL["touch_state"])
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            _roll_back(connection)


def _roll_back(connection: Any) -> None:
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        logger.debug("rollback failed; the connection will be closed", exc_info=True)


def _columns(record: Record, salt: bytes) -> tuple[Any, ...]:
    return (
        record.lane << POSITION_BITS | record.position,
        record.sequence,
        record.log_time_ms,
        record.height,
        record.client_sequence,
        record.policy,
        record.scope,
        record.client,
        record.key,
        record.fingerprint,
        record.actor,
        partitions_text(record.partitions),
        salt,
        record.body,
        None if len(record.body) >= ERASURE_BYTES else bytes(ERASURE_BYTES - len(record.body)),
    )


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
    added = []
    for identities in (decided.changes.keys, decided.changes.sequences):
        for identity, remembered in identities.items():
            if remembered is not None:
                receipt = remembered.receipt
                added.append((hashes[identity], receipt.lane << POSITION_BITS | receipt.position))
    return added


def _positions(heads: Mapping[int, LaneHead], decided: Decided) -> dict[int, int]:
    positions = {lane: head.position for lane, head in heads.items()}
    positions.update((lane, head.position) for lane, head in decided.changes.heads.items())
    return positions


def _erasure(connection: Any, place: int) -> Iterator[tuple[bytes, int]]:
    row = connection.execute("SELECT salt, body FROM oncelog_records WHERE place = ?", (place,)).fetchone()
    if row is not None and row[1] is not None:
        yield body_hash(row[0], row[1]), place
