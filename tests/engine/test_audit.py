"""The engine writes audit records of the acts that it performs as soon as a commit is possible (CO-43)."""

import errno
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest

import oncelog
from deadlines import until
from oncelog.core.canonical import canonical
from oncelog.core.limits import ACT_DETAILS_BYTES_MAX
from oncelog.core.plan import Validate
from oncelog.core.rules.audit import AuditEntry
from oncelog.core.tenants import Tenant
from oncelog.core.values import RecordAct, Request
from oncelog.engine import audit
from oncelog.engine.audit import AuditFilter
from oncelog.engine.log import Log
from oncelog.errors import DiskFullError, HistoryChangedError
from oncelog.storage.store import BatchResult, BatchTraces
from oncelog.testing.clock import ManualClock
from storage.memory_store import MemoryStore

pytestmark = pytest.mark.rule("CO-43")
ROOT = "user:root"
DAY_MS = 86_400_000


class FullStore(MemoryStore):
    """A store whose disk can be full."""

    is_full = False

    async def commit(
        self, batch: Sequence[Request], validate: Validate | None = None, traces: BatchTraces | None = None
    ) -> BatchResult:
        if self.is_full:
            raise DiskFullError(str(OSError(errno.ENOSPC, "no space")))
        return await super().commit(batch, validate, traces)


async def acts(log: Log, wanted: AuditFilter | None = None) -> list[AuditEntry]:
    await until(lambda: not log._act_queue.waiting)
    return (await log.audit(limit=1000, wanted=wanted)).entries


def event(number: int, partition: str = "p") -> oncelog.Submission:
    return oncelog.event(UUID(int=number), {"type": "x", "n": number}, [partition])


async def test_erasures_are_recorded_with_their_actor_and_count(tmp_path: Path) -> None:
    async with oncelog.open(tmp_path / "log.db") as log:
        for number in (1, 2, 3):
            await log.submit(event(number, "p" if number < 3 else "q"))
        assert await log.erase(partition="p", actor=ROOT) == 2
        assert await log.erase(key=UUID(int=3)) == 1
        assert await log.erase(key=UUID(int=3), actor=ROOT) == 0
        first, second = await acts(log)
        assert (first.act, first.actor, first.target, first.details) == ("erase", ROOT, "p", {"records": 2})
        assert (second.actor, second.target) == ("system:application", UUID(int=3).hex)
        assert second.details == {"policy": "events", "records": 1}
        assert [record.position for record in (await log.read(partition="p")).records] == [1, 2]


async def test_read_only_on_and_off_are_recorded() -> None:
    async with oncelog.open(":memory:") as log:
        log.set_read_only(actor=ROOT)
        log.set_read_only(actor=ROOT)
        log.set_read_only(False, ROOT)
        assert [(one.act, one.actor) for one in await acts(log)] == [("read_only_on", ROOT), ("read_only_off", ROOT)]


async def test_read_only_set_before_opening_is_recorded() -> None:
    log = oncelog.open(":memory:")
    log.set_read_only()
    async with log:
        assert [one.act for one in await acts(log)] == ["read_only_on"]


async def test_quota_changes_are_recorded() -> None:
    async with oncelog.open(":memory:", tenants=[Tenant(prefix="a"), Tenant(prefix="b")]) as log:
        await log.set_tenants([Tenant(prefix="b", records_max=5), Tenant(prefix="c")], ROOT)
        await log.set_tenants([Tenant(prefix="b", records_max=5), Tenant(prefix="c")], ROOT)
        first, second = await acts(log)
        assert (first.act, first.actor) == ("quota_change", "system:application")
        assert first.details == {"added": 2, "changed": 0, "removed": 0, "tenants": ["a", "b"], "limits": {}}
        assert (second.actor, second.details) == (
            ROOT,
            {
                "added": 1,
                "changed": 1,
                "removed": 1,
                "tenants": ["c", "b", "a"],
                "limits": {"b": {"records_max": [0, 5]}},
            },
        )
        await log.set_tenants([Tenant(prefix="b", records_max=2, bytes_max=7)], ROOT)
        *_, third = await acts(log)
        assert third.details["limits"] == {"b": {"bytes_max": [0, 7], "records_max": [5, 2]}}


@pytest.mark.parametrize("character", ["\U0001f600", "\x01"])  # four and six bytes in canonical JSON
async def test_details_of_many_changed_quotas_fit_into_one_record(character: str) -> None:
    tenants = [Tenant(str(number) + character * 200, 2**53, 2**53, 10**6) for number in range(100)]
    async with oncelog.open(":memory:", tenants=tenants) as log:
        (first,) = await acts(log)
        assert first.details["added"] == 100
        assert len(canonical(dict(first.details))) <= ACT_DETAILS_BYTES_MAX


async def test_quotas_with_equal_shortened_names_keep_their_limits() -> None:
    tenants = [Tenant("a" * 64 + letter, records_max=number) for number, letter in enumerate("bc", 1)]
    async with oncelog.open(":memory:", tenants=tenants) as log:
        (first,) = await acts(log)
        assert first.details["limits"] == {"a" * 64: {"records_max": [0, 1]}}


async def test_act_on_a_full_disk_is_recorded_once_space_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(audit, "PAUSE_S_MAX", 0.001)
    clock = ManualClock()
    store = FullStore(clock=clock)
    async with Log(store, clock=clock) as log:
        await log.submit(event(1))
        store.is_full = True
        assert await log.erase(partition="p", actor=ROOT) == 1, "erasures need no space"
        happened_ms = clock.wall_ms()
        clock.advance(60_000)
        assert len(log._act_queue.waiting) == 1
        store.is_full = False
        (entry,) = await acts(log)
        assert (entry.act, entry.actor, entry.details) == ("erase", ROOT, {"records": 1})
        assert (entry.time_ms, entry.log_time_ms) == (happened_ms, happened_ms + 60_000)


async def test_queue_of_acts_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(audit, "QUEUED_ACTS_MAX", 2)
    monkeypatch.setattr(audit, "CLOSE_S", 0.01)
    store = FullStore()
    async with Log(store) as log:
        store.is_full = True
        for number in range(3):
            log.record(RecordAct(act=f"act_{number}", actor=ROOT))
        assert len(log._act_queue.waiting) == 2
        assert "act_2 by user:root was not recorded" in caplog.text
    assert "act_0 by user:root was not recorded: the log was closed" in caplog.text


async def test_erasure_succeeds_after_a_clock_jump() -> None:
    clock = ManualClock()
    async with Log(MemoryStore(clock=clock), clock=clock) as log:
        await log.submit(event(1))
        clock.jump(8 * DAY_MS)
        assert await log.erase(partition="p", actor=ROOT) == 1
        await log.confirm_clock()
        assert [one.act for one in await acts(log)] == ["erase"]


async def test_acts_can_be_filtered_and_paged() -> None:
    clock = ManualClock()
    async with Log(MemoryStore(clock=clock), clock=clock) as log:
        start_ms = clock.wall_ms()
        for number in range(6):
            actor = f"user:{number % 2}"
            await log.submit(RecordAct(act="erase", actor=actor, scope=f"s/{number % 3}", target=str(number)))
            clock.advance(1000)
        assert [one.target for one in await acts(log, AuditFilter(actor="user:1"))] == ["1", "3", "5"]
        assert [one.target for one in await acts(log, AuditFilter(stream="s/0"))] == ["0", "3"]
        assert [one.target for one in await acts(log, AuditFilter(target="4"))] == ["4"]
        assert await acts(log, AuditFilter(act="compact")) == []
        between = AuditFilter(since_ms=start_ms + 1000, until_ms=start_ms + 3000)
        assert [one.target for one in await acts(log, between)] == ["1", "2"]
        seen, cursor, has_more = [], "", True
        while has_more:
            page = await log.audit(cursor, 2, AuditFilter(actor="user:0"))
            seen += [one.target for one in page.entries]
            cursor, has_more = log.audit_cursor(page), page.has_more
        assert seen == ["0", "2", "4"]
        assert (await log.audit(cursor)).entries == []
        await log.submit(RecordAct(act="erase", actor="user:0", target="later"))
        assert [one.target for one in (await log.audit(cursor)).entries] == ["later"]
        for wrong in ("x~1", f"{log.epoch}~99999-1", f"{log.epoch}~1-1~1-2", f"{log.epoch}~-1"):
            with pytest.raises(ValueError, match="cursor"):
                await log.audit(wrong)
        with pytest.raises(HistoryChangedError):
            await log.audit("0" * len(log.epoch) + "~0-1")


async def test_page_of_acts_reads_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SCAN_RECORDS_MAX", 3)
    async with oncelog.open(":memory:") as log:
        for number in range(5):
            await log.submit(RecordAct(act="erase", actor=ROOT, target=str(number)))
        first = await log.audit(wanted=AuditFilter(target="4"))
        assert (first.entries, first.has_more) == ([], True)
        second = await log.audit(log.audit_cursor(first), wanted=AuditFilter(target="4"))
        assert [one.target for one in second.entries] == ["4"]
        assert not second.has_more
