"""Memory sizes of objects, for figures about single data structures."""

import gc
import sys
from types import FunctionType, ModuleType
from typing import Any, Final

_SHARED: Final = (type, ModuleType, FunctionType)
"""Types whose objects belong to the program and not to an object that refers to them."""


def compute_deep_size(root: Any) -> int:
    """Return the size in bytes of an object and all objects it refers to, each counted once."""
    seen: set[int] = set()
    found: list[Any] = [root]
    total = 0
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        total += getattr(item, "size_in_bits", 0) // 8  # The size of a Bloom filter does not include its bits.
        found += gc.get_referents(item)
    return total
