"""A log without a database: its tables are dictionaries. It decides and stores batches, but nothing is durable."""

import os
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Final

from msgspec.structs import replace

from oncelog.core.plan import Plan, Validate, plan
from oncelog.core.proof import SALT_BYTES, Block, hash_body
from oncelog.core.rules.quotas import reclaim_erased_bytes
from oncelog.core.tenants import Usage
from oncelog.core.values import STATE_TABLES, Changes, Record, Request, Settings, Snapshot, Verdict
from oncelog.storage.store import BatchResult, seal_blocks
from oncelog.storage.tenants import measure_body

_CHANGE_FIELDS: Final = ("heads", *STATE_TABLES)


class MemoryLog:
    """In-memory log that decides and stores batches. Threads may share it.

    `draw` returns random bytes for the salts of record hashes. With `draw=bytes`, all salts are zeros, so equal inputs
    give equal hashes.
    """

    def __init__(self, settings: Settings | None = None, draw: Callable[[int], bytes] = os.urandom) -> None:
        self.snapshot = Snapshot(settings=settings or Settings())
        self.records: list[Record] = []
        self.salts: list[bytes] = []
        self.blocks: list[Block] = []
        self.leaps: list[int] = []
        """Numbers above which numbering resumed after restores."""
        self._draw = draw
        self._lock = Lock()

    def submit(self, batch: Sequence[Request], now_ms: int, validate: Validate | None = None) -> list[list[Verdict]]:
        """Decide a batch and store its changes. Returns the verdicts of each request, one per item."""
        with self._lock:
            planned = plan(batch, self.snapshot, now_ms, validate)
            self.save(planned.changes)
        return planned.verdicts

    def save(self, changes: Changes) -> None:
        """Seal the changes into blocks and store both.

        The changes must have been planned on this log's current state.
        """
        self.keep(seal_blocks(Plan([], changes), [self._draw(SALT_BYTES) for _ in changes.records]))

    def keep(self, decided: BatchResult) -> None:
        """Store a decided batch and its blocks. The batch must have been decided on this log's current state."""
        self.blocks.extend(decided.sealed.blocks)
        self.records.extend(decided.changes.records)
        self.salts.extend(decided.salts)
        for name in _CHANGE_FIELDS:
            self._apply_changes(name, getattr(decided.changes, name))
        self._get_table("past_members").update(dict.fromkeys(decided.changes.members, True))
        if decided.changes.leap:
            self.leaps.append(decided.changes.leap)
            self._apply_changes("floors", dict.fromkeys(self.snapshot.streams, decided.changes.leap))

    def _apply_changes(self, name: str, changed: Mapping[Any, Any]) -> None:
        table = self._get_table(name)
        for key, value in changed.items():
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value

    def erase(self, index: int) -> bytes:
        """Erase the body and salt of a record, and return the hash that replaces them.

        A retry of the write reports the erasure.
        """
        record = self.records[index]
        kept_hash = hash_body(self.salts[index], record.body)
        self.records[index], self.salts[index] = replace(record, body=b"", erased=True), b""
        values = self._erase_values(record)
        if self.snapshot.tenants is not None:
            erased = [measure_body(record), (record.scope, (), values)]
            self.keep_usage(reclaim_erased_bytes(self.snapshot.usage, self.snapshot.tenants, erased))
        client = record.client if record.client_sequence else ""
        identity = (record.policy, record.scope, client)
        for name, key in (("keys", record.key), ("sequences", record.client_sequence)):
            table = self._get_table(name)
            remembered = table.get((*identity, key))
            if remembered is not None and remembered.receipt == record.receipt:
                table[*identity, key] = replace(remembered, erased=True)
        return kept_hash

    def _erase_values(self, record: Record) -> int:
        """Erase the entity values that a record set. Returns how many bytes tenants were charged for them."""
        entities = self._get_table("entities")
        time_ms = self.snapshot.heads[record.lane].log_time_ms
        size = 0
        for (scope, key), entity in entities.items():
            if scope == record.scope and entity.version == record.sequence:
                size += len(entity.value) if entity.is_live(time_ms) else 0
                entities[scope, key] = replace(entity, value=b"", erased=True)
        return size

    def keep_usage(self, changed: Mapping[str, Usage | None]) -> None:
        """Replace the usage of tenants. None removes a tenant."""
        self._apply_changes("usage", changed)

    def touch(self, lane: int) -> None:
        """Count a change to the lane that neither adds a record nor changes its head."""
        heads = self._get_table("heads")
        heads[lane] = replace(heads[lane], revision=heads[lane].revision + 1)

    def _get_table(self, name: str) -> dict[Any, Any]:
        table: dict[Any, Any] = getattr(self.snapshot, name)
        return table
