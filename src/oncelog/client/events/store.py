"""The SQLite file of an events client: outbox, cursor, refused submissions, and events that were set aside.

The application may keep its own tables in the same file. One transaction then saves the effect of an event and the
cursor after it, so each event takes effect exactly once despite crashes.

All methods block, and only one thread may call them at a time.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec
from msgspec import Struct

from oncelog.client.events.values import Event, OutboxEntry, Refused, RefusedEvent, SetAside, SettledEntry
from oncelog.client.runtime.client import describe_error
from oncelog.client.runtime.outbox import OutboxStore
from oncelog.client.runtime.store_file import StoreSchema
from oncelog.errors import PartitionsChangedError

SCHEMA: Final = StoreSchema(
    "client", "oncelog.client.events", 1, state_table="oncelog_client_state", lock_suffix="-client"
)
SQL: Final = SCHEMA.load_queries()
APPLY: Final = "apply"
"""Handler name under which events are set aside when `apply` fails."""
_DISK_ERRORS: Final = ("SQLITE_FULL", "SQLITE_IOERR")
_EVENT_DECODER: Final = msgspec.json.Decoder(Event)
_OUTCOME_DECODER: Final = msgspec.json.Decoder(Refused)
_PARTITIONS_DECODER: Final = msgspec.json.Decoder(tuple[str, ...])

Apply = Callable[[sqlite3.Connection, Sequence[Event]], None]
Reset = Callable[[sqlite3.Connection], None]


class StoredClient(Struct, frozen=True):
    """State that a client loads from its file when it is opened."""

    client_id: str
    cursor: int
    epoch: str
    outbox: list[OutboxEntry]
    refused: int
    set_aside: int


class ClientStore(OutboxStore):
    """Store of one events client."""

    _schema = SCHEMA

    # --- opening

    def open(self, client_id: str | None, partitions: Sequence[str], reset: Reset | None) -> StoredClient:
        """Open the file and load its content. Raises StoreInUseError, PartitionsChangedError or a StoreError."""
        requested = _to_json(partitions)
        with self._file.open() as (connection, is_new):
            if is_new:
                state = (SCHEMA.version, client_id or f"client-{uuid4()}", requested)
                connection.execute(SQL["make_state"], state)
            _, known, followed, epoch, cursor = connection.execute(SQL["state"]).fetchone()
            if client_id is not None and client_id != known:
                known = client_id
                connection.execute(SQL["save_client"], (known,))
            with self._file.translate_damage():
                if followed != requested and reset is None:
                    raise PartitionsChangedError(self._file.path, _PARTITIONS_DECODER.decode(followed))
                outbox = [
                    OutboxEntry(number, event_id, _PARTITIONS_DECODER.decode(names), *rest)
                    for number, event_id, names, *rest in connection.execute(SQL["outbox"])
                ]
            if followed != requested:
                epoch, cursor = "", 0
                self._reset_cursor(connection, requested, cursor, epoch, reset)
            self._next_number = connection.execute(SQL["highest_number"]).fetchone()[0] + 1
            counts = self._count("count_refused"), self._count("count_set_aside")
            return StoredClient(known, cursor, epoch, outbox, *counts)

    # --- the outbox

    def save_outbox(
        self, accepted: Sequence[OutboxEntry], withdrawn: Sequence[str], settled: Sequence[SettledEntry], now_ms: int
    ) -> int:
        """Save new submissions and outcomes. On return new submissions and refusals are on disk.

        `withdrawn` lists the ids of refused submissions to remove. Return the change in the number of refused
        submissions.
        """
        refused = [one for one in settled if isinstance(one.outcome, Refused)]
        # A crash may lose the outcome of a committed event: the client resends the event and gets the same answer.
        with self._file.transaction(is_durable=bool(accepted or refused or withdrawn)) as connection:
            connection.executemany(SQL["accept"], map(_to_entry_row, accepted))
            removed = connection.executemany(SQL["forget_refused"], [(event_id,) for event_id in withdrawn]).rowcount
            connection.executemany(SQL["refuse"], [_to_refused_row(one, now_ms) for one in refused])
            connection.executemany(SQL["settle"], [(one.entry.number,) for one in settled])
        return len(refused) - max(removed, 0)

    def load_refused(self) -> list[RefusedEvent]:
        """Return the refused submissions, oldest first."""
        with self._file.translate_errors(), self._file.translate_damage():
            return [
                RefusedEvent(
                    id,
                    _PARTITIONS_DECODER.decode(partitions),
                    msgspec.json.decode(body),
                    _OUTCOME_DECODER.decode(outcome),
                    rejected_at_ms,
                )
                for id, partitions, body, outcome, rejected_at_ms in self._file.connection.execute(SQL["refused"])  # noqa: A001
            ]

    # --- delivery

    def save_delivery(
        self, events: Sequence[Event], cursor: int, epoch: str, apply: Apply | None, failed: Sequence[SetAside]
    ) -> int:
        """Call `apply` and move the cursor in one transaction. Return how many events are now set aside.

        Return -1 if that number has not changed.
        """
        # Losing the transaction in a crash is harmless, because the server sends the events again.
        with self._file.transaction(is_durable=False) as connection:
            if apply is not None and events:
                failed = [*failed, *_apply_events(connection, apply, events)]
            connection.executemany(SQL["set_aside"], [_to_set_aside_row(failed_delivery) for failed_delivery in failed])
            connection.execute(SQL["save_cursor"], (cursor, epoch))
            return self._count("count_set_aside") if failed else -1

    def load_set_aside(self) -> list[SetAside]:
        """Return the events that are set aside, in order."""
        with self._file.translate_errors(), self._file.translate_damage():
            rows = self._file.connection.execute(SQL["all_set_aside"])
            return [SetAside(handler, _EVENT_DECODER.decode(event), error) for handler, event, error in rows]

    def forget_set_aside(self, committed_ids: Sequence[int]) -> int:
        """Remove events that are set aside. Return how many remain."""
        with self._file.transaction(is_durable=True) as connection:
            connection.executemany(SQL["forget_set_aside_at"], [(committed_id,) for committed_id in committed_ids])
            return self._count("count_set_aside")

    def redeliver(self, failed_delivery: SetAside, apply: Apply | None) -> str | None:
        """Call `apply`, if given, and remove the event. If `apply` fails, keep the event and return the error."""
        with self._file.transaction(is_durable=True) as connection:
            failed = [] if apply is None else _apply_events(connection, apply, [failed_delivery.event])
            if failed:
                connection.execute(SQL["set_aside"], _to_set_aside_row(failed[0]))
                return failed[0].error
            connection.execute(SQL["taken_at_last"], (failed_delivery.handler, failed_delivery.event.committed_id))
            return None

    def start_over(self, partitions: Sequence[str], since: int, epoch: str, reset: Reset | None) -> None:
        """Move the cursor to a different history and call `reset`, in one transaction."""
        with self._file.transaction(is_durable=True) as connection:
            self._reset_cursor(connection, _to_json(partitions), since, epoch, reset)

    def _reset_cursor(
        self, connection: sqlite3.Connection, partitions: str, since: int, epoch: str, reset: Reset | None
    ) -> None:
        if reset is not None:
            reset(connection)
        connection.execute(SQL["forget_set_aside"])
        connection.execute(SQL["start_over"], (partitions, since, epoch))

    def _count(self, statement: str) -> int:
        return int(self._file.connection.execute(SQL[statement]).fetchone()[0])


def _apply_events(connection: sqlite3.Connection, apply: Apply, events: Sequence[Event]) -> list[SetAside]:
    """Call `apply` with all events or, after an error, with each event separately. Return the failed events."""
    error = _try_apply(connection, apply, events)
    if error is None:
        return []
    if len(events) == 1:
        return [SetAside(APPLY, events[0], error)]
    return [failed for event in events for failed in _apply_events(connection, apply, [event])]


def _try_apply(connection: sqlite3.Connection, apply: Apply, events: Sequence[Event]) -> str | None:
    """Call `apply` in a savepoint. Return a one-line description of its error, or None if it succeeds."""
    connection.execute("SAVEPOINT oncelog_client_apply")
    row_factory, text_factory = connection.row_factory, connection.text_factory
    failure: Exception | None = None
    try:
        apply(connection, events)
    except Exception as error:
        if _is_disk_error(error):
            raise  # the next attempt may succeed
        failure = error
    finally:  # the store's statements need its own factories, which the application may have replaced
        connection.row_factory, connection.text_factory = row_factory, text_factory
    if not connection.in_transaction:
        text = "apply ended the client's transaction: it must not commit or roll back"
        raise RuntimeError(text) from failure
    if failure is not None:
        connection.execute("ROLLBACK TO oncelog_client_apply")
    connection.execute("RELEASE oncelog_client_apply")
    return None if failure is None else describe_error(failure)


def _is_disk_error(error: BaseException) -> bool:
    """Return whether `apply` failed because of the disk.

    Other errors, such as a locked database, may come from a different file.
    """
    return isinstance(error, sqlite3.Error) and (getattr(error, "sqlite_errorname", "") or "").startswith(_DISK_ERRORS)


def _to_json(value: Sequence[str] | Struct) -> str:
    return msgspec.json.encode(value).decode()


def _to_entry_row(entry: OutboxEntry) -> tuple[Any, ...]:
    return (
        entry.number, entry.id, _to_json(entry.partitions), entry.body, entry.fingerprint, entry.expected_committed_id
    )  # fmt: skip


def _to_refused_row(settled: SettledEntry, now_ms: int) -> tuple[Any, ...]:
    entry, outcome = settled
    return entry.number, entry.id, _to_json(entry.partitions), entry.body, _to_json(outcome), now_ms


def _to_set_aside_row(failed_delivery: SetAside) -> tuple[Any, ...]:
    return (
        failed_delivery.handler,
        failed_delivery.event.committed_id,
        _to_json(failed_delivery.event),
        failed_delivery.error,
    )
