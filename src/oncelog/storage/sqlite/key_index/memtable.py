"""The memtable: a mapping in memory from a key's hash to one or several places."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from oncelog.storage.key_hash import HASH_MAX

Places = int | tuple[int, ...]
Memtable = dict[int, Places]

_PART_BITS: Final = 6
_PART_SHIFT: Final = HASH_MAX.bit_length() - _PART_BITS


class HashOrder:
    """Hashes in order. They are sorted in parts, because sorting all of them in one step would delay a commit."""

    def __init__(self, hashes: Iterable[int]) -> None:
        self._parts: list[list[int]] = [[] for _ in range(1 << _PART_BITS)]
        self._sorted = [False] * len(self._parts)
        add = [part.append for part in self._parts]
        for key_hash in hashes:
            add[key_hash >> _PART_SHIFT](key_hash)

    def list_after(self, cursor: int, count: int) -> list[int]:
        """Return at most `count` hashes: the first ones above the cursor."""
        found: list[int] = []
        number = max(cursor, 0) >> _PART_SHIFT
        while len(found) < count and number < len(self._parts):
            part = self._parts[number]
            if not self._sorted[number]:
                part.sort()
                self._sorted[number] = True
            start = bisect_right(part, cursor)
            found += part[start : start + count - len(found)]
            number += 1
        return found


def list_places(places: Places) -> list[int]:
    """Return the places of a key as a list."""
    return [places] if isinstance(places, int) else list(places)


def are_single(places: Iterable[Places]) -> bool:
    """Return whether every key has one place, as nearly all keys do."""
    return set(map(type, places)) == {int}


def count_places(memtable: Memtable) -> int:
    """Return the total number of places of all keys."""
    if are_single(memtable.values()):
        return len(memtable)
    return sum(len(list_places(places)) for places in memtable.values())


def add_place(memtable: Memtable, key_hash: int, place: int) -> None:
    """Add a place to a hash."""
    known = memtable.get(key_hash)
    if known is None:
        memtable[key_hash] = place
    elif place not in list_places(known):
        memtable[key_hash] = (*list_places(known), place)
