"""Lookups of a push use an index in PostgreSQL (DE-5). test_key_index checks SQLite."""

import re

import pytest
from msgspec.structs import replace

from databases import query
from oncelog.core.deltas import deltas_scope
from oncelog.core.merge import Op, RowDelta
from oncelog.core.policy import DELTAS
from oncelog.core.values import Committed, Mode, Replayed, Settings, Submission
from oncelog.engine.log import open_log
from oncelog.storage.postgres.statements import SQL

SCOPE = deltas_scope("shop")


def delta(number: int) -> Submission:
    key = number.to_bytes(32, "big")
    change = RowDelta(Op.UPDATE, "t", f"r{number:05}", "c", number, (("a", b"1"),), key)
    return Submission(policy=DELTAS, scope=SCOPE, key=key, fingerprint=b"UPDATE", body=b"{}", delta=change)


def explain(address: str, statement: str, *parameters: str) -> str:
    for number, parameter in reversed(list(enumerate(parameters, 1))):
        statement = statement.replace(f"${number}", parameter)
    return "\n".join(line for (line,) in query(address, f"EXPLAIN {statement}"))


@pytest.mark.rule("DE-5")
async def test_known_ids_and_row_pages_use_an_index(database: str) -> None:
    async with open_log(database, settings=Settings(lanes=1)) as log:
        for start in range(0, 4000, 2000):
            verdicts = await log.submit_many([delta(start + place) for place in range(2000)], Mode.ALL)
            assert all(isinstance(verdict, Committed) for verdict in verdicts)
        again = await log.submit(replace(delta(7), fingerprint=b"DELETE"))
        assert isinstance(again, Replayed)
    query(database, "ANALYZE")
    scope = f"'{SCOPE}'"
    plans = {
        "keys": explain(database, SQL["keys"], "ARRAY[1, 2, 3]"),
        "row_page": explain(database, SQL["row_page"], "1", scope, "'t'", "'r02000'", "50", "1000"),
        "row_page_of_table": explain(database, SQL["row_page_of_table"], "1", scope, "'t'", "'r02000'", "50", "1000"),
    }
    for name, plan in plans.items():
        assert "Seq Scan" not in plan, (name, plan)
        assert "Index" in plan, (name, plan)
        if name != "keys":
            # Short keys are read from their index in order and merged with a page of long keys.
            assert re.search(r"->  Limit [^\n]*\n *->  Index Scan using oncelog_rows_short", plan), (name, plan)
            assert "Merge Append" in plan, (name, plan)
