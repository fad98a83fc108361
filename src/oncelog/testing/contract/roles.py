"""Contract tests for roles: owners, inheritance, and limits on new streams and members."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path

from msgspec.structs import replace

from oncelog.core.rules.audit import (
    APPLICATION_ACTOR,
    MEMBER_ADDED,
    MEMBER_REMOVED,
    MEMBER_ROLE_CHANGED,
    decode_audit_entry,
)
from oncelog.core.tenants import Tenant
from oncelog.core.values import Acknowledge, Applied, Item, Mode, OpenStream, Rate, Reason, Role, SetMember, Settings
from oncelog.storage.side_state import ACKNOWLEDGEMENT, MEMBERSHIP
from oncelog.storage.store import MemberChange
from oncelog.testing.contract.assertions import assert_committed, assert_refused
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import CHANNEL, message

CHANGED = Applied(changed=True)
UNCHANGED = Applied(changed=False)


class RolesContract(Contract):
    """How roles are stored, inherited, and reported after changes."""

    def test_creator_becomes_owner_and_can_add_owners(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob", actor="user:ann"))
            log.reopen()
            assert self._list_roles(log) == {"user:ann": Role.OWNER, "user:bob": Role.MEMBER}
            naming = SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.OWNER)
            assert [log(naming), log(naming)] == [CHANGED, UNCHANGED]
            log.reopen()
            assert self._list_roles(log) == {"user:ann": Role.OWNER, "user:bob": Role.OWNER}
            assert log(SetMember(CHANNEL, "user:ann", actor="user:bob", role=Role.MEMBER)) == CHANGED
            assert self._list_roles(log) == {"user:ann": Role.MEMBER, "user:bob": Role.OWNER}

    def test_plain_member_can_only_leave(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            names = ("user:bob", "user:eve")
            log.commit_items(OpenStream(CHANNEL, "user:ann"), *[SetMember(CHANNEL, name) for name in names])
            log.reopen()
            for item in (
                SetMember(CHANNEL, "user:ann", present=False, actor="user:eve"),
                SetMember(CHANNEL, "user:bob", present=False, actor="user:eve"),
                SetMember(CHANNEL, "user:zoe", actor="user:eve"),
                SetMember(CHANNEL, "user:bob", actor="user:eve"),
                SetMember(CHANNEL, "user:eve", actor="user:eve", role=Role.OWNER),
                SetMember(CHANNEL, "user:ann", actor="user:eve", role=Role.MEMBER),
            ):
                assert_refused(log(item), Reason.NOT_AN_OWNER)
            assert log(SetMember(CHANNEL, "user:eve", actor="user:eve")) == UNCHANGED
            assert log(SetMember(CHANNEL, "user:eve", present=False, actor="user:eve")) == CHANGED
            assert self._list_roles(log) == {"user:ann": Role.OWNER, "user:bob": Role.MEMBER}

    def test_retry_of_leaving_or_giving_up_a_role_changes_nothing(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob", role=Role.OWNER))
            demoting = SetMember(CHANNEL, "user:ann", actor="user:ann", role=Role.MEMBER)
            assert [log(demoting), log(demoting)] == [CHANGED, UNCHANGED]
            leaving = SetMember(CHANNEL, "user:ann", present=False, actor="user:ann")
            assert [log(leaving), log(leaving)] == [CHANGED, UNCHANGED]
            log.reopen()
            # The answer does not reveal which streams exist.
            for scope in (CHANNEL, "chat/none"):
                assert log(SetMember(scope, "user:eve", present=False, actor="user:eve")) == UNCHANGED
                assert_refused(
                    log(SetMember(scope, "user:eve", actor="user:eve", role=Role.MEMBER)), Reason.NOT_A_MEMBER
                )
            assert self._list_roles(log) == {"user:bob": Role.OWNER}

    def test_role_of_a_user_who_left_is_not_set(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            naming = SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.OWNER, only_if_member=True)
            assert [log(naming), log(naming)] == [CHANGED, UNCHANGED]
            log(SetMember(CHANNEL, "user:bob", present=False))
            log.reopen()
            assert assert_refused(log(naming), Reason.NOT_A_MEMBER).field == "member"
            assert self._list_roles(log) == {"user:ann": Role.OWNER}

    def test_oldest_member_inherits_when_the_last_owner_leaves(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            # Members join in an order that is neither alphabetical nor the order of removal.
            joining = ("user:m", "user:c", "user:x", "user:a", "user:b")
            log.commit_items(*[SetMember(CHANNEL, name) for name in joining], message(1, actor="user:x"))
            log.commit_items(Acknowledge(CHANNEL, "user:x", 1), SetMember(CHANNEL, "user:c", present=False))
            log(SetMember(CHANNEL, "user:c"))  # returns as the newest member
            log.reopen()
            assert log(SetMember(CHANNEL, "user:m", present=False, actor="user:m")) == CHANGED
            assert self._list_owners(log) == ["user:x"]
            log.reopen()
            # Several owners leave in one batch, in which the newest member joins.
            leaving = [SetMember(CHANNEL, name, present=False) for name in ("user:x", "user:a", "user:b")]
            assert log.commit_items(SetMember(CHANNEL, "user:0"), *leaving) == [CHANGED] * 4
            assert self._list_owners(log) == ["user:c"]
            assert log.commit_items(*[SetMember(CHANNEL, name, present=False) for name in ("user:c", "user:0")]) == [
                CHANGED,
                CHANGED,
            ]
            assert self._list_roles(log) == {}
            log.reopen()
            log.commit_items(SetMember(CHANNEL, "user:z"), SetMember(CHANNEL, "user:y"))
            assert self._list_roles(log) == {"user:y": Role.MEMBER, "user:z": Role.OWNER}

    def test_returning_owner_is_a_plain_member(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob", role=Role.OWNER))
            log.commit_items(
                SetMember(CHANNEL, "user:ann", present=False, actor="user:bob"),
                SetMember(CHANNEL, "user:ann", actor="user:bob"),
            )
            log.reopen()
            assert self._list_roles(log) == {"user:ann": Role.MEMBER, "user:bob": Role.OWNER}

    def test_last_owner_keeps_the_role_until_there_is_another(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            for actor in ("", "user:ann"):
                assert_refused(log(SetMember(CHANNEL, "user:ann", actor=actor, role=Role.MEMBER)), Reason.LAST_OWNER)
            swap = (
                SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.OWNER),
                SetMember(CHANNEL, "user:ann", actor="user:ann", role=Role.MEMBER),
            )
            assert log.commit_items(*swap, mode=Mode.ALL) == [CHANGED, CHANGED]
            log.reopen()
            assert self._list_owners(log) == ["user:bob"]

    def test_refused_request_changes_no_roles(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            leaving = SetMember(CHANNEL, "user:ann", present=False, actor="user:ann")
            adding = SetMember(CHANNEL, "user:eve", actor="user:ann")
            assert_refused(log.commit_items(leaving, adding, mode=Mode.ALL)[1], Reason.NOT_A_MEMBER)
            assert self._list_roles(log) == {"user:ann": Role.OWNER, "user:bob": Role.MEMBER}

    def test_role_changes_are_reported_with_acknowledgements(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"), message(1))
            log(Acknowledge(CHANNEL, "user:bob", 1))
            before = log.heads()[1].revision
            log.reopen()
            log(SetMember(CHANNEL, "user:ann", present=False))
            revision = log.heads()[1].revision
            assert log.run(log.store.member_changes(1, (before + 1, "", "", 0), 10)) == [
                MemberChange(revision, CHANNEL, "user:ann", MEMBERSHIP, False, 0, None),
                MemberChange(revision, CHANNEL, "user:bob", MEMBERSHIP, True, 1, Role.OWNER),
                MemberChange(revision, CHANNEL, "user:bob", ACKNOWLEDGEMENT, True, 1, None),
            ]

    def test_membership_changes_write_audit_records(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.commit_items(
                OpenStream(CHANNEL, "user:ann"),
                SetMember(CHANNEL, "user:bob", actor="user:ann"),
                SetMember(CHANNEL, "user:eve"),
                SetMember(CHANNEL, "user:bob", actor="user:ann"),  # changes nothing
            )
            first = assert_committed(log(message(1)))
            log(SetMember(CHANNEL, "user:ann", present=False, actor="user:bob"))  # refused
            log(SetMember(CHANNEL, "user:eve", actor="user:ann", role=Role.OWNER))
            second = assert_committed(log(message(2)))
            assert (first.sequence, second.sequence) == (1, 2), "audit records have no sequence"
            log(SetMember(CHANNEL, "user:eve", present=False, actor="user:ann"))
            log(SetMember(CHANNEL, "user:ann", present=False, actor="user:ann"))
            log.reopen()
            entries = [decode_audit_entry(record) for record in log.run(log.store.internal_records({}, 1000))]
            assert {entry.scope for entry in entries} == {CHANNEL}
            owner, member = {"role": "owner"}, {"role": "member"}
            assert [(entry.act, entry.actor, entry.target, entry.details) for entry in entries] == [
                (MEMBER_ADDED, "user:ann", "user:ann", owner),
                (MEMBER_ADDED, "user:ann", "user:bob", member),
                (MEMBER_ADDED, APPLICATION_ACTOR, "user:eve", member),
                (MEMBER_ROLE_CHANGED, "user:ann", "user:eve", owner),
                (MEMBER_REMOVED, "user:ann", "user:eve", {}),
                (MEMBER_REMOVED, "user:ann", "user:ann", {}),
                (MEMBER_ROLE_CHANGED, "user:ann", "user:bob", owner),
            ]

    def test_rate_limits_new_streams_of_a_member(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=4)) as log:
            rate = Rate(1, burst=2)
            opening = [OpenStream(f"chat/{number}", "user:ann", rate) for number in range(4)]
            assert log.commit_items(*opening[:2]) == [CHANGED, CHANGED]
            log.reopen()
            assert log.commit_items(*opening[:2]) == [UNCHANGED, UNCHANGED]  # retries take no token
            assert assert_refused(log(opening[2]), Reason.RATE_LIMITED).retry_after_ms == 1000
            assert log(OpenStream("chat/9", "user:bob", rate)) == CHANGED
            log.clock.advance(1000)
            # A refused request takes no token.
            bad = SetMember("chat/9", "user:ann", actor="user:ann")
            assert_refused(log.commit_items(opening[2], bad, mode=Mode.ALL)[1], Reason.NOT_A_MEMBER)
            log.reopen()
            assert log(opening[2]) == CHANGED
            assert_refused(log(opening[3]), Reason.RATE_LIMITED)

    def test_known_only_requests_can_only_remove_members(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=4)) as log:
            log.commit_items(OpenStream(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob", actor="user:ann"))
            before = log.run(log.store.internal_records({}, 1000))
            promote = SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.OWNER)
            for item in (
                OpenStream("chat/new", "user:ann"),
                OpenStream("chat/new", "user:ann", Rate(1, burst=1)),
                SetMember(CHANNEL, "user:eve", actor="user:ann"),
                promote,
            ):
                assert_refused(log(replace(item, known_only=True)), Reason.NOT_KNOWN)
            creator = OpenStream("chat/new", "user:ann", known_only=True)
            other = SetMember("chat/new", "user:bob", actor="user:ann", known_only=True)
            assert_refused(log.commit_items(creator, other, mode=Mode.ALL)[0], Reason.NOT_KNOWN)
            for known in (
                OpenStream(CHANNEL, "user:ann", known_only=True),
                SetMember(CHANNEL, "user:bob", actor="user:ann", known_only=True),
                SetMember(CHANNEL, "user:bob", actor="user:ann", role=Role.MEMBER, known_only=True),
            ):
                assert log(known) == UNCHANGED
            # Rights are checked before limits.
            assert_refused(log(SetMember(CHANNEL, "user:eve", actor="user:bob", known_only=True)), Reason.NOT_AN_OWNER)
            log.reopen()
            assert log.run(log.store.internal_records({}, 1000)) == before
            for name in ("user:bob", "user:ann"):
                assert log(SetMember(CHANNEL, name, present=False, actor=name, known_only=True)) == CHANGED
            assert log(SetMember(CHANNEL, "user:eve", known_only=True)) == CHANGED, "the application is exempt"

    def test_membership_changes_by_clients_use_the_tenant_rate(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=4)) as log:
            log.run(log.store.set_tenants([Tenant("chat", new_writes_per_second_max=2, new_writes_at_once_max=4)]))
            add = SetMember(CHANNEL, "user:bob", actor="user:ann")
            promote = replace(add, role=Role.OWNER)
            demote = replace(add, role=Role.MEMBER)
            assert [log(one) for one in (OpenStream(CHANNEL, "user:ann"), add, promote, demote)] == [CHANGED] * 4
            log.reopen()
            for one in (promote, replace(add, member="user:eve"), OpenStream("chat/2", "user:eve")):
                late = assert_refused(log(one), Reason.RATE_LIMITED)
                assert (late.tenant, late.field, late.limit) == ("chat", "new_writes_per_second_max", 2)
                assert late.retry_after_ms == 500
            assert log.commit_items(OpenStream(CHANNEL, "user:ann"), add, demote) == [UNCHANGED] * 3
            assert log(SetMember(CHANNEL, "user:bob", present=False, actor="user:ann")) == CHANGED
            assert log(SetMember(CHANNEL, "user:zoe")) == CHANGED, "the application is exempt"
            log.clock.advance(500)
            assert log(add) == CHANGED
            assert_refused(log(promote), Reason.RATE_LIMITED)
            assert_refused(log(message(1, actor="user:ann")), Reason.RATE_LIMITED)

    def test_stream_with_more_members_than_the_burst_is_admitted_as_a_whole(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=4)) as log:
            log.run(log.store.set_tenants([Tenant("chat", new_writes_per_second_max=2)]))
            members = [SetMember(CHANNEL, f"user:{number}", actor="user:ann") for number in range(4)]
            opening: list[Item] = [OpenStream(CHANNEL, "user:ann"), *members]
            assert log.commit_items(*opening, mode=Mode.ALL, is_admitted_whole=True) == [CHANGED] * 5
            assert log.commit_items(*opening, mode=Mode.ALL, is_admitted_whole=True) == [UNCHANGED] * 5
            more: list[Item] = [opening[0], SetMember(CHANNEL, "user:9", actor="user:ann")]
            skipped, late = log.commit_items(*more, mode=Mode.ALL, is_admitted_whole=True)
            assert assert_refused(late, Reason.RATE_LIMITED).retry_after_ms == 2000
            assert assert_refused(skipped, Reason.NOT_PROCESSED).index == 1
            log.clock.advance(2000)
            assert log.commit_items(*more, mode=Mode.ALL, is_admitted_whole=True) == [UNCHANGED, CHANGED]

    def _list_roles(self, log: StoreDriver) -> dict[str, Role]:
        members = log.run(log.store.members(CHANNEL, "", 100)).members
        for member in members:
            page = log.run(log.store.memberships(member.name, CHANNEL, "", 10))
            assert [membership.role for membership in page.memberships] == [member.role]
        return {member.name: member.role for member in members}

    def _list_owners(self, log: StoreDriver) -> list[str]:
        return [name for name, role in self._list_roles(log).items() if role is Role.OWNER]
