"""Shared by the stores: grouping of positions by block."""

from collections.abc import Sequence

from oncelog.core.proof import Block
from oncelog.storage.store import ScopedBlock


def group_positions(blocks: Sequence[Block], positions: Sequence[int]) -> list[ScopedBlock]:
    """Each block with those of the positions that are in it. Both are in order."""
    found, place = [], 0
    for block in blocks:
        first = place
        while place < len(positions) and positions[place] < block.first_position + block.count:
            place += 1
        found.append(ScopedBlock(block, tuple(positions[first:place])))
    return found
