"""Checks of the arguments with which an application reads, looks up and erases."""

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
            raise ValueError(f"a cursor must be from 0 on, not {cursor}")
        return cursor
    if not isinstance(cursor, Cursor):
        raise TypeError(f"a cursor is a number, a Cursor or its text, not {type(cursor).__name__}")
    if cursor.epoch != store.epoch:
        page = await store.read(Query(lane=lane, stream=stream, limit=1))
        raise HistoryChangedError(
            f"the cursor belongs to epoch {cursor.epoch}, but this log's is {store.epoch}: its history has changed, "
            "so read again from a point that you know, or from 0",
            store.epoch,
            page.newest,
        )
    if cursor.order != format_order(stream, lane):
        raise ValueError(f"the cursor is of {cursor.order or 'lane 0'!r}, and would mean nothing here")
    return cursor.position


def normalize_partitions(partition: str | None, partitions: Sequence[str], stream: str | None) -> tuple[str, ...]:
    """Return the partitions of a query in normal form. Raises TypeError, ValueError or CanonicalError."""
    if isinstance(partitions, str):
        raise TypeError("partitions is a list of names; for one name use partition")
    if sum((partition is not None, bool(partitions), stream is not None)) > 1:
        raise ValueError("name one of partition, partitions and stream")
    if stream is not None:
        check_text(stream, "$.stream")
    normal = normal_partitions((partition,) if partition is not None else partitions)
    if len(normal) > PARTITIONS_MAX:
        raise ValueError(f"partitions must be at most {PARTITIONS_MAX} different ones, not {len(normal)}")
    return normal


def check_lane(lane: int, settings: Settings) -> None:
    """Raise ValueError for a lane that the log does not have."""
    if type(lane) is not int or not 0 <= lane <= settings.lanes:
        raise ValueError(f"lane must be from 0 to {settings.lanes}, not {lane!r}")


def check_integer(number: object, name: str) -> int:
    """Return the number. Raises TypeError for anything but a whole number."""
    if type(number) is not int:
        raise TypeError(f"{name} is a whole number, not {number!r}")
    return number


def clamp_limit(limit: int, limits: Limits) -> int:
    """Return the number of entries of a page: at least one, at most as many as the limits allow."""
    return max(1, min(limit, limits.page_records_max))


def build_identity(policy: Policy, scope: str, client: str, key: bytes | UUID | str) -> KeyIdentity:
    """Return the identity of a key. Raises TypeError, ValueError or CanonicalError for a wrong argument."""
    raw = UUID(key).bytes if isinstance(key, str) else key.bytes if isinstance(key, UUID) else key
    if type(raw) is not bytes:
        raise TypeError(f"a key is bytes or a UUID, not {type(key).__name__}")
    check_text(scope, "$.scope")
    check_text(client, "$.client")
    return (policy.name, scope, client if policy.client_sequence else "", raw)
