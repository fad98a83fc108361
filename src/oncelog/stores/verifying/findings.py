"""What `verify` says on its way through a log, and the head that a log can be held against."""

from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.proof import HASH_BYTES
from oncelog.errors import CorruptError, OncelogError

HASH_DIGITS: Final = 2 * HASH_BYTES


class Progress(Struct, frozen=True):
    """How far a step has come."""

    step: str
    done: int = 0
    total: int = 0
    """0 where nobody can tell."""


class Lie(Struct, frozen=True):
    """The first thing found that cannot be true. Nothing behind it has been looked at."""

    message: str
    lane: int | None = None
    position: int | None = None


class Passed(Struct, frozen=True):
    """Everything holds. The figures are of what was looked at."""

    records: int
    """All of them, restore records too."""
    lanes: int
    blocks: int
    erased: int
    epoch: str
    keys: int
    """What identities are found by: keys, and numbers of clients."""
    sealed_keys: int = 0
    """Those of a file that are in segments; the newest are not yet. A database has none."""
    segments: int = 0
    restore_records: int = 0
    """One for each lane and restore."""


Finding = Progress | Lie | Passed


class ContradictionError(CorruptError):
    """How the steps of the verification end it."""

    def __init__(self, message: str, lane: int | None = None, position: int | None = None) -> None:
        place = "" if lane is None else f"lane {lane}: " if position is None else f"lane {lane}, position {position}: "
        super().__init__(place + message)
        self.lane = lane
        self.position = position


class LaneMark(Struct, frozen=True):
    """Where a lane ended when its head was exported."""

    lane: int
    position: int
    height: int
    block_hash: str
    """In hexadecimal."""

    def __post_init__(self) -> None:
        if len(self.block_hash) != HASH_DIGITS or len(bytes.fromhex(self.block_hash)) != HASH_BYTES:
            raise ValueError(f"block_hash must have {HASH_DIGITS} hexadecimal digits")


class ExportedHead(Struct, frozen=True):
    """The newest hashes of all lanes, to be kept where whoever runs the log cannot change them."""

    epoch: str
    lanes: list[LaneMark]


def exported_head(text: bytes) -> ExportedHead:
    """What `oncelog head` printed. Raises OncelogError for anything else."""
    try:
        return msgspec.json.decode(text, type=ExportedHead)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise OncelogError(f"not an exported head: {error}") from error
