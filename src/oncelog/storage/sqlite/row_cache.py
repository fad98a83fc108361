"""Cache of recently read or written side state, valid until another connection commits.

Clients write in sequence and streams grow one record at a time, so a batch usually needs rows that the previous batch
read or wrote. Loading a row costs more than checking a write against it.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from oncelog.core.operations import Entity
from oncelog.core.values import Changes, LaneHead, Snapshot

ROWS_MAX: Final = 20_000
"""Maximum rows per table. Beyond that, the table's rows are dropped, and the next batches load what they need."""
SMALL_ROWS_MAX: Final = 100_000
"""Maximum rows for each of the `SMALL_TABLES`."""
VALUE_BYTES_MAX: Final = 4096
"""Entities with larger values are not cached."""
SMALL_TABLES: Final = ("members", "acknowledged")
"""Tables with small rows that share parts of their keys with other rows. A stream has many such rows."""
CACHED_TABLES: Final = ("streams", "clients", "entities", "relationships", "horizons", "rates", *SMALL_TABLES)
"""Tables with small rows that batches use repeatedly."""

_get_tables: Final = attrgetter(*CACHED_TABLES)
RowMap = dict[Any, Any]
"""Rows by key. A key without a row maps to None."""


Heads = Mapping[int, LaneHead]


class RowCache:
    """Cached rows, which are valid only while the log has the lane heads that the cache knows.

    The hashes in the heads cover the complete history, so the cache notices if a file was reset to an older state. A
    commit count is not enough, because it can repeat. The hashes do not cover members, but each membership change
    alters the revision and the log time of its lane's head.
    """

    def __init__(self) -> None:
        self._rows: dict[str, RowMap] = {name: {} for name in CACHED_TABLES}
        self._version: tuple[int, Heads] | None = None
        """Number of commits, and the heads after them."""
        self._staged: dict[str, RowMap] = {}
        self._staged_version: tuple[int, Heads] | None = None

    def begin(self, commits: int, heads: Heads) -> None:
        """Begin a transaction on the current state of the log.

        Clears the cache if other processes have changed the log.
        """
        self.roll_back()
        if (commits, heads) != self._version:
            self.clear()
            self._version = (commits, heads)

    def clear(self) -> None:
        """Forget all rows."""
        self.roll_back()
        self._version = None
        for rows in self._rows.values():
            rows.clear()

    def find_rows(self, name: str, wanted: Iterable[Any]) -> tuple[RowMap, list[Any]]:
        """Return the cached rows, and the keys that must be loaded.

        Keys that are known to have no row appear in neither.
        """
        rows = self._rows.get(name)
        if not rows:
            return {}, list(wanted)
        found: RowMap = {}
        missing = []
        for key in wanted:
            value = rows.get(key, _MISSING)
            if value is _MISSING:
                missing.append(key)
            elif value is not None:
                found[key] = value
        return found, missing

    def stage(self, loaded_keys: dict[str, list[Any]], snapshot: Snapshot, changes: Changes | None = None) -> None:
        """Stage the rows that the transaction has loaded and written."""
        for name, keys in loaded_keys.items():
            loaded = getattr(snapshot, name)
            self._staged[name] = {key: loaded.get(key) for key in keys}
        if changes is not None and any(changed_of_all := _get_tables(changes)):
            for name, changed in zip(CACHED_TABLES, changed_of_all, strict=True):
                if changed:
                    self._staged.setdefault(name, {}).update(changed)
        if changes is not None and self._version is not None:
            commits, heads = self._version
            self._staged_version = (commits + 1, {**heads, **changes.heads})

    def confirm(self) -> None:
        """Keep the staged rows after COMMIT."""
        for name, staged in self._staged.items():
            rows = self._rows[name]
            rows.update(staged)
            if name == "entities":
                for key in [key for key, value in staged.items() if _is_large(value)]:
                    del rows[key]
            if len(rows) > (SMALL_ROWS_MAX if name in SMALL_TABLES else ROWS_MAX):
                rows.clear()
        self._version = self._staged_version or self._version
        self.roll_back()

    def roll_back(self) -> None:
        """Discard the staged rows."""
        self._staged = {}
        self._staged_version = None


def _is_large(value: Any) -> bool:
    return isinstance(value, Entity) and len(value.value) > VALUE_BYTES_MAX


_MISSING: Final = object()
