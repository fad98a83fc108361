"""Set of numbers for long load tests."""

from typing import Final

_BLOCK_NUMBERS: Final = 1024


class IdSet:
    """A set of numbers that are close together. It needs about two bits per number; a Python set needs 60 bytes."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """Bits of the numbers in each block."""

    def add(self, number: int) -> bool:
        """Add a number, and return whether it is new."""
        block, offset = divmod(number, _BLOCK_NUMBERS)
        bits = self._blocks.get(block, 0)
        self._blocks[block] = bits | 1 << offset
        return not bits >> offset & 1
