"""Contract tests for members: opening streams, members of a stream, streams of a member, and membership changes."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path
from typing import Any, Final

from oncelog.core.values import Acknowledge, Applied, Mode, OpenStream, Rate, Reason, Role, SetMember, Settings
from oncelog.storage.side_state import ACKNOWLEDGEMENT, MEMBERSHIP
from oncelog.storage.store import MemberChange, MemberCursor, Membership
from oncelog.testing.contract.assertions import assert_committed, assert_refused
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import CHANNEL, message

NAMES: Final = (
    "user: ",
    "user:10",
    "user:9",
    "user:A",
    "user:a",
    "user:a'\"",
    "user:\ud7ff",
    "user:\ue000",
    "user:\U00010000",
)
"""Names in code point order."""


class MembersContract(Contract):
    """How members are stored, listed, and reported after changes."""

    def test_stream_is_opened_only_once(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            verdicts = log.commit_items(OpenStream(CHANNEL, "user:ann"), OpenStream(CHANNEL, "user:bob"))
            assert verdicts[0] == Applied(changed=True)
            assert_refused(verdicts[1], Reason.NOT_A_MEMBER)
            log.reopen()
            assert log(OpenStream(CHANNEL, "user:ann")) == Applied(changed=False)
            assert log(SetMember(CHANNEL, "user:ann", present=False, actor="user:ann")) == Applied(changed=True)
            log.reopen()
            for name in ("user:ann", "user:bob"):
                assert_refused(log(OpenStream(CHANNEL, name)), Reason.NOT_A_MEMBER)
            committed_elsewhere = log.commit_items(
                SetMember("chat/2", "user:eve"), message(1, "x", "user:eve", "chat/2")
            )
            assert assert_committed(committed_elsewhere[1]).sequence == 1
            assert_refused(log(OpenStream("chat/2", "user:bob")), Reason.NOT_A_MEMBER)

    def test_only_owners_change_members_and_all_mode_is_atomic(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            adding = [SetMember(CHANNEL, f"user:{number}", actor="user:ann") for number in range(3)]
            assert_refused(log.commit_items(*adding, mode=Mode.ALL)[0], Reason.NOT_A_MEMBER)
            made = log.commit_items(OpenStream(CHANNEL, "user:ann"), *adding, mode=Mode.ALL)
            assert made == [Applied(changed=True)] * 4
            log.reopen()
            assert_refused(log(SetMember(CHANNEL, "user:ann", present=False, actor="user:eve")), Reason.NOT_A_MEMBER)
            assert_refused(log(SetMember(CHANNEL, "user:ann", present=False, actor="user:1")), Reason.NOT_AN_OWNER)
            assert log(SetMember(CHANNEL, "user:ann", present=False, actor="user:ann")) == Applied(changed=True)
            assert_refused(log(SetMember(CHANNEL, "user:2", present=False, actor="user:ann")), Reason.NOT_A_MEMBER)
            assert self._list_members(log, CHANNEL, 10) == [("user:0", 0), ("user:1", 0), ("user:2", 0)]

    def test_members_are_listed_in_pages_with_their_acknowledgements(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.commit_items(*[SetMember(CHANNEL, name) for name in reversed(NAMES)], SetMember("chat/2", "user:z"))
            log.commit_items(message(1, "x", NAMES[0]), message(2, "x", NAMES[0]), Acknowledge(CHANNEL, NAMES[2], 2))
            log.reopen()
            expected = [(name, 2 if name == NAMES[2] else 0) for name in NAMES]
            for limit in (1, 4, len(NAMES), 100):
                assert self._list_members(log, CHANNEL, limit) == expected
            log(SetMember(CHANNEL, NAMES[2], present=False))
            assert NAMES[2] not in dict(self._list_members(log, CHANNEL, 100))
            assert self._list_members(log, "chat/none", 3) == []
            for odd in ("user:\0", "chat/\0"):
                assert log.run(log.store.members(odd, "", 3)).members == []

    def _list_members(self, log: StoreDriver, scope: str, limit: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        while True:
            page = log.run(log.store.members(scope, found[-1][0] if found else "", limit))
            assert len(page.members) <= limit
            found += [(member.name, member.acknowledged) for member in page.members]
            if not page.has_more:
                return found

    def test_streams_of_a_member_are_listed_in_pages(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=5)) as log:
            scopes = [f"chat/{number:02d}" for number in range(12)]
            log.commit_items(
                *[SetMember(scope, "user:ann") for scope in (*reversed(scopes), "chat", "chat0", "other/1")]
            )
            log.commit_items(SetMember("chat/zz", "user:bob"), message(1, "x", "user:ann", scopes[3]))
            log.commit_items(Acknowledge(scopes[3], "user:ann", 1), SetMember(scopes[5], "user:ann", present=False))
            log.reopen()
            expected = [
                Membership(scope, int(scope == scopes[3]), int(scope == scopes[3]), Role.OWNER)
                for scope in scopes
                if scope != scopes[5]
            ]
            for limit in (1, 5, 100):
                found: list[Membership] = []
                has_more = True
                while has_more:
                    after = found[-1].scope if found else ""
                    page = log.run(log.store.memberships("user:ann", "chat/", after, limit))
                    assert len(page.memberships) <= limit
                    found += page.memberships
                    has_more = page.has_more
                assert found == expected
            for odd in ("user:\0", "user:nobody"):
                assert log.run(log.store.memberships(odd, "chat/", "", 5)).memberships == []

    def test_member_changes_since_a_revision_are_listed(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            log.commit_items(SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"))
            first = log.heads()[1].revision
            roles = {"user:ann": Role.OWNER, "user:bob": Role.MEMBER}
            told = [MemberChange(first, CHANNEL, name, MEMBERSHIP, True, 0, role) for name, role in roles.items()]
            assert self._list_changes(log, 0) == told
            log(message(1))
            assert self._list_changes(log, first) == []  # a record is not a membership change
            log.reopen()
            log(Acknowledge(CHANNEL, "user:ann", 1))
            acknowledged = log.heads()[1].revision
            assert self._list_changes(log, first) == [
                MemberChange(acknowledged, CHANNEL, "user:ann", ACKNOWLEDGEMENT, True, 1, None)
            ]
            log.commit_items(Acknowledge(CHANNEL, "user:ann", 1), SetMember(CHANNEL, "user:bob"))
            assert log.heads()[1].revision == acknowledged  # unchanged
            log(SetMember(CHANNEL, "user:bob", present=False))
            last = log.heads()[1].revision
            gone = MemberChange(last, CHANNEL, "user:bob", MEMBERSHIP, False, 0, None)
            assert self._list_changes(log, acknowledged) == [gone]
            # Each member appears once, in its current state, at its last change.
            assert [(change.member, change.kind) for change in self._list_changes(log, 0)] == [
                ("user:ann", MEMBERSHIP),
                ("user:ann", ACKNOWLEDGEMENT),
                ("user:bob", MEMBERSHIP),
            ]
            assert log.run(log.store.member_changes(0, (0, "", "", 0), 10)) == []

    def test_member_changes_of_one_revision_are_listed_in_pages(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            names = sorted(f"user:{number}" for number in range(25))
            log.commit_items(*[SetMember(scope, name) for scope in (CHANNEL, "chat/2") for name in names])
            expected = [(scope, name) for scope in (CHANNEL, "chat/2") for name in names]
            for limit in (1, 7, 50, 1000):
                found = self._list_changes(log, 0, limit)
                assert [(one.scope, one.member) for one in found] == expected

    def _list_changes(self, log: StoreDriver, revision: int, limit: int = 3) -> list[MemberChange]:
        place: MemberCursor = (revision + 1, "", "", 0)
        found: list[MemberChange] = []
        while page := log.run(log.store.member_changes(1, place, limit)):
            assert len(page) <= limit
            found += page
            place = page[-1].cursor
        return found

    def test_members_share_the_rate_of_a_stream(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(
                SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"), SetMember("chat/2", "user:bob")
            )
            rates: dict[str, Any] = {"rate": Rate(2, burst=2), "stream_rate": Rate(3, burst=3)}
            assert_committed(log(message(1, actor="user:ann", **rates)))
            assert_committed(log(message(2, actor="user:ann", **rates)))
            log.reopen()
            assert assert_refused(log(message(3, actor="user:ann", **rates)), Reason.RATE_LIMITED).retry_after_ms == 500
            assert_committed(log(message(3, actor="user:bob", **rates)))
            late = assert_refused(log(message(4, actor="user:bob", **rates)), Reason.RATE_LIMITED)
            assert late.retry_after_ms == 334
            assert_committed(log(message(4, "x", "user:bob", "chat/2", **rates)))
            log.clock.advance(334)
            log.reopen()
            # A request that one rate limit refuses takes no token from the other.
            first, second = log.commit_items(
                message(4, actor="user:bob", **rates), message(5, actor="user:bob", **rates)
            )
            assert_committed(first)
            assert_refused(second, Reason.RATE_LIMITED)
            log.clock.advance(334)
            assert_committed(log(message(5, actor="user:bob", **rates)))
