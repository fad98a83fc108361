"""Erases the values of entities with the records that set them."""

from collections.abc import Sequence
from typing import Any

from oncelog.storage.erasure import RecordContent, build_erased_row, find_erased_values
from oncelog.storage.postgres.side_state_tables import compute_digest
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.tenants import ErasedRow


async def erase_values(connection: Any, lane: int, contents: Sequence[RecordContent]) -> list[ErasedRow]:
    """In the transaction that erases the records, behind the lock of their lane. Returns what tenants get back."""
    given_back = []
    for scope, versions, keys in find_erased_values(contents):
        place = (lane, scope, versions)
        if keys is None:
            rows = await connection.fetch(SQL["erase_all_values"], *place)
        else:
            digests = {key: compute_digest((scope, key)) for key in keys}
            short = [key for key, digest in digests.items() if digest is None]
            long = [digest for digest in digests.values() if digest is not None]
            rows = await connection.fetch(SQL["erase_values"], *place, short) if short else []
            rows += await connection.fetch(SQL["erase_long_values"], *place, long) if long else []
        given_back.append(build_erased_row(scope, sum(row[0] for row in rows)))
    return given_back
