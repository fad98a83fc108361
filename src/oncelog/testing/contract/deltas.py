"""Contract tests for reading merged rows: pages of one table or all tables, including deleted rows."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from typing import Final

from oncelog.core.merge import Op, Row, RowDelta
from oncelog.core.policy import DELTAS, FOLD_POLICY
from oncelog.core.read_set import ReadSet
from oncelog.core.rules.compaction import FoldedRow, decode_fold, row_digest
from oncelog.core.values import Applied, DropTombstones, FoldRows, Settings, Submission, Tombstone
from oncelog.storage.store import Query
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import GATEWAY, key

OTHER: Final = "gateway/2"
TABLES: Final = ("A", "Z", "_", "a", "a_b", "aa")
ROW_IDS: Final = (" ", "0", "10", "9", "A", "a", "a a", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff")
ALL_PLACES: Final = tuple(product(TABLES, ROW_IDS))
"""Places in code point order, which is neither UTF-16 order nor alphabetical order."""
BYTES_MAX: Final = 2**20

Place = tuple[str, str]


class DeltasContract(Contract):
    """Reads of merged rows."""

    @contextmanager
    def open_merged(self, tmp_path: Path, *places: Place, value: bytes = b"1") -> Iterator[StoreDriver]:
        """Open a log with a row at each place, in reverse order, and a row of another scope in the same lane."""
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            numbers = count(1)
            for table, row_id in (*reversed(places), ("a", "another's")):
                scope = OTHER if row_id == "another's" else GATEWAY
                assert_committed(log(_build_change(next(numbers), table, row_id, scope=scope, value=value)))
            yield log

    def test_rows_are_sorted_by_table_and_row_id_in_code_point_order(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, *ALL_PLACES) as log:
            for limit in (1, 7, len(ALL_PLACES), 1000):
                assert self._list_places(log, "", limit) == list(ALL_PLACES)
            log.reopen()
            assert self._list_places(log, "", 1000) == list(ALL_PLACES)

    def test_rows_of_one_table_exclude_other_tables(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, *ALL_PLACES) as log:
            for table, limit in product((*TABLES, "B", "aaa"), (1, 5, 1000)):
                wanted = [place for place in ALL_PLACES if place[0] == table]
                assert self._list_places(log, table, limit) == wanted, table

    def _list_places(self, log: StoreDriver, table: str, limit: int) -> list[Place]:
        places: list[Place] = []
        while True:
            after = places[-1] if places else (table, "")
            page = log.run(log.store.rows(GATEWAY, table, after, limit, BYTES_MAX))
            assert len(page.rows) <= limit
            places += [(name, row_id) for name, row_id, _ in page.rows]
            if not page.has_more:
                return places
            assert page.rows
            assert len(places) <= len(ALL_PLACES)  # stops an endless loop

    def test_page_starts_after_any_place_even_without_a_row(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, *ALL_PLACES) as log:
            for after in (("", ""), ("A", ""), ("A", "0"), ("A", "00"), ("B", "zz"), ("a", "\uffff"), ("zz", "")):
                page = log.run(log.store.rows(GATEWAY, "", after, 3, BYTES_MAX))
                following = [place for place in ALL_PLACES if place > after]
                assert [(name, row_id) for name, row_id, _ in page.rows] == following[:3], after
                assert page.has_more == (len(following) > 3)

    def test_has_more_of_a_page_of_rows_is_exact(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, ("a", "1"), ("a", "2"), ("b", "1")) as log:
            for table, limit, expected in (("", 2, True), ("", 3, False), ("a", 1, True), ("a", 2, False)):
                assert log.run(log.store.rows(GATEWAY, table, (table, ""), limit, BYTES_MAX)).has_more == expected

    def test_byte_limit_shortens_a_page_of_rows_but_never_empties_it(self, tmp_path: Path) -> None:
        places = [("a", f"r{number:03}") for number in range(60)]
        with self.open_merged(tmp_path, *places, value=b'"%b"' % (b"x" * 1000)) as log:
            for table, bytes_max in product(("", "a"), (0, 1, 999, 5000, 20_000)):
                found: list[Place] = []
                longest = 0
                while True:
                    after = found[-1] if found else (table, "")
                    page = log.run(log.store.rows(GATEWAY, table, after, 500, bytes_max))
                    found += [(name, row_id) for name, row_id, _ in page.rows]
                    longest = max(longest, len(page.rows))
                    if not page.has_more:
                        break
                    assert page.rows
                    assert len(found) <= len(places)
                assert found == places
                assert longest < len(places)

    def test_rows_contain_merged_values_and_deleted_rows(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, ("a", "1"), ("a", "2")) as log:  # the first place is the second write
            assert_committed(log(_build_change(4, "a", "2", op=Op.DELETE, clock=9)))
            assert_committed(log(_build_change(5, "a", "3", op=Op.DELETE, clock=7)))
            kept = _build_stamp(2, 2)
            expected = [
                ("a", "1", Row({"x": (b"1", kept)}, kept)),
                ("a", "2", Row({}, _build_stamp(1, 1), _build_stamp(9, 4))),
                ("a", "3", Row(deleted=_build_stamp(7, 5))),
            ]
            for _ in range(2):
                assert log.run(log.store.rows(GATEWAY, "a", ("a", ""), 10, BYTES_MAX)).rows == expected
                assert log.run(log.store.rows(GATEWAY, "", ("", ""), 10, BYTES_MAX)).rows == expected
                log.reopen()

    def test_dropped_tombstones_leave_a_horizon(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, ("a", "1"), ("a", "2")) as log:
            assert_committed(log(_build_change(4, "a", "2", op=Op.DELETE, clock=9)))
            assert_committed(log(_build_change(5, "a", "3", op=Op.DELETE, clock=7)))
            read_set = ReadSet(lanes={1}, horizons={GATEWAY, OTHER})
            assert log.run(log.store.side_state(read_set)).snapshot.horizons == {}
            tombstones = (Tombstone("a", "2", _build_stamp(9, 4), 3, 0), Tombstone("a", "3", _build_stamp(7, 5), 4, 0))
            assert log(DropTombstones(GATEWAY, tombstones, 0, ())) == Applied(changed=True, count=2)
            assert_committed(log(_build_change(6, "a", "3", clock=8)))  # loses to the horizon and gets a tombstone
            assert_committed(log(_build_change(7, "a", "4", clock=11)))
            for _ in range(2):
                assert self._list_places(log, "a", 10) == [("a", "1"), ("a", "3"), ("a", "4")]
                assert log.run(log.store.side_state(read_set)).snapshot.horizons == {GATEWAY: 10}
                log.reopen()

    def test_fold_record_has_digests_of_the_current_rows(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, ("a", "1"), ("a", "2")) as log:
            fold = FoldRows(GATEWAY, ((1, 2),), (("a", "1"), ("a", "2"), ("a", "none")))
            assert log(fold) == Applied(changed=True, count=3)
            rows = {row[:2]: row[2] for row in log.run(log.store.rows(GATEWAY, "", ("", ""), 10, BYTES_MAX)).rows}
            record = log.run(log.store.read(Query(lane=1, limit=100))).records[-1]
            assert (record.policy, record.sequence, record.scope) == (FOLD_POLICY, 0, GATEWAY)
            found = decode_fold(record)
            newest = log.run(log.store.side_state(ReadSet(lanes={1}, streams={GATEWAY}))).snapshot.streams[GATEWAY]
            assert (found.scope, found.sequence, found.deltas) == (GATEWAY, newest, ((1, 2),))
            assert found.rows == (
                FoldedRow("a", "1", row_digest(rows["a", "1"])),
                FoldedRow("a", "2", row_digest(rows["a", "2"])),
                FoldedRow("a", "none", ""),
            )
            assert len({row.digest for row in found.rows}) == 3

    def test_horizon_holds_64_bits(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.clock.advance((2**64 - 2 >> 16) - log.clock.wall_ms())
            assert_committed(log(_build_change(1, "a", "1", op=Op.DELETE, clock=2**64 - 2)))
            dropped = DropTombstones(GATEWAY, (Tombstone("a", "1", _build_stamp(2**64 - 2, 1), 1, 0),), 0, ())
            assert log(dropped) == Applied(changed=True, count=1)
            log.reopen()
            read_set = ReadSet(lanes={1}, horizons={GATEWAY})
            assert log.run(log.store.side_state(read_set)).snapshot.horizons == {GATEWAY: 2**64 - 1}

    def test_unknown_scopes_and_names_with_nul_have_no_rows(self, tmp_path: Path) -> None:
        with self.open_merged(tmp_path, ("a", "1")) as log:
            store = log.store
            (other,) = log.run(store.rows(OTHER, "", ("", ""), 10, BYTES_MAX)).rows
            assert other[:2] == ("a", "another's")
            for scope, table in (("nowhere", ""), ("a\0b", ""), ("a\0b", "a"), (GATEWAY, "a\0")):
                page = log.run(store.rows(scope, table, (table, ""), 10, BYTES_MAX))
                assert (page.rows, page.has_more) == ([], False)


def _build_change(
    number: int,
    table: str,
    row_id: str,
    *,
    scope: str = GATEWAY,
    op: Op = Op.UPDATE,
    clock: int | None = None,
    value: bytes = b"1",
) -> Submission:
    columns = () if op is Op.DELETE else (("x", value),)
    change = RowDelta(op, table, row_id, "c1", number if clock is None else clock, columns, key(number, 32))
    return Submission(policy=DELTAS, scope=scope, key=key(number, 32), fingerprint=b"", delta=change)


def _build_stamp(clock: int, number: int) -> tuple[int, bytes, bytes]:
    return (clock, "c1".encode("utf-16-be"), key(number, 32))
