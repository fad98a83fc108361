"""Limits of a running log. Each has a default and can be changed."""

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers

_MIB = 2**20


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a log in one process. The error for a request that exceeds a limit contains the limit's name."""

    body_bytes_max: int = 16 * _MIB
    """Maximum bytes of one write."""
    request_items_max: int = 10_000
    """Maximum items of one `submit_many`."""
    queue_items_max: int = 10_000
    """Maximum writes that wait to be committed. Further new writes are refused as busy."""
    queue_bytes_max: int = 64 * _MIB
    """Maximum total bytes of the writes that wait to be committed. Further new writes are refused as busy."""
    batch_items_max: int = 1000
    """Maximum items of one group commit. A request is never split."""
    batch_bytes_max: int = 8 * _MIB
    """Maximum bytes of one group commit."""
    cache_entries_max: int = 100_000
    """Maximum cached answers. The least recently used answer is evicted first. 0 disables the cache."""
    cache_ttl_ms: int = 86_400_000
    """How long an answer is kept in the cache."""
    results_bytes_max: int = 16 * _MIB
    """Maximum bytes of cached work results (`once`, `Runs`, the middleware). 0 disables the cache."""
    page_records_max: int = 1000
    """Maximum records in a page. A read with a larger `limit` returns at most this many."""
    page_bytes_max: int = 8 * _MIB
    """Maximum bytes in a page. A page has at least one record, regardless of its size."""
    subscriptions_max: int = 10_000
    """Maximum readers that follow the log."""
    subscription_records_max: int = 1000
    """Maximum queued records of one reader. A reader is warned at half of this number and closed above it."""
    subscription_bytes_max: int = 8 * _MIB
    """Maximum queued bytes of one reader, with the same effects."""
    poll_ms: int = 50
    """Interval at which a log with readers polls for other processes' commits."""
    clock_jump_ms_max: int = 600_000
    """How far the wall clock may run ahead of the monotonic clock between two commits."""
    tombstone_age_ms: int = 30 * 86_400_000
    """Minimum age of a DELETE before compaction drops the deleted row. A client that was offline for longer may lose
    its earlier edits."""
    postgres_connect_ms: int = 5_000
    """Timeout for opening a database session."""
    postgres_lane_ms: int = 5_000
    """How long a server can be silent before it loses a lane that it has locked."""
    postgres_commit_ms: int = 30_000
    """Timeout for a COMMIT, after which a different session determines its outcome."""
    postgres_patience_ms: int = 15_000
    """How long a batch whose session was lost is retried on other sessions before its callers receive the error."""

    def __post_init__(self) -> None:
        may_be_zero = ("cache_entries_max", "results_bytes_max", "tombstone_age_ms")
        check_whole_numbers(self, self.__struct_fields__, may_be_zero=may_be_zero)


def clamp_limit(limit: int, limits: Limits) -> int:
    """Return the page size for a requested limit: at least one, and at most what the limits allow."""
    return max(1, min(limit, limits.page_records_max))
