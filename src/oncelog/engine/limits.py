"""Limits of a running log. Each has a name and a default, and can be set."""

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers

_MIB = 2**20


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a log in one process. A request beyond a limit gets an error that names the limit."""

    body_bytes_max: int = 16 * _MIB
    """Bytes of one write."""
    request_items_max: int = 10_000
    """Items of one `submit_many`."""
    queue_items_max: int = 10_000
    """Writes that wait for their commit. Further new writes are refused as busy."""
    queue_bytes_max: int = 64 * _MIB
    """Bytes of the writes that wait for their commit. Further new writes are refused as busy."""
    batch_items_max: int = 1000
    """Items of one group commit. A request is never divided."""
    batch_bytes_max: int = 8 * _MIB
    """Bytes of one group commit."""
    cache_entries_max: int = 100_000
    """Cached answers; the least recently used answer is dropped first. 0 disables the cache."""
    cache_ttl_ms: int = 86_400_000
    """How long an answer stays in the cache."""
    results_bytes_max: int = 16 * _MIB
    """Bytes of cached results of work (`once`, `Runs`, the middleware). 0 disables the cache."""
    page_records_max: int = 1000
    """Records of a page. A larger `limit` of a read is reduced to this number."""
    page_bytes_max: int = 8 * _MIB
    """Bytes of a page. A page has at least one record."""
    subscriptions_max: int = 10_000
    """Readers that follow the log."""
    subscription_records_max: int = 1000
    """Queued records of one reader. A reader is warned at half of this number, and closed above it."""
    subscription_bytes_max: int = 8 * _MIB
    """Queued bytes of one reader, with the same effects."""
    poll_ms: int = 50
    """Interval at which a log with readers polls for commits of other processes."""
    clock_jump_ms_max: int = 600_000
    """How far the wall clock may run ahead of the monotonic clock between two commits."""
    tombstone_age_ms: int = 30 * 86_400_000
    """Age of the DELETE from which on compaction drops a deleted row. A client that was offline for longer may lose its
    earlier edits."""
    postgres_connect_ms: int = 5_000
    """Timeout for opening a session with a database."""
    postgres_lane_ms: int = 5_000
    """Time after which a silent server loses a lane that it has locked."""
    postgres_commit_ms: int = 30_000
    """Timeout of a COMMIT. Afterwards another session finds out its outcome."""
    postgres_patience_ms: int = 15_000
    """How long a batch whose session was lost is retried on other sessions. Afterwards its callers get the error."""

    def __post_init__(self) -> None:
        may_be_zero = ("cache_entries_max", "results_bytes_max", "tombstone_age_ms")
        check_whole_numbers(self, self.__struct_fields__, may_be_zero=may_be_zero)


def clamp_limit(limit: int, limits: Limits) -> int:
    """Return the number of entries of a page: at least one, at most as many as the limits allow."""
    return max(1, min(limit, limits.page_records_max))
