"""Checks the arguments of reads, look-ups and erasures."""

from collections.abc import Sequence
from uuid import UUID

from oncelog.core.identity import check_text, normal_partitions
from oncelog.core.limits import PARTITIONS_MAX
from oncelog.core.policy import Policy
from oncelog.core.values import KeyIdentity, Settings
from oncelog.engine.limits import Limits
from oncelog.engine.read_results import Cursor, format_order
from oncelog.errors import HistoryChangedError
from oncelog.storage.store import Query, Store


async def resolve_cursor(store: Store, cursor: int | Cursor | str, stream: str | None, lane: int = 0) -> int:
    """Return the position of a cursor.

    Raises:
        HistoryChangedError: the cursor belongs to another epoch.
        ValueError: the cursor is negative, or belongs to another order.
    """
    if isinstance(cursor, str):
        cursor = Cursor.parse(cursor)
    if type(cursor) is int:
        if cursor < 0:
            raise ValueError(f"a cursor must be at least 0, not {cursor}")
        return cursor
    if not isinstance(cursor, Cursor):
        raise TypeError(f"a cursor must be a number, a Cursor or its text, not {type(cursor).__name__}")
    if cursor.epoch != store.epoch:
        page = await store.read(Query(lane=lane, stream=stream, limit=1))
        raise HistoryChangedError(
            f"the cursor belongs to epoch {cursor.epoch}, but the log is in epoch {store.epoch}: its history has "
            "changed, so read again from a known position, or from 0",
            store.epoch,
            page.newest,
        )
    if cursor.order != format_order(stream, lane):
        expected = format_order(stream, lane) or "lane 0"
        raise ValueError(f"the cursor is a place in {cursor.order or 'lane 0'!r}, not in {expected!r}")
    return cursor.position


def normalize_partitions(partition: str | None, partitions: Sequence[str], stream: str | None) -> tuple[str, ...]:
    """Return the partitions of a query in normal form. Raises TypeError, ValueError or CanonicalError."""
    if isinstance(partitions, str):
        raise TypeError("partitions must be a list of names; use partition for a single name")
    if sum((partition is not None, bool(partitions), stream is not None)) > 1:
        raise ValueError("only one of partition, partitions and stream may be given")
    if stream is not None:
        check_text(stream, "$.stream")
    normal = normal_partitions((partition,) if partition is not None else partitions)
    if len(normal) > PARTITIONS_MAX:
        raise ValueError(f"partitions must have at most {PARTITIONS_MAX} different names, not {len(normal)}")
    return normal


def check_lane(lane: int, settings: Settings) -> None:
    """Raise ValueError for a lane that the log does not have."""
    if type(lane) is not int or not 0 <= lane <= settings.lanes:
        raise ValueError(f"lane must be from 0 to {settings.lanes}, not {lane!r}")


def check_integer(number: object, name: str) -> int:
    """Return the number. Raises TypeError unless it is an integer."""
    if type(number) is not int:
        raise TypeError(f"{name} must be a whole number, not {number!r}")
    return number


def clamp_limit(limit: int, limits: Limits) -> int:
    """Return the number of entries of a page: at least one, at most as many as the limits allow."""
    return max(1, min(limit, limits.page_records_max))


def build_identity(policy: Policy, scope: str, client: str, key: bytes | UUID | str) -> KeyIdentity:
    """Return the identity of a key. Raises TypeError, ValueError or CanonicalError for a wrong argument."""
    raw = UUID(key).bytes if isinstance(key, str) else key.bytes if isinstance(key, UUID) else key
    if type(raw) is not bytes:
        raise TypeError(f"a key must be bytes or a UUID, not {type(key).__name__}")
    check_text(scope, "$.scope")
    check_text(client, "$.client")
    return (policy.name, scope, client if policy.client_sequence else "", raw)
