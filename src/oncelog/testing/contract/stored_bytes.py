"""Contract tests for storage quotas: names, members and side state are counted, and a recount gives the same total."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path
from typing import Final

from oncelog.core.merge import Op
from oncelog.core.operations import DeleteEntity, Entity, Relate, SetEntity, Unrelate
from oncelog.core.stored_bytes import entity_bytes, member_bytes, relationship_bytes, submission_bytes
from oncelog.core.tenants import Tenant
from oncelog.core.values import (
    Applied,
    DropTombstones,
    Item,
    Mode,
    OpenStream,
    Reason,
    Role,
    SetMember,
    Submission,
    Tombstone,
)
from oncelog.testing.contract.assertions import assert_committed, assert_refused
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.quotas import get_usage, set_tenants
from oncelog.testing.contract.writes import CHANNEL, GATEWAY, HOUR_MS, ORGANISATION, delta, event, message, transaction

LONG_MEMBER: Final = "ü" * 500


class StoredBytesContract(Contract):
    """Quotas count everything that a write stores."""

    def test_partition_names_count_as_bytes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            partitions = tuple(f"acme/{number:03}{'x' * 240}" for number in range(64))
            long = event(1, "", partitions=partitions)
            set_tenants(log, Tenant("acme", bytes_max=2000))
            late = assert_refused(log(long), Reason.QUOTA_EXCEEDED)
            assert (late.field, late.limit, late.current) == ("bytes_max", 2000, 0)
            assert_committed(log(event(1, "", partitions=partitions[:2])))
            assert get_usage(log)["acme"][0] > 2 * (len(partitions[0]) + len(partitions[1]))
            set_tenants(log, Tenant("acme"))
            assert_committed(log(event(2, "", partitions=partitions)))
            assert_recount_agrees(log)

    def test_members_count_as_records_and_bytes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("chat", records_max=3))
            # The audit records of the application's own acts are not counted.
            assert log(SetMember(CHANNEL, "user:ann")) == Applied(changed=True)
            assert log(SetMember(CHANNEL, LONG_MEMBER)) == Applied(changed=True)
            assert_committed(log(message(1)))
            log.reopen()
            for item in (SetMember(CHANNEL, "user:cyd"), OpenStream("chat/2", "user:ann"), message(2)):
                late = assert_refused(log(item), Reason.QUOTA_EXCEEDED)
                assert (late.tenant, late.field, late.limit, late.current) == ("chat", "records_max", 3, 3)
            assert log(OpenStream(CHANNEL, "user:ann")) == Applied(changed=False)
            members = member_bytes((CHANNEL, "user:ann")) + member_bytes((CHANNEL, LONG_MEMBER))
            assert get_usage(log) == {"chat": (members + submission_bytes(message(1)), 3)}
            set_tenants(log, Tenant("chat", bytes_max=get_usage(log)["chat"][0] + 300))
            assert (
                assert_refused(log(SetMember(CHANNEL, LONG_MEMBER + "2")), Reason.QUOTA_EXCEEDED).field == "bytes_max"
            )
            assert_recount_agrees(log)

    def test_removed_member_still_counts_and_can_be_added_again(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("chat", records_max=2))
            log.commit_items(SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            before = get_usage(log)
            assert log(SetMember(CHANNEL, "user:bob", present=False)) == Applied(changed=True)
            assert get_usage(log) == before
            assert_refused(log(SetMember(CHANNEL, "user:cyd")), Reason.QUOTA_EXCEEDED)
            log.reopen()
            assert log(SetMember(CHANNEL, "user:bob")) == Applied(changed=True)
            again = [SetMember(CHANNEL, "user:bob", present=present) for present in (False, True)]
            assert log.commit_items(*again) == [Applied(changed=True)] * 2
            assert get_usage(log) == before
            assert log(SetMember(CHANNEL, "user:bob", present=False)) == Applied(changed=True)
            assert_recount_agrees(log)

    def test_refused_member_rolls_back_the_whole_request(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("chat", records_max=2))
            items: list[Item] = [
                SetMember(CHANNEL, "user:ann"),
                SetMember(CHANNEL, "user:bob"),
                SetMember(CHANNEL, "user:cyd"),
            ]
            assert_refused(log.commit_items(*items, mode=Mode.ALL)[2], Reason.QUOTA_EXCEEDED)
            assert get_usage(log) == {"chat": (0, 0)}
            assert log.commit_items(*items[:2], mode=Mode.ALL) == [Applied(changed=True)] * 2
            assert get_usage(log)["chat"][1] == 2

    def test_quota_stops_a_loop_that_adds_and_removes_a_member(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("chat", records_max=9))
            log(OpenStream(CHANNEL, "user:ann"))
            add = SetMember(CHANNEL, "user:bob", actor="user:ann")
            remove = SetMember(CHANNEL, "user:bob", present=False, actor="user:ann")
            for _ in range(3):
                # The member counts once, and each addition or removal counts as an audit record.
                assert log(add) == Applied(changed=True)
                assert log(remove) == Applied(changed=True)
            assert get_usage(log)["chat"][1] == 9
            log.reopen()
            late = assert_refused(log(add), Reason.QUOTA_EXCEEDED)
            assert (late.tenant, late.field, late.limit, late.current) == ("chat", "records_max", 9, 9)
            assert log(remove) == Applied(changed=False)
            assert_recount_agrees(log)

    def test_full_tenant_refuses_role_changes_and_additions_by_clients_but_not_removals(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("chat"))
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            used, records = get_usage(log)["chat"]
            promote = SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.OWNER)
            for limit in (Tenant("chat", records_max=records), Tenant("chat", bytes_max=used + 255)):
                set_tenants(log, limit)
                for item in (promote, SetMember(CHANNEL, "user:cyd", actor="user:ann"), OpenStream("chat/2", "user:a")):
                    assert assert_refused(log(item), Reason.QUOTA_EXCEEDED).tenant == "chat"
                assert get_usage(log) == {"chat": (used, records)}
                assert log(SetMember(CHANNEL, "user:bob", actor="user:ann")) == Applied(changed=False)
            # There must be room for both the member and its audit record.
            set_tenants(log, Tenant("chat", records_max=records + 1))
            assert_refused(log(SetMember(CHANNEL, "user:cyd", actor="user:ann")), Reason.QUOTA_EXCEEDED)
            assert log(SetMember(CHANNEL, "user:bob", role=Role.OWNER)) == Applied(changed=True), (
                "the application is exempt"
            )
            assert log(SetMember(CHANNEL, "user:ann", present=False, actor="user:ann")) == Applied(changed=True)
            assert log(SetMember(CHANNEL, "user:bob", present=False, actor="user:bob")) == Applied(changed=True)
            assert get_usage(log)["chat"][1] == records + 2, "removals are counted"
            assert_recount_agrees(log)

    def test_entities_and_relationships_count_while_they_exist(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("org"), Tenant("org/2"))
            edge = Relate("document:ü", "viewer", "user:ann")
            written = [
                transaction(1, 1, SetEntity("a", b"12345"), SetEntity("a", b"1234567"), edge, edge),
                transaction(2, 2, SetEntity("a", b"123"), SetEntity("ü", b"")),
                transaction(3, 3, DeleteEntity("ü"), DeleteEntity("nothing"), edge),
            ]
            for one in written:
                assert_committed(log(one))
            log.reopen()
            state = entity_bytes((ORGANISATION, "a"), Entity(b"123", 2))
            state += relationship_bytes((ORGANISATION, edge.resource, edge.relation, edge.subject), 1)
            records = sum(map(submission_bytes, written))
            assert get_usage(log) == {"org": (records + state, 3), "org/2": (0, 0)}
            assert_recount_agrees(log)
            last = transaction(4, 4, DeleteEntity("a"), Unrelate(edge.resource, edge.relation, edge.subject))
            assert_committed(log(last))
            assert get_usage(log)["org"] == (records + submission_bytes(last), 4)

    def test_full_tenant_may_free_bytes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("org"))
            assert_committed(log(transaction(1, 1, SetEntity("a", b"x" * 2000))))
            used = get_usage(log)["org"][0]
            set_tenants(log, Tenant("org", bytes_max=used))
            late = assert_refused(log(transaction(2, 2, SetEntity("b", b"x"))), Reason.QUOTA_EXCEEDED)
            assert (late.tenant, late.field, late.limit, late.current) == ("org", "bytes_max", used, used)
            assert_committed(log(transaction(2, 2, DeleteEntity("a"))))
            assert_committed(log(transaction(3, 3, SetEntity("b", b"x"))))
            assert_recount_agrees(log)

    def test_expired_entity_counts_until_the_next_recount(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("org"))
            until_ms = log.clock.wall_ms() + HOUR_MS
            temporary = SetEntity("a", b"12345", expires_at_ms=until_ms)
            first, second = transaction(1, 1, temporary), transaction(2, 2, SetEntity("b", b"1"))
            assert_committed(log(first))
            assert_recount_agrees(log)
            log.clock.advance(HOUR_MS)
            assert_committed(log(second))
            with_expired = get_usage(log)["org"][0]
            set_tenants(log)
            set_tenants(log, Tenant("org"))
            names = len(ORGANISATION) + len("a")
            assert get_usage(log)["org"] == (with_expired - 64 - 2 * names - 5, 2), "a recount excludes it"

    def test_rows_count_including_the_stamps_of_their_columns(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("gateway"))
            columns = {f"c{number}": "1" for number in range(50)}
            wide, narrow = delta(1, 5, Op.INSERT, **columns), delta(2, 6, c0="2")
            assert_committed(log(wide))
            before = get_usage(log)["gateway"][0]
            assert_committed(log(narrow))
            assert get_usage(log)["gateway"][0] - before - submission_bytes(narrow) > 49 * 32, "49 columns got stamps"
            assert_recount_agrees(log)
            gone = delta(3, 7, Op.DELETE)
            assert_committed(log(gone))
            assert_committed(log(delta(4, 1, c0="9")))
            assert_recount_agrees(log)
            full = get_usage(log)["gateway"][0]
            assert log(DropTombstones(GATEWAY, (build_tombstone(gone),), 0, ())) == Applied(changed=True, count=1)
            assert get_usage(log)["gateway"][0] < full
            assert_recount_agrees(log)
            records = [wide, narrow, gone, delta(4, 1, c0="9")]
            assert get_usage(log)["gateway"] == (sum(map(submission_bytes, records)), 4)


def assert_recount_agrees(log: StoreDriver) -> None:
    """Recount all tenants and compare the result with the usage."""
    tenants = [tenant for tenant, _ in log.run(log.store.usage())]
    before = get_usage(log)
    set_tenants(log)
    set_tenants(log, *tenants)
    assert get_usage(log) == before


def build_tombstone(deleted: Submission) -> Tombstone:
    """Return the tombstone of a DELETE that was committed with sequence 3 and log time 0."""
    assert deleted.delta is not None
    return Tombstone(deleted.delta.table, deleted.delta.row_id, deleted.delta.stamp, 3, 0)
