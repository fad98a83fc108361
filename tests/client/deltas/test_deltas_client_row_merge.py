"""Joining partial rows gives the same result as merging all deltas, for any partition of the deltas and any order."""

from random import Random

import pytest

from oncelog.client.deltas.store import get_newest_hlc, join_rows
from oncelog.core.merge import Row, RowDelta, extract, merge


def deltas_of(chance: Random) -> list[RowDelta]:
    made = []
    for _ in range(chance.randint(1, 8)):
        names = {"client_id": chance.choice("ab"), "hlc": chance.randint(1, 9), "table": "t", "row_id": "1"}
        if chance.random() < 0.3:
            one = extract({}, None, **names)  # type: ignore[arg-type]
        else:
            columns = {name: chance.randint(0, 3) for name in chance.sample("xyz", chance.randint(0, 3))}
            one = extract(None, columns, **names)  # type: ignore[arg-type]
        assert one is not None
        made.append(one)
    return made


def row_of(deltas: list[RowDelta]) -> Row:
    row = Row()
    for one in deltas:
        row = merge(row, one)
    return row


@pytest.mark.rule("DE-7")
def test_join_of_partial_rows_equals_the_merge_of_all_deltas() -> None:
    for seed in range(3000):
        chance = Random(seed)
        deltas = deltas_of(chance)
        part = [one for one in deltas if chance.random() < 0.6]
        other = [one for one in deltas if one not in part or chance.random() < 0.3]
        ours, theirs, whole = row_of(part), row_of(other), row_of(deltas)
        assert join_rows(ours, theirs) == join_rows(theirs, ours) == whole, seed
        assert join_rows(whole, ours) is whole, seed
        assert get_newest_hlc(whole) == max(one.hlc for one in deltas), seed
    assert get_newest_hlc(Row()) < 0
