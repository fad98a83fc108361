"""Contract tests for reads: pages of a lane, of partitions and of a stream, by cursor."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, SetCursor, Settings, Submission
from oncelog.errors import HistoryChangedError
from oncelog.storage.store import Consumer, Query, RecordView, to_record_view
from oncelog.testing.contract.driver import Contract, StoreDriver, list_positions
from oncelog.testing.contract.writes import ORGANISATION, event, transaction

EVENT_COUNT = 12


def encode_views(views: Sequence[RecordView]) -> bytes:
    """Encode a non-empty list of record views so that a test can compare them."""
    assert views
    return repr(list(views)).encode()


class ReadContract(Contract):
    """Reads of records."""

    @contextmanager
    def open_filled(self, tmp_path: Path) -> Iterator[StoreDriver]:
        """Open a log of 12 events.

        Partition p contains the events at even positions, q those at multiples of 3, and r all events.
        """
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            for position in range(1, EVENT_COUNT + 1):
                named = [name for name, every in (("p", 2), ("q", 3), ("r", 1)) if position % every == 0]
                log(event(position, "x" * 10, partitions=tuple(named)))
                log(transaction(position, (position + 1) // 2, scope=("org/2", ORGANISATION)[position % 2]))
            yield log

    def test_lane_is_read_in_order_with_any_page_size(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for limit in (1, 2, 5, 11, 12, 13):
                assert list_positions(log.read_all(limit=limit)) == [*range(1, 13)]
            assert {record.lane for record in log.read_all()} == {0}

    def test_one_or_several_partitions_can_be_read(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for limit in (1, 2, 3, 100):
                assert list_positions(log.read_all(partitions=("p",), limit=limit)) == [2, 4, 6, 8, 10, 12]
                assert list_positions(log.read_all(partitions=("q",), limit=limit)) == [3, 6, 9, 12]
                assert list_positions(log.read_all(partitions=("q", "p"), limit=limit)) == [2, 3, 4, 6, 8, 9, 10, 12]
                assert list_positions(log.read_all(partitions=("p", "none", "q", "r"), limit=limit)) == [*range(1, 13)]
            assert log.read_all(partitions=("none",)) == []
            assert log.read_all(partitions=("p",), lane=1) == []

    def test_stream_is_read_by_its_sequence(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            for number in range(1, 6):
                log(transaction(number, number))
                log(transaction(number, number, scope="org/2"))
            for limit in (1, 2, 100):
                records = log.read_all(stream="org/2", limit=limit)
                assert [(record.scope, record.sequence) for record in records] == [
                    ("org/2", number) for number in range(1, 6)
                ]
                assert list_positions(records) == [2, 4, 6, 8, 10]
            page = log.read_page(stream="org/2", after=2, upto=4)
            assert ([record.sequence for record in page.records], page.next, page.upto, page.newest) == (
                [3, 4],
                4,
                4,
                5,
            )
            empty = log.read_page(stream="nobody")
            assert (empty.records, empty.next, empty.upto, empty.has_more, empty.newest) == ([], 0, 0, False, 0)

    def test_cursor_is_exclusive_and_has_more_is_exact(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for after in range(EVENT_COUNT + 1):
                for limit in (1, 3, 12):
                    page = log.read_page(after=after, limit=limit)
                    assert list_positions(page.records) == [*range(after + 1, min(12, after + limit) + 1)]
                    assert page.has_more is (after + limit < 12)
                    assert (page.next, page.newest, page.upto) == (min(12, after + limit), 12, 12)

    def test_has_more_refers_to_matching_records(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            first = log.read_page(partitions=("q",), limit=3)
            assert (list_positions(first.records), first.has_more, first.next) == ([3, 6, 9], True, 9)
            last = log.read_page(partitions=("q",), limit=4)
            assert (list_positions(last.records), last.has_more, last.next) == ([3, 6, 9, 12], False, 12)
            two = log.read_page(partitions=("q", "p"), limit=3)
            assert (list_positions(two.records), two.has_more, two.next) == ([2, 3, 4], True, 4)

    def test_cursor_after_the_last_page_is_the_upper_bound(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for partitions in (("none",), ("none", "nor this")):
                page = log.read_page(partitions=partitions, after=3)
                assert (page.records, page.next, page.upto, page.has_more) == ([], 12, 12, False)
            page = log.read_page(partitions=("q",), after=6, upto=11)
            assert (list_positions(page.records), page.next, page.upto, page.has_more) == ([9], 11, 11, False)

    def test_upper_bound_ends_reading_while_the_log_grows(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            page = log.read_page(limit=10)
            log(event(100))
            rest = log.read_page(after=page.next, upto=page.upto)
            assert (list_positions(rest.records), rest.has_more, rest.next, rest.newest) == ([11, 12], False, 12, 13)
            beyond = log.read_page(upto=1000, after=12)
            assert (list_positions(beyond.records), beyond.upto, beyond.next) == ([13], 13, 13)
            behind = log.read_page(after=5, upto=3)
            assert (behind.records, behind.next, behind.has_more) == ([], 5, False)

    def test_byte_limit_shortens_a_page_but_never_empties_it(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for bytes_max, expected in ((0, 1), (9, 1), (10, 1), (19, 1), (20, 2), (25, 2), (120, 12)):
                page = log.read_page(bytes_max=bytes_max)
                assert list_positions(page.records) == [*range(1, expected + 1)]
                assert (page.has_more, page.next) == (expected < 12, expected)
                assert list_positions(log.read_all(bytes_max=bytes_max)) == [*range(1, 13)]
                assert list_positions(log.read_all(bytes_max=bytes_max, partitions=("p", "q"))) == [
                    2,
                    3,
                    4,
                    6,
                    8,
                    9,
                    10,
                    12,
                ]

    def test_numbers_out_of_range_are_clamped(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            for limit in (0, -1):
                page = log.read_page(limit=limit)
                assert (list_positions(page.records), page.next, page.has_more) == ([1], 1, True)
            for lane in (0, 1):
                page = log.read_page(lane=lane, after=-5, limit=1)
                assert [(record.lane, record.position) for record in page.records] == [(lane, 1)]
            assert log.read_page(upto=-1).records == []
            assert log.read_page(lane=7).records == []

    def test_cursor_ahead_of_the_log_raises_history_changed(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            queries = [(Query(after=13), 12), (Query(after=13, partitions=("p",)), 12), (Query(lane=5, after=1), 0)]
            queries += [(Query(stream=ORGANISATION, after=1000), log.read_page(stream=ORGANISATION).newest)]
            for query, newest in queries:
                error = log.catch_error(log.store.read(query))
                assert isinstance(error, HistoryChangedError)
                assert (error.epoch, error.newest) == (log.store.epoch, newest)

    def test_empty_log_returns_an_empty_page(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            page = log.read_page()
            assert (page.records, page.next, page.upto, page.has_more, page.newest) == ([], 0, 0, False, 0)
            assert log.heads() == {}

    def test_views_equal_the_records_of_one_policy(self, tmp_path: Path) -> None:
        other = replace(EVENTS, name="other", key_bytes=(1, 64))
        with self.open_filled(tmp_path) as log:
            log.run(log.store.declare([other]))
            binary = Submission(
                policy=other, scope="s", key=b"k", fingerprint=b"f", body=b"\xff\x00", partitions=("p",)
            )
            verdicts = log.commit_items(
                binary,
                event(13, '{"é":"\U0001f600"}', partitions=("p", "q"), client="ü\n"),
                event(14, partitions=("q",)),
                event(15, "y" * 60, partitions=("p",)),
            )
            assert all(isinstance(verdict, Committed) for verdict in verdicts), verdicts
            log.run(log.store.erase(0, [15]))
            for partitions in (("p",), ("q",), ("p", "q"), ("none",), ("none", "q"), ()):
                expected = [
                    to_record_view(one) for one in log.read_all(partitions=partitions) if one.policy == "events"
                ]
                for limit in (1, 2, 3, 5, 100):
                    for bytes_max in (1, 25, 10_000):
                        found = self._read_views(log, partitions=partitions, limit=limit, bytes_max=bytes_max)
                        assert found == expected
            texts = [event(20 + number, "漢" * 20, partitions=("cjk",)) for number in range(3)]
            log.commit_items(*texts)
            page = log.run(log.store.read_views(Query(partitions=("cjk",), bytes_max=120), "events", encode_views))
            assert page.count == 2  # 60 bytes each
            page = log.run(
                log.store.read_views(Query(partitions=("q",), after=4, upto=9, limit=1), "events", encode_views)
            )
            assert (page.count, page.next, page.upto, page.has_more, page.newest) == (1, 6, 9, True, 19)
            empty = log.run(log.store.read_views(Query(partitions=("none",)), "events", encode_views))
            assert (empty.encoded, empty.count, empty.next, empty.has_more) == ([], 0, 19, False)
            error = log.catch_error(log.store.read_views(Query(after=20, partitions=("p",)), "events", encode_views))
            assert isinstance(error, HistoryChangedError)

    def test_pages_of_views_respect_any_limit(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.commit_items(*(event(number, partitions=("p", "q")[: 1 + number % 2]) for number in range(1, 306)))
            for partitions in (("p",), ("p", "q")):
                for limit in (99, 100, 101, 200, 304, 305, 306):
                    page = log.run(
                        log.store.read_views(Query(partitions=partitions, limit=limit), "events", encode_views)
                    )
                    assert (page.count, page.has_more, page.next) == (min(limit, 305), limit < 305, min(limit, 305))
                    assert len(self._read_views(log, partitions=partitions, limit=limit)) == 305

    def test_records_of_other_policies_do_not_end_a_page_of_views(self, tmp_path: Path) -> None:
        other = replace(EVENTS, name="other")
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.run(log.store.declare([other]))
            events = [event(number, partitions=("p",)) for number in range(1, 401)]
            log.commit_items(*(replace(item, policy=other) if place % 4 else item for place, item in enumerate(events)))
            for partitions in (("p",), ("p", "q"), ()):
                for limit in (1, 20, 70, 99, 100, 101):
                    views = self._read_views(log, partitions=partitions, limit=limit)
                    assert [view[0] for view in views] == list(range(1, 401, 4))

    @staticmethod
    def _read_views(log: StoreDriver, **query: Any) -> list[RecordView]:
        """Read all pages and check the count of each."""
        found: list[RecordView] = []
        after, has_more = 0, True
        while has_more:
            page = log.run(log.store.read_views(Query(after=after, **query), "events", encode_views))
            views = [view for part in page.encoded for view in ast.literal_eval(part.decode())]
            assert len(views) == page.count
            assert page.count or not page.has_more or len(query.get("partitions", ())) != 1
            found += views
            after, has_more = page.next, page.has_more
        return found

    def test_consumers_store_cursors_and_report_their_lag(self, tmp_path: Path) -> None:
        with self.open_filled(tmp_path) as log:
            newest = log.read_page(stream="org/2").newest
            log.commit_items(SetCursor("mail", 5), SetCursor("index", 12), SetCursor("mail", 1, scope="org/2"))
            log.reopen()
            assert log.run(log.store.consumers()) == [
                Consumer("", "index", 12, 0),
                Consumer("", "mail", 5, 7),
                Consumer("org/2", "mail", 1, newest - 1),
            ]
            log.commit_items(SetCursor("index", None), SetCursor("mail", 3), event(100))
            assert log.run(log.store.consumers())[0] == Consumer("", "mail", 5, 8)
            log(SetCursor("mail", 3, rewind=True))
            log.reopen()
            assert log.run(log.store.consumers())[0] == Consumer("", "mail", 3, 10)
