"""A log in memory: the tables that every store has, as dictionaries. Nothing is durable."""

import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final

from msgspec.structs import replace

from oncelog.core.plan import Validate, plan
from oncelog.core.proof import SALT_BYTES, Block, seal
from oncelog.core.values import Changes, Record, Request, Settings, Snapshot, Verdict

_TABLES: Final = tuple(name for name in Changes.__struct_fields__ if name != "records")


class MemoryLog:
    """Decides batches on what it remembers, and remembers what was decided. Threads may share it.

    `draw` gives random bytes for the salts of the record hashes; `bytes` in its place gives zeros, and two logs
    that are fed alike are then alike to the last hash.
    """

    def __init__(self, settings: Settings | None = None, draw: Callable[[int], bytes] = os.urandom) -> None:
        self.snapshot = Snapshot(settings=settings or Settings())
        self.records: list[Record] = []
        self.salts: list[bytes] = []
        self.blocks: list[Block] = []
        self._draw = draw
        self._lock = Lock()

    def submit(self, batch: Sequence[Request], now_ms: int, validate: Validate | None = None) -> list[list[Verdict]]:
        """One verdict an item, request by request."""
        with self._lock:
            decided = plan(batch, self.snapshot, now_ms, validate)
            self.save(decided.changes)
        return decided.verdicts

    def save(self, changes: Changes) -> None:
        """Closes the blocks and takes over the changes, which must have been planned on this log as it stands."""
        salts = [self._draw(SALT_BYTES) for _ in changes.records]
        sealed = seal(changes, salts)
        changes = replace(changes, heads=sealed.heads)
        self.blocks.extend(sealed.blocks)
        self.records.extend(changes.records)
        self.salts.extend(salts)
        for name in _TABLES:
            table: dict[Any, Any] = getattr(self.snapshot, name)
            for key, value in getattr(changes, name).items():
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value
