"""Tenants of a log in a file: who they are, what they have, and what they get back. All of it inside a transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.core.tenants import Tenant, Usage
from oncelog.stores.sqlite.index import lane_and_position, place_of
from oncelog.stores.sqlite.reading import heads
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.tenants import (
    COUNT_ROWS,
    USAGE_VERSION,
    Count,
    ErasedRow,
    Seen,
    SizeRow,
    given_back,
    list_of,
    size_row,
    tenants_of,
)


def seen(connection: Any) -> Seen:
    """How the log stands, for those who begin to count."""
    text, version = connection.execute(SQL["tenants"]).fetchone()
    erasures = connection.execute(SQL["state"]).fetchone()[1]
    return Seen(text, erasures, {lane: head.position for lane, head in heads(connection).items()}, version)


def usage(connection: Any) -> list[tuple[Tenant, Usage]]:
    """What each tenant has, by prefix."""
    text = connection.execute(SQL["tenants"]).fetchone()[0]
    known = {row[0]: Usage(*row[1:]) for row in connection.execute(SQL["usage"])}
    return [(tenant, known.get(tenant.prefix, Usage())) for tenant in list_of(text)]


def sizes(connection: Any, lane: int, after: int, upto: int) -> list[SizeRow]:
    """A page of what records have, in the order of their places."""
    bounds = (place_of(lane, after), place_of(lane, upto), COUNT_ROWS)
    return [size_row(row) for row in connection.execute(SQL["record_sizes"], bounds)]


def replace(connection: Any, text: str | None, count: Count, begun: Seen, *, is_last: bool) -> bool:
    """Counts what has come since, and keeps them. False if the log is not as it was when the counting began."""
    now = seen(connection)
    reached: Mapping[int, int] = begun.positions
    if (now.text, now.version, now.erasures) != (begun.text, begun.version, begun.erasures):
        if (now.text, now.version) != (begun.text, begun.version) or not is_last:
            return False
        count.begin_again()
        reached = {}
    for lane, newest in now.positions.items() if count.is_needed else ():
        after = reached.get(lane, 0)
        while rows := sizes(connection, lane, after, newest):
            count.add(rows)
            after = lane_and_position(rows[-1][0])[1]
    if count.is_needed:
        count.add_state(connection.execute(SQL["state_sizes"]))
        count.add_members(connection.execute(SQL["member_sizes"]))
    connection.execute(SQL["set_tenants"], (text, USAGE_VERSION))
    connection.executemany(SQL["forget_usage"], [(prefix,) for prefix in count.gone])
    saved = [(prefix, one.bytes, one.records) for prefix, one in count.usage.items()]
    connection.executemany(SQL["begin_usage"], saved)
    return True


def give_back(connection: Any, erased: Sequence[ErasedRow]) -> None:
    """Bodies are being erased: their tenants have less."""
    tenants = tenants_of(connection.execute(SQL["tenants"]).fetchone()[0])
    if tenants is None:
        return
    known = {row[0]: Usage(*row[1:]) for row in connection.execute(SQL["usage"])}
    left = given_back(known, tenants, erased)
    connection.executemany(SQL["set_bytes"], [(one.bytes, prefix) for prefix, one in left.items()])
