"""SIGKILL at random moments: an administrative act and its audit record commit together or not at all (CO-43)."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from crash import audit_worker
from crash.audit_load import CHATS
from databases import BOTH_STORES, log_at
from oncelog.core.policy import EVENTS
from oncelog.core.rules.audit import ERASE, MEMBER_REMOVED, AuditEntry
from oncelog.engine.log import Log, open_log
from oncelog.storage.store import Query
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from scripts import run_until_killed

pytestmark = BOTH_STORES
KILLS = 8


async def recorded_acts(log: Log) -> list[AuditEntry]:
    found: list[AuditEntry] = []
    cursor, has_more = "", True
    while has_more:
        page = await log.audit(cursor, limit=500)
        found += page.entries
        cursor, has_more = log.audit_cursor(page), page.has_more
    return found


def roles_by_acts(acts: list[AuditEntry], chat: str) -> dict[str, object]:
    """Return the members of a chat and their roles according to the audit records."""
    roles: dict[str, object] = {}
    for one in acts:
        if one.scope == chat and one.act == MEMBER_REMOVED:
            del roles[one.target]
        elif one.scope == chat:
            roles[one.target] = one.details["role"]
    return roles


async def stored_roles(log: Log, chat: str) -> dict[str, object]:
    page = await log._store.members(chat, "", 1000)
    return {one.name: one.role.value for one in page.members}


async def erased_keys(log: Log) -> set[str]:
    keys: set[str] = set()
    after, has_more = 0, True
    while has_more:
        page = await log._store.read(Query(after=after))
        keys |= {record.key.hex() for record in page.records if record.erased and record.policy == EVENTS.name}
        after, has_more = page.next, page.has_more
    return keys


async def settled_state(log: Log) -> tuple[list[AuditEntry], dict[str, dict[str, object]], set[str]]:
    """Return a consistent view of acts, roles and erased keys. A database may still be committing after the kill."""
    while True:
        acts = await recorded_acts(log)
        roles, erased = {chat: await stored_roles(log, chat) for chat in CHATS}, await erased_keys(log)
        if acts == await recorded_acts(log):
            return acts, roles, erased


@pytest.mark.rule("CO-43")
async def test_sigkill_does_not_separate_an_act_from_its_record(tmp_path: Path) -> None:
    address, random = log_at(tmp_path / "log.db"), Random(43)
    for number in range(KILLS):
        die_after = random.randint(1, 60)
        await asyncio.to_thread(run_until_killed, audit_worker.__file__, address, number, die_after)
        async with open_log(address) as log:
            acts, roles, erased = await settled_state(log)
            assert roles == {chat: roles_by_acts(acts, chat) for chat in CHATS}
            assert Counter(one.target for one in acts if one.act == ERASE) == dict.fromkeys(erased, 1)
    assert erased
    findings = await asyncio.to_thread(lambda: list(verify_log(address)))
    assert isinstance(findings[-1], VerificationSummary), findings[-1]
