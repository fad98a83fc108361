"""Erases the values of entities with the records that set them."""

from collections.abc import Sequence
from typing import Any

from oncelog.stores.erasure import Content, row_of_values, values_of
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.tables import digest_of
from oncelog.stores.tenants import ErasedRow


async def erase_values(connection: Any, lane: int, contents: Sequence[Content]) -> list[ErasedRow]:
    """In the transaction that erases the records, behind the lock of their lane. Returns what tenants get back."""
    given_back = []
    for scope, versions, keys in values_of(contents):
        place = (lane, scope, versions)
        if keys is None:
            rows = await connection.fetch(SQL["erase_all_values"], *place)
        else:
            digests = {key: digest_of((scope, key)) for key in keys}
            short = [key for key, digest in digests.items() if digest is None]
            long = [digest for digest in digests.values() if digest is not None]
            rows = await connection.fetch(SQL["erase_values"], *place, short) if short else []
            rows += await connection.fetch(SQL["erase_long_values"], *place, long) if long else []
        given_back.append(row_of_values(scope, sum(row[0] for row in rows)))
    return given_back
