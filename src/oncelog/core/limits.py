"""Limits that the core itself keeps, each with a name and its unit. Doors have more of their own."""

from typing import Final

CLOCK_DRIFT_MS_MAX: Final = 5000
"""How far ahead of ours a remote clock is still believed."""

LEASE_MS_DEFAULT: Final = 30_000
LEASE_MS_MAX: Final = 24 * 3600 * 1000
LEASE_MEMORY_MS: Final = 24 * 3600 * 1000
"""How long after its end a lease that nobody took over can still be renewed or completed."""

LANES_DEFAULT: Final = 16
EVICTION_INTERVAL_DEFAULT: Final = 1000
SEQUENCE_MAX: Final = 2**64 - 1
"""Of clients' sequences. A wire that speaks JSON ends at 2^53−1."""
