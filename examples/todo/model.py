"""The to-do list as a function of the events in a log, and its table in the SQLite file of the client.

An event has the form that both dialects of the server show, so that the web page can read it too:

    {"type": "todo.added", "schemaVersion": 1, "payload": {"item": "…", "text": "milk", "by": "ann"}, "meta": {…}}

The list depends on nothing but the events in the order of the log, so all clients that have read the same events show
the same list. `page/model.mjs` is this module in JavaScript; a test compares the two.
"""

import re
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from oncelog.client import Event

ADDED: Final = "todo.added"
RENAMED: Final = "todo.renamed"
DONE: Final = "todo.done"
UNDONE: Final = "todo.undone"
REMOVED: Final = "todo.removed"
KINDS: Final = (ADDED, RENAMED, DONE, UNDONE, REMOVED)
SCHEMA_VERSION: Final = 1
NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""Name of a list, which is a project of the npm client. It is part of a partition, an address and a file name."""


class Change(NamedTuple):
    """Content of one event."""

    kind: str
    item: str
    text: str
    by: str


class Item(NamedTuple):
    """A line of the list."""

    id: str
    place: int
    """Number of the event that added the item: its place in the list, the same for all readers."""
    text: str
    by: str
    is_done: bool = False
    is_removed: bool = False
    """The item stays in the table, so that a later event about it does not bring it back."""
    is_pending: bool = False
    """Whether the outbox contains a change to the item."""


# --- events ----------------------------------------------------------------------------------------------


def get_followed_partition(name: str) -> str:
    """Return the partition that has all events of a list."""
    return f"project/{name}"


def list_event_partitions(name: str) -> list[str]:
    """Return the partitions of each event of a list, the same as those of the page's events."""
    return [f"project/{name}", f"todo/{name}"]


def build_event(kind: str, item: str, by: str, text: str | None = None) -> dict[str, Any]:
    """Return an event to submit."""
    text_member = {} if text is None else {"text": text}
    return {
        "type": kind,
        "schemaVersion": SCHEMA_VERSION,
        "payload": {"item": item, "by": by, **text_member},
        "meta": {"clientId": by, "clientTs": time.time_ns() // 1_000_000},
    }


def parse_change(event: Mapping[str, Any] | None) -> Change | None:
    """Return the content of an event, or None if it is not about an item: any client can write to the partition."""
    if event is None or type(event.get("schemaVersion")) is not int or event["schemaVersion"] != SCHEMA_VERSION:
        return None
    kind, payload = event.get("type"), event.get("payload")
    if kind not in KINDS or not isinstance(payload, Mapping) or not isinstance(event.get("meta"), Mapping):
        return None
    item, text, by = payload.get("item"), payload.get("text", ""), payload.get("by", "")
    if not isinstance(item, str) or not isinstance(text, str) or not isinstance(by, str) or not item:
        return None
    if kind in (ADDED, RENAMED) and not text:
        return None
    return Change(kind, item, text, by)


# --- the list --------------------------------------------------------------------------------------------


def apply_change(item: Item | None, change: Change, place: int) -> Item | None:
    """Return the item after a change. The last change in the order of the log wins."""
    if item is None:
        return Item(change.item, place, change.text, change.by) if change.kind == ADDED else None
    if item.is_removed:
        return item
    match change.kind:
        case "todo.renamed":
            return item._replace(text=change.text)
        case "todo.done" | "todo.undone":
            return item._replace(is_done=change.kind == DONE)
        case "todo.removed":
            return item._replace(is_removed=True)
    return item  # it already exists


def fold(events: Iterable[tuple[int, Mapping[str, Any] | None]]) -> dict[str, Item]:
    """Return all items, including removed ones, after these numbered events, given in log order."""
    items: dict[str, Item] = {}
    for number, event in events:
        change = parse_change(event)
        if change is not None and (item := apply_change(items.get(change.item), change, number)) is not None:
            items[change.item] = item
    return items


def build_list(events: Iterable[tuple[int, Mapping[str, Any] | None]]) -> list[Item]:
    """Return the list after these numbered events, given in log order."""
    return list_visible(fold(events).values())


def build_list_with_pending(items: Iterable[Item], pending: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Return the list as if the server committed the outbox next. Items with pending changes are marked."""
    known = {item.id: item for item in items}
    place = max((item.place for item in known.values()), default=0)
    for event in pending:
        change = parse_change(event)
        if change is None:
            continue
        place += 1
        item = apply_change(known.get(change.item), change, place)
        if item is not None:
            known[change.item] = item._replace(is_pending=True)
    return list_visible(known.values())


def list_visible(items: Iterable[Item]) -> list[Item]:
    """Return the items in list order, without removed ones."""
    return sorted((item for item in items if not item.is_removed), key=lambda item: item.place)


# --- the table -------------------------------------------------------------------------------------------

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS todo_items (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, text TEXT NOT NULL, "by" TEXT NOT NULL,
    is_done INTEGER NOT NULL, is_removed INTEGER NOT NULL
)
"""
_COLUMNS: Final = 'id, place, text, "by", is_done, is_removed'


def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    """Update the table. The client calls it in the transaction that moves its cursor, so no event is applied twice."""
    connection.execute(_TABLE)
    for event in events:
        change = parse_change(event.event)
        if change is None:
            continue
        row = connection.execute(f"SELECT {_COLUMNS} FROM todo_items WHERE id = ?", (change.item,)).fetchone()  # noqa: S608
        item = apply_change(None if row is None else _to_item(row), change, event.committed_id)
        if item is not None:
            connection.execute(
                f"INSERT OR REPLACE INTO todo_items ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
                (item.id, item.place, item.text, item.by, item.is_done, item.is_removed),
            )


def reset(connection: sqlite3.Connection) -> None:
    """Empty the table. The client calls this when the server has a different log, for example after a restore."""
    connection.execute(_TABLE)
    connection.execute("DELETE FROM todo_items")


class Table:
    """Reads the table over a separate connection, because the client's belongs to the client's thread."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute(_TABLE)

    def items(self) -> list[Item]:
        """Return all items, including removed ones."""
        return [_to_item(row) for row in self._connection.execute(f"SELECT {_COLUMNS} FROM todo_items")]  # noqa: S608

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _to_item(row: tuple[str, int, str, str, int, int]) -> Item:
    return Item(*row[:4], bool(row[4]), bool(row[5]))
