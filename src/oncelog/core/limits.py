"""Limits of the core, each with a name and its unit. The APIs of the server have further limits."""

import math
from collections.abc import Container, Iterable
from typing import Final

from msgspec import Struct

from oncelog.errors import SettingsError

CLOCK_DRIFT_MS_MAX: Final = 5000
"""How far ahead of ours a remote clock is still believed."""

LEASE_MS_DEFAULT: Final = 30_000
LEASE_MS_MAX: Final = 24 * 3600 * 1000
RUN_MS_MAX_DEFAULT: Final = 24 * 3600 * 1000
"""How long a lease is renewed: after that, work that hangs is taken over by another caller."""
RUN_MS_LIMIT: Final = 366 * 24 * 3600 * 1000
LEASE_MEMORY_MS: Final = 24 * 3600 * 1000
"""How long after its end a lease that nobody took over can still be renewed or completed."""

LANES_DEFAULT: Final = 16
LANES_MAX: Final = 2**15 - 1
"""So that a lane and a position of 48 bits fit into one number of a database."""
EVICTION_INTERVAL_DEFAULT: Final = 1000
EVICTION_INTERVAL_MAX: Final = 2**31 - 1
SEQUENCE_MAX: Final = 2**64 - 1
"""Of clients' sequences. A wire that speaks JSON ends at 2^53−1."""

NAME_CHARACTERS_MAX: Final = 512
"""Of scopes, actors, clients, members, holders and consumers."""
ENTITY_KEY_CHARACTERS_MAX: Final = 1024
"""Of entity keys, and of the three parts of a relationship."""
PARTITIONS_MAX: Final = 64
PARTITION_CHARACTERS_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 64
FAILURE_BYTES_MAX: Final = 4096
"""Of what a failed run leaves for those who waited."""
OPERATIONS_MAX: Final = 10_000
ROW_COLUMNS_MAX: Final = 1000
ROW_BYTES_MAX: Final = 4 * 2**20
"""Of the values of one row, in canonical form."""
FOLDED_MAX: Final = 500
"""Rows of a fold record, and ranges of deltas: compaction drops at most this many bodies in one transaction."""
TOMBSTONES_MAX: Final = 500
"""Tombstones that one item drops, so that one transaction stays short."""
RATE_MAX: Final = 1_000_000
"""New writes that a rate can allow, a second and at once: each costs a whole number of microseconds."""
TENANTS_MAX: Final = 10_000
"""Tenants with a quota, of one log."""
WHOLE_REQUEST_ITEMS_MAX: Final = 10_000
"""Items of a request that is admitted as a whole, and so the tokens that it can owe a bucket."""
QUOTA_RETRY_AFTER_MS: Final = 60_000
"""When a write that does not fit may be sent again: somebody has to make room first, or to allow more."""
ACT_CHARACTERS_MAX: Final = 64
"""Of the name of an administrative act."""
ACT_KEY_BYTES: Final = 32
"""Of the hash that identifies an administrative act."""
TARGET_CHARACTERS_MAX: Final = 1024
"""Of what an administrative act was done to."""
ACT_DETAILS_BYTES_MAX: Final = 8192
"""Of the details of an administrative act, in canonical form: a page of audit records stays small."""
LEAP_ABOVE_MAX: Final = 2**47
"""Positions have 48 bits in a file: as many as a leap can pass over remain after it."""
REQUESTED_ABOVE_MAX: Final = 2**46
"""The highest number that an operator can give for a leap: later restores must find higher ones."""
STORED_INTEGER_MAX: Final = 2**63 - 1
"""What every database can hold in a column of whole numbers."""
SETTING_NUMBER_MAX: Final = 2**53 - 1
"""The largest whole number that a setting can have in a file or in the environment."""


def check_whole_numbers(
    settings: Struct, names: Iterable[str], *, highest: float = math.inf, may_be_zero: Container[str] = ()
) -> None:
    """Raise SettingsError for a field of that name that is not a whole number from 1 (some: from 0) to the highest."""
    for name in names:
        value = getattr(settings, name)
        lowest = 0 if name in may_be_zero else 1
        if type(value) is not int or not lowest <= value <= highest:
            end = "on" if highest >= SETTING_NUMBER_MAX else f"to {highest}"
            raise SettingsError(f"{name} must be a whole number from {lowest} {end}, not {value!r}")
