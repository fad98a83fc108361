"""The to-do list: what a log of events makes of it, and its table in the client's own SQLite file.

An event is as both dialects of the server show it, so that the web page reads it too:

    {"type": "todo.added", "schemaVersion": 1, "payload": {"item": "…", "text": "milk", "by": "ann"}, "meta": {…}}

The list is a function of the events in the log's order, and of nothing else: whoever has read the same events sees the
same list. `page/model.mjs` says the same in JavaScript; a test runs both.
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
"""Of a list, which is a project of the npm client: the same in a partition, in an address and in the name of a file."""


class Change(NamedTuple):
    """What one event says."""

    kind: str
    item: str
    text: str
    by: str


class Item(NamedTuple):
    """A line of the list."""

    id: str
    place: int
    """The number of the event that added it: the order of the list, the same for everybody."""
    text: str
    by: str
    is_done: bool = False
    is_removed: bool = False
    """It stays known, so that whatever was said of it elsewhere, and comes later, does not bring it back."""
    is_pending: bool = False
    """Something about it has not reached the server yet."""


# --- events ----------------------------------------------------------------------------------------------


def followed(name: str) -> str:
    """The partition that has all events of a list."""
    return f"project/{name}"


def written(name: str) -> list[str]:
    """The partitions of an event of a list, as the page's events have them."""
    return [f"project/{name}", f"todo/{name}"]


def event_of(kind: str, item: str, by: str, text: str | None = None) -> dict[str, Any]:
    """An event to submit."""
    said = {} if text is None else {"text": text}
    return {
        "type": kind,
        "schemaVersion": SCHEMA_VERSION,
        "payload": {"item": item, "by": by, **said},
        "meta": {"clientId": by, "clientTs": time.time_ns() // 1_000_000},
    }


def change_of(event: Mapping[str, Any] | None) -> Change | None:
    """What an event says. None if it is none of ours: anybody can write into the partition."""
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


def after(item: Item | None, change: Change, place: int) -> Item | None:
    """What a change makes of the item that it is about. The last one in the log's order wins."""
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
    return item  # it was added before


def folded(events: Iterable[tuple[int, Mapping[str, Any] | None]]) -> dict[str, Item]:
    """All items, removed ones too, after events with their numbers, in the log's order."""
    items: dict[str, Item] = {}
    for number, event in events:
        change = change_of(event)
        if change is not None and (item := after(items.get(change.item), change, number)) is not None:
            items[change.item] = item
    return items


def listed(events: Iterable[tuple[int, Mapping[str, Any] | None]]) -> list[Item]:
    """The list after events with their numbers, in the log's order."""
    return visible(folded(events).values())


def with_pending(items: Iterable[Item], pending: Iterable[Mapping[str, Any]]) -> list[Item]:
    """The list as it will be if what waits in the outbox is committed next. Those items are marked."""
    known = {item.id: item for item in items}
    place = max((item.place for item in known.values()), default=0)
    for event in pending:
        change = change_of(event)
        if change is None:
            continue
        place += 1
        item = after(known.get(change.item), change, place)
        if item is not None:
            known[change.item] = item._replace(is_pending=True)
    return visible(known.values())


def visible(items: Iterable[Item]) -> list[Item]:
    """In their order, without those that were removed."""
    return sorted((item for item in items if not item.is_removed), key=lambda item: item.place)


# --- its table -------------------------------------------------------------------------------------------

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS todo_items (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, text TEXT NOT NULL, "by" TEXT NOT NULL,
    is_done INTEGER NOT NULL, is_removed INTEGER NOT NULL
)
"""
_COLUMNS: Final = 'id, place, text, "by", is_done, is_removed'


def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    """For the client: called in the transaction that moves its cursor, so that each event counts once."""
    connection.execute(_TABLE)
    for event in events:
        change = change_of(event.event)
        if change is None:
            continue
        row = connection.execute(f"SELECT {_COLUMNS} FROM todo_items WHERE id = ?", (change.item,)).fetchone()  # noqa: S608
        item = after(None if row is None else _item(row), change, event.committed_id)
        if item is not None:
            connection.execute(
                f"INSERT OR REPLACE INTO todo_items ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
                (item.id, item.place, item.text, item.by, item.is_done, item.is_removed),
            )


def reset(connection: sqlite3.Connection) -> None:
    """For the client: the log on the server is another one (a restored backup). The list begins anew with it."""
    connection.execute(_TABLE)
    connection.execute("DELETE FROM todo_items")


class Table:
    """Reads the table, by a connection of its own: the client's belongs to the client's thread."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute(_TABLE)

    def items(self) -> list[Item]:
        """All of them, removed ones too."""
        return [_item(row) for row in self._connection.execute(f"SELECT {_COLUMNS} FROM todo_items")]  # noqa: S608

    def close(self) -> None:
        """Lets go of the file."""
        self._connection.close()


def _item(row: tuple[str, int, str, str, int, int]) -> Item:
    return Item(*row[:4], bool(row[4]), bool(row[5]))
