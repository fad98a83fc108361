"""The limits of a running log: named, with a default, and all of them can be set."""

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers

_MIB = 2**20


class Limits(Struct, frozen=True, kw_only=True):
    """What a log in one process holds at most. What lies beyond gets an answer that says so; nothing is dropped."""

    body_bytes_max: int = 16 * _MIB
    """Of one write."""
    request_items_max: int = 10_000
    """Of one `submit_many`."""
    queue_items_max: int = 10_000
    """Writes that wait for their commit. Beyond it new ones are answered as busy."""
    queue_bytes_max: int = 64 * _MIB
    batch_items_max: int = 1000
    """Of one group commit; a request is never divided."""
    batch_bytes_max: int = 8 * _MIB
    cache_entries_max: int = 100_000
    """Answers kept in memory, the least recently used one goes first. 0 keeps none."""
    cache_ttl_ms: int = 86_400_000
    results_bytes_max: int = 16 * _MIB
    """Results of work kept in memory (`once`, `Runs`, the middleware). 0 keeps none."""
    page_records_max: int = 1000
    """A page that is asked for with more has this many."""
    page_bytes_max: int = 8 * _MIB
    subscriptions_max: int = 10_000
    subscription_records_max: int = 1000
    """Records that wait for one reader. At half of it the reader is warned, beyond it closed."""
    subscription_bytes_max: int = 8 * _MIB
    poll_ms: int = 50
    """How often a log with readers looks for what other processes have committed."""
    clock_jump_ms_max: int = 600_000
    """How far the wall clock may run ahead of the steady one between two commits."""
    tombstone_age_ms: int = 30 * 86_400_000
    """Compaction drops deleted rows whose DELETE was committed this long ago. A client that was offline for longer may
    lose what it edited before."""
    postgres_connect_ms: int = 5_000
    """How long to wait for a session with a database."""
    postgres_lane_ms: int = 5_000
    """A gateway that holds a lane and says nothing for so long loses it to the others."""
    postgres_commit_ms: int = 30_000
    """How long to wait for the answer to a COMMIT before its outcome is found out on another session."""
    postgres_patience_ms: int = 15_000
    """For so long a batch whose session was lost is tried again on others; then those who wait are told."""

    def __post_init__(self) -> None:
        may_be_zero = ("cache_entries_max", "results_bytes_max", "tombstone_age_ms")
        check_whole_numbers(self, self.__struct_fields__, may_be_zero=may_be_zero)
