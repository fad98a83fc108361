"""Deletion of expired side state: leases, clients, entities and full rate buckets. `core.rules` decides expiry.

An expired row is treated as absent as soon as the core rules say so, whether or not the row is still stored
(docs/decisions/0004 and 0005). A store can therefore delete expired rows later, in some of its commits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncelog.core.operations import Entity
from oncelog.core.policy import Policy
from oncelog.core.rules.leases import is_forgotten
from oncelog.core.rules.quotas import is_full
from oncelog.core.values import Bucket, Changes, ClientEntry, LaneHead, Lease
from oncelog.errors import PolicyError
from oncelog.storage.queries.statement import DeleteRows, QuerySteps, Statement, TableSlice
from oncelog.storage.side_state import CLIENTS, TABLES

EXPIRY_INTERVAL_COMMITS: Final = 16
"""One commit in this many deletes a slice of expired rows."""
EXPIRY_BATCH_ROWS: Final = 128
"""Minimum rows per slice of a table. To keep up, a slice covers at least twice the rows written since the last one."""
EXPIRING_TABLES: Final = [table for table in TABLES if table.expires]

decode_policy: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(Policy).decode)
"""Decodes the declaration of a policy."""


class ExpiryCheck:
    """Decides from the head of a row's lane whether the row has expired and is treated as absent."""

    def __init__(self, declarations: Iterable[tuple[str, str]], heads: Mapping[int, LaneHead]) -> None:
        self._heads = heads
        self._policies: dict[str, Policy] = {}
        for name, declaration in declarations:
            with suppress(msgspec.MsgspecError, PolicyError):  # a newer version declared it, and expires its rows
                self._policies[name] = decode_policy(declaration)
        self._checks: Mapping[type, Callable[[tuple[Any, ...], Any, LaneHead], bool]] = {
            Lease: lambda _, lease, head: is_forgotten(lease, head.log_time_ms),
            Entity: lambda _, entity, head: not entity.is_live(head.log_time_ms),
            ClientEntry: self._is_client_expired,
            Bucket: lambda _, bucket, head: is_full(bucket, head.log_time_ms),
        }

    def __call__(self, key: tuple[Any, ...], value: Any) -> bool:
        """Return whether a row is treated as absent. The key begins with the lane."""
        head = self._heads.get(key[0])
        return head is not None and self._checks[type(value)](key, value, head)

    def _is_client_expired(self, key: tuple[Any, ...], entry: ClientEntry, head: LaneHead) -> bool:
        policy = self._policies.get(key[1])
        if policy is None:
            return False
        return not policy.retention.remembers(entry.last_seen_ms, head.log_time_ms, head.eviction_time_ms)


class ExpirySweep:
    """Repeated pass over the tables. Its progress is kept in memory only, so a restart begins a new pass."""

    def __init__(self) -> None:
        self._commits: Counter[int] = Counter()
        """Commits in each lane since its last slice."""
        self._cursors: dict[tuple[str, int | None], Any] = {}
        """Where the last slice of each table and lane ended."""
        self._rows_written = dict.fromkeys((table.name for table in EXPIRING_TABLES), 0)

    def add_commit(self, changes: Changes) -> None:
        """Count the rows that a commit writes."""
        for name in self._rows_written:
            self._rows_written[name] += len(getattr(changes, name))

    def find_due_lane(self, lanes: Mapping[int, LaneHead]) -> int | None:
        """Count a commit in each of its lanes. Returns a lane that is due for a slice, or None."""
        self._commits.update(lanes.keys())
        lane = max(lanes, key=self._commits.__getitem__)
        if self._commits[lane] < EXPIRY_INTERVAL_COMMITS:
            return None
        self._commits[lane] = 0
        return lane

    def run(self, heads: Mapping[int, LaneHead], lane: int | None = None) -> QuerySteps[int]:
        """Delete the expired rows in one slice of each table, inside a commit's transaction. The heads from before the
        commit determine expiry.

        Without a lane, the slice covers all lanes. Returns how many client entries were deleted.
        """
        clients = 0
        is_expired = ExpiryCheck((yield Statement("policies")), heads)
        for table in EXPIRING_TABLES:
            rows_max = max(EXPIRY_BATCH_ROWS, 2 * self._rows_written[table.name])
            cursor = self._cursors.get((table.name, lane))
            rows, self._cursors[table.name, lane] = yield TableSlice(table, lane, cursor, rows_max)
            width = 1 + len(table.keys)
            absent = [row[:width] for row in rows if is_expired(row[:width], table.decode_value(row[width:]))]
            yield DeleteRows(table, absent)
            clients += len(absent) if table is CLIENTS else 0
            self._rows_written[table.name] = 0
        return clients
