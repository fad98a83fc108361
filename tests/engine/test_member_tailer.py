"""Changes of members reach those who follow them: at once from here, soon from elsewhere, and after an outage too."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from core.writes import message
from databases import BOTH_STORES, log_at
from engine.watched import TIMEOUT_SECONDS
from oncelog.core.values import Acknowledge, OpenStream, SetMember
from oncelog.engine import member_tailer
from oncelog.engine.log import Log, open_log
from oncelog.errors import ClosedError, StoreUnavailableError
from oncelog.stores.protocol import MemberChange, MemberPlace
from oncelog.stores.side_state import ACKNOWLEDGEMENT, MEMBERSHIP

pytestmark = BOTH_STORES


class Heard:
    """What a listener was told."""

    def __init__(self) -> None:
        self.changes: list[MemberChange] = []
        self._arrived = asyncio.Event()

    def changed(self, changes: Sequence[MemberChange]) -> None:
        self.changes += changes
        self._arrived.set()

    @property
    def told(self) -> list[tuple[str, str, int, bool, int]]:
        return [(one.scope, one.member, one.kind, one.present, one.acknowledged) for one in self.changes]

    async def until(self, *wanted: tuple[str, str, int, bool, int]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not set(wanted) <= set(self.told):
                self._arrived.clear()
                await self._arrived.wait()


def opened(path: Path) -> Log:
    return open_log(log_at(path / "log.db"))


@pytest.mark.rule("CH-7", "CH-8")
def test_what_is_committed_here_is_told_when_its_verdict_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as log:
            heard = Heard()
            await log.listen_members(heard)
            await log.submit_many([OpenStream("chat/1", "user:ann"), SetMember("chat/2", "user:ann"), message(1)])
            joined = [(scope, "user:ann", MEMBERSHIP, True, 0) for scope in ("chat/1", "chat/2")]
            assert sorted(heard.told) == joined
            await log.submit(Acknowledge("chat/1", "user:ann", 1))
            assert heard.told[2:] == [("chat/1", "user:ann", ACKNOWLEDGEMENT, True, 1)]
            await log.submit(Acknowledge("chat/1", "user:ann", 1))
            await log.submit(SetMember("chat/2", "user:ann", present=False))
            assert heard.told[3:] == [("chat/2", "user:ann", MEMBERSHIP, False, 0)]

    asyncio.run(main())


@pytest.mark.rule("CH-7", "CH-8")
def test_what_others_commit_is_told_soon_and_not_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_tailer, "PAGE_CHANGES", 4)

    async def main() -> None:
        async with opened(tmp_path) as log, opened(tmp_path) as other:
            await other.submit(SetMember("chat/1", "user:before"))
            heard = Heard()
            await log.listen_members(heard)
            many = [SetMember(f"chat/{number}", f"user:{name}") for number in range(3) for name in range(11)]
            await other.submit_many(many)
            await heard.until(*((one.scope, one.member, MEMBERSHIP, True, 0) for one in many))
            await other.submit(SetMember("chat/1", "user:3", present=False))
            await log.submit(SetMember("chat/1", "user:4", present=False))
            await heard.until(*(("chat/1", f"user:{name}", MEMBERSHIP, False, 0) for name in (3, 4)))
            assert "user:before" not in {one.member for one in heard.changes}

    asyncio.run(main())


@pytest.mark.rule("CH-7")
def test_a_store_that_cannot_be_read_for_a_while_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as log, opened(tmp_path) as other:
            heard = Heard()
            await log.listen_members(heard)
            read, failures = log._store.member_changes, 0

            async def failing(lane: int, after: MemberPlace, limit: int) -> list[MemberChange]:
                nonlocal failures
                if failures < 3:
                    failures += 1
                    raise StoreUnavailableError("away")
                return await read(lane, after, limit)

            monkeypatch.setattr(log._store, "member_changes", failing)
            await other.submit(SetMember("chat/1", "user:ann"))
            await heard.until(("chat/1", "user:ann", MEMBERSHIP, True, 0))
            assert failures == 3

    asyncio.run(main())


def test_a_log_that_is_closed_tells_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as log:
            pass
        with pytest.raises(ClosedError):
            await log.listen_members(Heard())

    asyncio.run(main())
