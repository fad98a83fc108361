"""Limits of the core. The server's APIs have additional limits."""

import math
from collections.abc import Container, Iterable
from typing import Final

from msgspec import Struct

from oncelog.errors import SettingsError

CLOCK_DRIFT_MS_MAX: Final = 5000
"""How far a remote clock may be ahead of the log's clock."""

LEASE_MS_DEFAULT: Final = 30_000
LEASE_MS_MAX: Final = 24 * 3600 * 1000
RUN_MS_MAX_DEFAULT: Final = 24 * 3600 * 1000
"""How long a lease can be renewed. After that, another caller can take over work that hangs."""
RUN_MS_LIMIT: Final = 366 * 24 * 3600 * 1000
LEASE_MEMORY_MS: Final = 24 * 3600 * 1000
"""How long an expired or released lease is remembered. An expired lease can be renewed or completed until another
caller claims the key."""

LANES_DEFAULT: Final = 16
LANES_MAX: Final = 2**15 - 1
"""A lane and a position of 48 bits fit into one database integer."""
EVICTION_INTERVAL_DEFAULT: Final = 1000
EVICTION_INTERVAL_MAX: Final = 2**31 - 1
SEQUENCE_MAX: Final = 2**64 - 1
"""Highest client sequence. In JSON the limit is 2^53−1."""

NAME_CHARACTERS_MAX: Final = 512
"""Maximum length of scopes, actors, clients, members, holders and consumers."""
ENTITY_KEY_CHARACTERS_MAX: Final = 1024
"""Maximum length of entity keys and of the three parts of a relationship."""
PARTITIONS_MAX: Final = 64
PARTITION_CHARACTERS_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 64
FAILURE_BYTES_MAX: Final = 4096
"""Maximum size of the stored error of a failed run."""
OPERATIONS_MAX: Final = 10_000
ROW_COLUMNS_MAX: Final = 1000
ROW_BYTES_MAX: Final = 4 * 2**20
"""Maximum total size of a row's values in canonical form."""
FOLDED_MAX: Final = 500
"""Maximum number of rows, and of delta ranges, in a fold record. Compaction drops at most this many bodies per
transaction."""
TOMBSTONES_MAX: Final = 500
"""Maximum number of tombstones that one item drops, which limits the duration of a transaction."""
RATE_MAX: Final = 1_000_000
"""Maximum sustained rate per second and maximum burst. Up to this rate, each new write costs a whole number of
microseconds."""
TENANTS_MAX: Final = 10_000
"""Maximum number of tenants in one log."""
WHOLE_REQUEST_ITEMS_MAX: Final = 10_000
"""Maximum number of items in a request that is admitted as a whole, and therefore the largest possible overdraft of
a bucket."""
QUOTA_RETRY_AFTER_MS: Final = 60_000
"""Delay before retrying a write that exceeds a quota. An operator must free space or raise the quota first."""
ACT_CHARACTERS_MAX: Final = 64
"""Maximum length of the name of an administrative act."""
ACT_KEY_BYTES: Final = 32
"""Length of the hash that identifies an administrative act."""
TARGET_CHARACTERS_MAX: Final = 1024
"""Maximum length of the target of an administrative act."""
ACT_DETAILS_BYTES_MAX: Final = 8192
"""Maximum size of the details of an administrative act, in canonical form, which keeps a page of audit
records small."""
LEAP_ABOVE_MAX: Final = 2**47
"""Positions have 48 bits on disk. Half of this range is still free after the highest possible leap."""
REQUESTED_ABOVE_MAX: Final = 2**46
"""Highest number that an operator can request for a leap, which leaves higher numbers for later restores."""
STORED_INTEGER_MAX: Final = 2**63 - 1
"""Largest integer that every database can store in a column."""
SETTING_NUMBER_MAX: Final = 2**53 - 1
"""Largest whole number in a setting from a file or the environment."""


def check_whole_numbers(
    settings: Struct, names: Iterable[str], *, highest: float = math.inf, may_be_zero: Container[str] = ()
) -> None:
    """Raise SettingsError if one of the named fields is not a whole number from 1 (or 0, if allowed) to the maximum."""
    for name in names:
        value = getattr(settings, name)
        lowest = 0 if name in may_be_zero else 1
        if type(value) is not int or not lowest <= value <= highest:
            end = "on" if highest >= SETTING_NUMBER_MAX else f"to {highest}"
            raise SettingsError(f"{name} must be a whole number from {lowest} {end}, not {value!r}")
