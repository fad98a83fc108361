"""Listeners receive local member changes immediately and other changes by polling, even after an outage."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from databases import BOTH_STORES, log_at
from deadlines import WAIT_S, until
from oncelog.core.identity import compute_lane
from oncelog.core.values import Acknowledge, LaneHead, OpenStream, Record, SetMember
from oncelog.engine import member_tailer, tailer
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log, open_log
from oncelog.errors import ClosedError, HistoryChangedError, StoreUnavailableError
from oncelog.storage.side_state import ACKNOWLEDGEMENT, MEMBERSHIP
from oncelog.storage.store import MemberChange, MemberCursor
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import CHANNEL, message

pytestmark = BOTH_STORES


class ChangeListener:
    """A listener that collects member changes."""

    def __init__(self) -> None:
        self.changes: list[MemberChange] = []
        self._arrived = asyncio.Event()

    def deliver_changes(self, changes: Sequence[MemberChange]) -> None:
        self.changes += changes
        self._arrived.set()

    @property
    def reported(self) -> list[tuple[str, str, int, bool, int]]:
        return [(one.scope, one.member, one.kind, one.present, one.acknowledged) for one in self.changes]

    async def until(self, *wanted: tuple[str, str, int, bool, int]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not set(wanted) <= set(self.reported):
                self._arrived.clear()
                await self._arrived.wait()


class LaneListener:
    """A listener that collects the records and member changes of a lane in order of delivery."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, object]] = []

    def deliver_changes(self, changes: Sequence[MemberChange]) -> None:
        self.lines += [(one.member, one.present) for one in changes]

    def deliver(self, records: Sequence[Record]) -> None:
        self.lines += [("message", record.sequence) for record in records if record.sequence]

    def fail(self, error: Exception) -> None:
        self.lines.append(("failed", error))

    def close(self) -> None:
        """Do nothing."""


class DelayedMemberReads:
    """Delays reads of member changes until a number of polls have happened after the first read."""

    def __init__(self, log: Log, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = log
        self._looks = looks
        self._looked = asyncio.Event()
        self._heads, self._read = log._store.heads, log._store.member_changes
        self.is_asked = False
        monkeypatch.setattr(log._store, "heads", self.heads)
        monkeypatch.setattr(log._store, "member_changes", self.member_changes)

    async def heads(self) -> Mapping[int, LaneHead]:
        if self.is_asked:
            self._looks -= 1
            if self._looks <= 0:
                self._looked.set()
        return await self._heads()

    async def member_changes(self, lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
        self.is_asked = True
        await self._looked.wait()
        return await self._read(lane, after, limit)


async def wait_forever(*_: object) -> Mapping[int, LaneHead]:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def open_store(path: Path) -> Log:
    return open_log(log_at(path / "log.db"), limits=Limits(poll_ms=1))


@pytest.mark.rule("CH-7", "CH-8")
async def test_local_member_changes_are_reported_before_their_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as log:
        heard = ChangeListener()
        await log.listen_members(heard)
        # A poll can find a commit before the committer reports it. The change is then read from the store and may
        # arrive after the verdict. Here, no poll completes, so only the committer reports changes.
        monkeypatch.setattr(log._store, "heads", wait_forever)
        await log.submit_many([OpenStream("chat/1", "user:ann"), SetMember("chat/2", "user:ann"), message(1)])
        joined = [(scope, "user:ann", MEMBERSHIP, True, 0) for scope in ("chat/1", "chat/2")]
        assert sorted(heard.reported) == joined
        await log.submit(Acknowledge("chat/1", "user:ann", 1))
        assert heard.reported[2:] == [("chat/1", "user:ann", ACKNOWLEDGEMENT, True, 1)]
        await log.submit(Acknowledge("chat/1", "user:ann", 1))
        await log.submit(SetMember("chat/2", "user:ann", present=False))
        assert heard.reported[3:] == [("chat/2", "user:ann", MEMBERSHIP, False, 0)]


@pytest.mark.rule("CH-7", "CH-8")
async def test_member_changes_of_another_process_are_reported_but_not_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_tailer, "PAGE_CHANGES", 4)
    async with open_store(tmp_path) as log, open_store(tmp_path) as other:
        await other.submit(SetMember("chat/1", "user:before"))
        heard = ChangeListener()
        await log.listen_members(heard)
        many = [SetMember(f"chat/{number}", f"user:{name}") for number in range(3) for name in range(11)]
        await other.submit_many(many)
        await heard.until(*((one.scope, one.member, MEMBERSHIP, True, 0) for one in many))
        await other.submit(SetMember("chat/1", "user:3", present=False))
        await log.submit(SetMember("chat/1", "user:4", present=False))
        await heard.until(*(("chat/1", f"user:{name}", MEMBERSHIP, False, 0) for name in (3, 4)))
        assert "user:before" not in {one.member for one in heard.changes}


@pytest.mark.rule("CH-7")
async def test_member_changes_are_complete_after_a_store_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as log, open_store(tmp_path) as other:
        heard = ChangeListener()
        await log.listen_members(heard)
        read, failures = log._store.member_changes, 0

        async def fail_reads(lane: int, after: MemberCursor, limit: int) -> list[MemberChange]:
            nonlocal failures
            if failures < 3:
                failures += 1
                raise StoreUnavailableError("away")
            return await read(lane, after, limit)

        monkeypatch.setattr(log._store, "member_changes", fail_reads)
        await other.submit(SetMember("chat/1", "user:ann"))
        await heard.until(("chat/1", "user:ann", MEMBERSHIP, True, 0))
        assert failures == 3


@pytest.mark.rule("CH-9", "CO-22")
@pytest.mark.parametrize("is_elsewhere", [True, False])
async def test_member_removal_is_reported_before_later_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """The order holds even if reading the removal is slow and this process committed the record."""
    async with open_store(tmp_path) as log, open_store(tmp_path) as other:
        lane = compute_lane(CHANNEL, log.settings.lanes)
        await log.submit_many([SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob")])
        assert_committed(await log.submit(message(1)))
        journal = LaneListener()
        await log.listen_members(journal)
        await log.listen(journal, lane)
        held = DelayedMemberReads(log, 10, monkeypatch)
        if not is_elsewhere:
            await log._store.erase(lane, [1])  # the revision of the lane grows without a commit
        writer = other if is_elsewhere else log
        await writer.submit(SetMember(CHANNEL, "user:bob", present=False))
        assert_committed(await writer.submit(message(2)))
        await until(lambda: held.is_asked)
        assert_committed(await log.submit(message(3)))
        await until(lambda: len(journal.lines) >= 3)
        assert journal.lines == [("user:bob", False), ("message", 2), ("message", 3)]


@pytest.mark.rule("CH-9", "CO-22")
async def test_records_are_withheld_while_member_changes_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is delivered to a removed member, and listeners eventually get the store error."""
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 5)
    async with open_store(tmp_path) as log, open_store(tmp_path) as other:
        await other.submit_many([SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob")])
        journal = LaneListener()
        await log.listen_members(journal)
        await log.listen(journal, compute_lane(CHANNEL, log.settings.lanes))
        away = StoreUnavailableError("away")

        async def fail_reads(*_: object) -> list[MemberChange]:
            raise away

        monkeypatch.setattr(log._store, "member_changes", fail_reads)
        await other.submit(SetMember(CHANNEL, "user:bob", present=False))
        assert_committed(await other.submit(message(1)))
        await until(lambda: bool(journal.lines))
        assert journal.lines == [("failed", away)]


@pytest.mark.rule("CO-40")
async def test_member_tailer_reports_a_rolled_back_history_and_continues_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only members changed, so no record cursor is ahead of the remaining history."""
    async with open_store(tmp_path) as log, open_log(log_at(tmp_path / "other.db")) as other:
        lane = compute_lane(CHANNEL, log.settings.lanes)
        for name in ("user:ann", "user:bob", "user:cyn"):
            await log.submit(SetMember(CHANNEL, name))
        await other.submit(SetMember(CHANNEL, "user:ann"))
        journal = LaneListener()
        await log.listen_members(journal)
        await log.listen(journal, lane)
        # From here on, the store answers like a store that lost the last two changes.
        monkeypatch.setattr(log._store, "heads", other._store.heads)
        monkeypatch.setattr(log._store, "member_changes", other._store.member_changes)
        await until(lambda: bool(journal.lines))
        assert isinstance(journal.lines.pop()[1], HistoryChangedError)
        await other.submit(SetMember(CHANNEL, "user:dan"))
        await until(lambda: bool(journal.lines))
        assert journal.lines == [("user:dan", True)]


async def test_listen_members_on_a_closed_log_is_refused(tmp_path: Path) -> None:
    async with open_store(tmp_path) as log:
        pass
    with pytest.raises(ClosedError):
        await log.listen_members(ChangeListener())
