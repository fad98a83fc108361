"""Contract tests for reading a ledger: single entries, pages of entities and relationships, and blocks."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

from oncelog.core.operations import (
    Condition,
    DeleteEntity,
    Entity,
    Must,
    Operation,
    Relate,
    SetEntity,
    Unrelate,
)
from oncelog.core.read_set import ReadSet
from oncelog.core.tenants import Tenant
from oncelog.core.transactions import transaction as ledger_transaction
from oncelog.core.values import ClientEntry, Reason, Refused, Settings, Submission
from oncelog.storage.store import RelationshipQuery
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import ORGANISATION, event, key, transaction

OTHER = "org/2"
KEYS = ("a", "a/1", "a/2", "a0", "b", "\ud7ff", "\ud7ff1", "\ue000", "\uffff", "\U0010ffff", "\U0010ffff1")


def build_transaction(sequence: int, *operations: Operation, scope: str = ORGANISATION) -> Submission:
    """Return a transaction whose body is the canonical form of its operations."""
    return ledger_transaction(scope, "c1", sequence, operations)


def _build_foreign_transaction(sequence: int, *operations: Operation) -> Submission:
    """Return a transaction whose body is in the application's own format."""
    return transaction(sequence, sequence, *operations)


class LedgerContract(Contract):
    """Reads of ledger state and blocks."""

    @contextmanager
    def open_written(self, tmp_path: Path, *operations: Operation) -> Iterator[StoreDriver]:
        """Open a log with a transaction of these operations, and a transaction of another scope in the same lane."""
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log(transaction(1, 1, SetEntity("a", b"other"), Relate("doc", "owner", "other"), scope=OTHER))
            log(transaction(1, 1, *operations))
            yield log

    def test_side_state_contains_exactly_what_was_written(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, SetEntity("a", b"1"), Relate("doc", "owner", "ann")) as log:
            log(transaction(2, 2, SetEntity("a", b"2", expires_at_ms=log.clock.wall_ms() + 10), DeleteEntity("b")))
            read_set = ReadSet(
                lanes={1},
                streams={ORGANISATION},
                entities={(ORGANISATION, "a"), (ORGANISATION, "b"), (OTHER, "b")},
                relationships={(ORGANISATION, "doc", "owner", "ann"), (ORGANISATION, "doc", "owner", "other")},
                clients={("ledger", ORGANISATION, "c1"), ("ledger", ORGANISATION, "c2")},
            )
            for _ in range(2):
                found = log.run(log.store.side_state(read_set))
                snapshot = found.snapshot
                expires_at_ms = log.clock.wall_ms() + 10
                assert snapshot.entities == {(ORGANISATION, "a"): Entity(b"2", 2, expires_at_ms)}
                assert snapshot.relationships == {(ORGANISATION, "doc", "owner", "ann"): 1}
                assert snapshot.streams == {ORGANISATION: 2}
                entry = ClientEntry(2, log.clock.wall_ms(), key(2), b"x")
                assert snapshot.clients == {("ledger", ORGANISATION, "c1"): entry}
                assert snapshot.heads == log.heads()
                assert found.time_ms == log.clock.wall_ms() == found.get_time_ms(1)
                log.reopen()

    def test_side_state_of_an_empty_log_has_a_time(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            found = log.run(log.store.side_state(ReadSet(lanes={1}, entities={("nowhere", "a")})))
            assert (found.snapshot.entities, found.snapshot.heads[1].position) == ({}, 0)
            assert found.get_time_ms(1) == log.clock.wall_ms()

    def test_log_time_of_readers_stops_until_a_clock_jump_is_confirmed(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, SetEntity("a", b"1", expires_at_ms=2**50)) as log:
            before = log.clock.wall_ms()
            log.clock.jump(2**51)
            assert log.run(log.store.side_state(ReadSet(lanes={1}))).get_time_ms(1) == before
            assert [name for name, _ in log.run(log.store.entities(ORGANISATION, "", "", 9, 99)).entities] == ["a"]

    def test_entities_are_sorted_by_key(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, *(SetEntity(name, name.encode()) for name in reversed(KEYS))) as log:
            for limit in (1, 3, len(KEYS), 100):
                assert self._list_names(log, "", limit) == list(KEYS)
            page = log.run(log.store.entities(ORGANISATION, "", "a", 2, 99))
            assert page.entities == [("a/1", Entity(b"a/1", 1)), ("a/2", Entity(b"a/2", 1))]
            assert page.has_more
            assert log.run(log.store.entities("nowhere", "", "", 9, 99)).entities == []

    def test_prefix_query_works_for_any_last_character(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, *(SetEntity(name, b"") for name in KEYS)) as log:
            for prefix in (*KEYS, "a/", "none"):
                wanted = [name for name in KEYS if name.startswith(prefix)]
                assert self._list_names(log, prefix, 2) == wanted, prefix

    def _list_names(self, log: StoreDriver, prefix: str, limit: int) -> list[str]:
        names: list[str] = []
        while True:
            page = log.run(log.store.entities(ORGANISATION, prefix, names[-1] if names else "", limit, 10**6))
            names += [name for name, _ in page.entities]
            if not page.has_more:
                return names

    def test_byte_limit_shortens_a_page_of_entities_but_never_empties_it(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, *(SetEntity(f"k{number:03}", bytes(10)) for number in range(200))) as log:
            for bytes_max, expected in ((0, 1), (9, 1), (10, 1), (19, 1), (20, 2), (25, 2), (1500, 150), (2000, 200)):
                page = log.run(log.store.entities(ORGANISATION, "", "", 500, bytes_max))
                assert (len(page.entities), page.has_more) == (expected, expected < 200)

    def test_expired_entities_are_not_returned(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            now_ms = log.clock.wall_ms()
            operations = [SetEntity(f"k{number}", b"", expires_at_ms=now_ms + number) for number in range(5)]
            log(transaction(1, 1, *operations, SetEntity("stays", b"")))
            for passed in range(6):
                page = log.run(log.store.entities(ORGANISATION, "", "", 99, 99))
                assert [name for name, _ in page.entities] == [*(f"k{one}" for one in range(passed + 1, 5)), "stays"]
                log.clock.advance(1)

    def test_erasing_a_record_empties_the_values_of_its_entities(self, tmp_path: Path) -> None:
        self._check_erased_values(tmp_path, build_transaction)

    def test_erasing_a_record_with_a_foreign_body_empties_the_values_of_its_entities(self, tmp_path: Path) -> None:
        self._check_erased_values(tmp_path, _build_foreign_transaction)

    def _check_erased_values(self, tmp_path: Path, make: Callable[..., Submission]) -> None:
        long = "k" * 1000
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log(make(1, SetEntity("a", b"1"), SetEntity("b", b"1", expires_at_ms=2**50), SetEntity(long, b"1")))
            log(make(2, SetEntity("a", b"2"), Relate("doc", "owner", "ann")))
            log(build_transaction(1, SetEntity("a", b"other"), scope=OTHER))
            log.run(log.store.erase(1, [1]))
            for _ in range(2):
                page = log.run(log.store.entities(ORGANISATION, "", "", 9, 99))
                assert page.entities == [
                    ("a", Entity(b"2", 2)),
                    ("b", Entity(b"", 1, 2**50, erased=True)),
                    (long, Entity(b"", 1, erased=True)),
                ]
                assert log.run(log.store.entities(OTHER, "", "", 9, 99)).entities == [("a", Entity(b"other", 1))]
                log.reopen()
            log.run(log.store.erase(1, [2]))
            read_set = ReadSet(lanes={1}, entities={(ORGANISATION, "a")})
            found = log.run(log.store.side_state(read_set)).snapshot.entities
            assert found == {(ORGANISATION, "a"): Entity(b"", 2, erased=True)}

    def test_erased_values_no_longer_count_as_bytes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.run(log.store.set_tenants([Tenant("org")]))
            log(build_transaction(1, SetEntity("a", bytes(100)), SetEntity("k" * 1000, bytes(50))))
            log(_build_foreign_transaction(2, SetEntity("b", bytes(30))))
            before = log.run(log.store.usage())[0][1].bytes
            log.run(log.store.erase(1, [1, 2]))
            kept = log.run(log.store.usage())[0][1].bytes
            assert kept <= before - 180
            log.run(log.store.set_tenants([]))
            log.run(log.store.set_tenants([Tenant("org")]))
            assert log.run(log.store.usage())[0][1].bytes == kept

    def test_erased_value_matches_no_expected_value_but_the_entity_exists(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log(build_transaction(1, SetEntity("a", b"1")))
            log.run(log.store.erase(1, [1]))
            for condition, reason in (
                (Condition(Must.HAVE_VALUE, value=b""), Reason.VALUE_MISMATCH),
                (Condition(Must.NOT_EXIST), Reason.KEY_EXISTS),
            ):
                verdict = log(build_transaction(2, SetEntity("a", b"2", condition=condition)))
                assert isinstance(verdict, Refused)
                assert (verdict.reason, verdict.current, verdict.value) == (reason, 1, b"")
            log(build_transaction(2, SetEntity("a", b"2", condition=Condition(Must.HAVE_VERSION, version=1))))
            assert log.run(log.store.entities(ORGANISATION, "", "", 9, 99)).entities == [("a", Entity(b"2", 2))]

    def test_relationships_are_found_by_any_combination_of_names(self, tmp_path: Path) -> None:
        everything = sorted(product(("doc", "doc1", "é"), ("owner", "reader"), ("ann", "bob", "\uffff", "\U0001f600")))
        with self.open_written(tmp_path, *(Relate(*names) for names in reversed(everything))) as log:
            log(transaction(2, 2, Unrelate("doc", "owner", "ann"), Relate("doc", "owner", "bob")))
            everything.remove(("doc", "owner", "ann"))
            for resource, relation, subject in product(("", "doc", "é"), ("", "reader"), ("", "ann", "\uffff")):
                if relation and not (resource or subject):
                    continue
                wanted = [
                    names
                    for names in everything
                    if all(
                        asked in ("", name) for asked, name in zip((resource, relation, subject), names, strict=True)
                    )
                ]
                for limit in (1, 2, 100):
                    query = RelationshipQuery(
                        scope=ORGANISATION, resource=resource, relation=relation, subject=subject, limit=limit
                    )
                    assert self._list_relationships(log, query) == wanted, query

    def _list_relationships(self, log: StoreDriver, query: RelationshipQuery) -> list[tuple[str, str, str]]:
        names: list[tuple[str, str, str]] = []
        while True:
            after = names[-1] if names else ("", "", "")
            asked = {name: getattr(query, name) for name in ("scope", "resource", "relation", "subject", "limit")}
            page = log.run(log.store.relationships(RelationshipQuery(**asked, after=after)))
            assert len(page.relationships) <= query.limit
            assert {version for *_, version in page.relationships} <= {1}
            names += [(resource, relation, subject) for resource, relation, subject, _ in page.relationships]
            if not page.has_more:
                return names

    def test_names_with_nul_return_empty_pages(self, tmp_path: Path) -> None:
        with self.open_written(tmp_path, SetEntity("a", b"1"), Relate("doc", "owner", "ann")) as log:
            store = log.store
            assert log.run(store.entities("a\0b", "", "", 9, 99)).entities == []
            assert log.run(store.entities(ORGANISATION, "a\0", "", 9, 99)).entities == []
            assert log.run(store.relationships(RelationshipQuery(scope="a\0b"))).relationships == []
            query = RelationshipQuery(scope=ORGANISATION, subject="\0")
            assert log.run(store.relationships(query)).relationships == []
            assert [one.positions for one in log.run(store.blocks(1, 0, 9, "a\0b"))] == [(), ()]

    def test_blocks_are_listed_by_height_with_positions_of_a_scope(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            for number in range(1, 8):
                scopes = (ORGANISATION, OTHER, ORGANISATION)[: number % 3 + 1]
                log.commit_items(
                    *(transaction(0, number, scope=scope, client=f"c{place}") for place, scope in enumerate(scopes))
                )
                log(event(number))
            found = log.run(log.store.blocks(1, 0, 100, ORGANISATION))
            assert [one.block.height for one in found] == [*range(1, log.heads()[1].height + 1)]
            for one, following in pairwise(found):
                assert following.block.previous == one.block.hash
            records = {
                record.position: record.height for record in log.read_all(lane=1) if record.scope == ORGANISATION
            }
            assert {position: one.block.height for one in found for position in one.positions} == records
            for after, limit in product(range(9), (1, 2, 99)):
                assert log.run(log.store.blocks(1, after, limit, ORGANISATION)) == found[after : after + limit]
            assert [one.positions for one in log.run(log.store.blocks(0, 0, 9, ORGANISATION))] == [()] * 7
