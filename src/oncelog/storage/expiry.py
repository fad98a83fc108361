"""Deletes rows that log time has expired: leases, clients, entities, full rates. `core.rules` decides expiry.

It counts as absent from the moment that the core says so, whether or not its row is there (docs/decisions/0004 and
0005). So a store can remove the rows whenever it suits.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

from oncelog.core.operations import Entity
from oncelog.core.policy import Policy
from oncelog.core.rules.leases import is_forgotten
from oncelog.core.rules.rates import is_full
from oncelog.core.values import Bucket, ClientEntry, LaneHead, Lease
from oncelog.errors import PolicyError
from oncelog.storage.side_state import TABLES

EXPIRY_INTERVAL_COMMITS: Final = 16
"""One commit of so many looks at a slice."""
EXPIRY_BATCH_ROWS: Final = 128
"""Of each table, or twice as many as have been written to it since: so it keeps up."""
EXPIRING_TABLES: Final = [table for table in TABLES if table.expires]

_decode_policy: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(Policy).decode)


class ExpiryCheck:
    """Whether a row counts as absent, by its lane's head."""

    def __init__(self, declarations: Iterable[tuple[str, str]], heads: Mapping[int, LaneHead]) -> None:
        self._heads = heads
        self._policies: dict[str, Policy] = {}
        for name, declaration in declarations:
            with suppress(msgspec.MsgspecError, PolicyError):  # of a newer version, which will know what to do
                self._policies[name] = _decode_policy(declaration)
        self._checks: Mapping[type, Callable[[tuple[Any, ...], Any, LaneHead], bool]] = {
            Lease: lambda _, lease, head: is_forgotten(lease, head.log_time_ms),
            Entity: lambda _, entity, head: not entity.is_live(head.log_time_ms),
            ClientEntry: self._is_client_expired,
            Bucket: lambda _, bucket, head: is_full(bucket, head.log_time_ms),
        }

    def __call__(self, key: tuple[Any, ...], value: Any) -> bool:
        """The key begins with the lane."""
        head = self._heads.get(key[0])
        return head is not None and self._checks[type(value)](key, value, head)

    def _is_client_expired(self, key: tuple[Any, ...], entry: ClientEntry, head: LaneHead) -> bool:
        policy = self._policies.get(key[1])
        if policy is None:
            return False
        return not policy.retention.remembers(entry.last_seen_ms, head.log_time_ms, head.eviction_time_ms)
