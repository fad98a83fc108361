"""Cache of side state that was read or written last, valid until another connection commits.

Clients number one write after the other, and streams grow by one: what a batch needs is most often what the one before
it left. So it need not be asked for, which for each row costs more than the decision.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from oncelog.core.operations import Entity
from oncelog.core.values import Changes, LaneHead, Snapshot

ROWS_MAX: Final = 20_000
"""Of a table. Beyond it all of them are let go: the next batches ask for what they need."""
SMALL_ROWS_MAX: Final = 100_000
"""Of a table of `SMALL`."""
VALUE_BYTES_MAX: Final = 4096
"""An entity of a larger value is not kept."""
SMALL_TABLES: Final = ("members", "acknowledged")
"""Those whose rows are little more than their keys, the parts of which others have too; a stream has many of them."""
CACHED_TABLES: Final = ("streams", "clients", "entities", "relationships", "horizons", "rates", *SMALL_TABLES)
"""Those whose rows are small, and come again."""

_get_tables: Final = attrgetter(*CACHED_TABLES)
RowMap = dict[Any, Any]
"""By key; None for one that is not there."""


Heads = Mapping[int, LaneHead]


class RowCache:
    """Believed only while the log's heads are those that this one knows of: their hashes stand for all that was before.

    A number of commits would not do: of a file that was put back to an earlier state it may become the same again.
    Members are in no hash, but each change of them is in the revision and the log time of its lane's head.
    """

    def __init__(self) -> None:
        self._rows: dict[str, RowMap] = {name: {} for name in CACHED_TABLES}
        self._version: tuple[int, Heads] | None = None
        """How many commits there have been, and the heads after them."""
        self._staged: dict[str, RowMap] = {}
        self._staged_version: tuple[int, Heads] | None = None

    def begin(self, commits: int, heads: Heads) -> None:
        """A transaction begins on a log that says this. What others wrote in between is not known here."""
        self.roll_back()
        if (commits, heads) != self._version:
            self.clear()
            self._version = (commits, heads)

    def clear(self) -> None:
        """Nothing is known any more."""
        self.roll_back()
        self._version = None
        for rows in self._rows.values():
            rows.clear()

    def find_rows(self, name: str, wanted: Iterable[Any]) -> tuple[RowMap, list[Any]]:
        """Of the keys those that are known, and those that must be asked for. What is known not to be there is in
        neither."""
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
        """What was asked for and what was written, to be kept once the transaction has been committed."""
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
        """The transaction has been committed."""
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
        """It came to nothing."""
        self._staged = {}
        self._staged_version = None


def _is_large(value: Any) -> bool:
    return isinstance(value, Entity) and len(value.value) > VALUE_BYTES_MAX


_MISSING: Final = object()
