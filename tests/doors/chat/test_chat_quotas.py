"""Quotas of tenants in the Chat and Events APIs: chats, members and the names of partitions count."""

from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from doors.chat.chat_doors import opened
from doors.serving import item, serving
from oncelog.core.tenants import Tenant

pytestmark = BOTH_STORES


def error_of(answer: Any) -> tuple[int, str, str, str, int, int]:
    error = answer.json["error"]
    details = error.get("details", error)
    return (
        answer.status,
        error["code"],
        details["tenant"],
        details["quota"],
        details["limit"],
        details["usage"],
    )


@pytest.mark.rule("CO-30")
async def test_chats_and_members_count_against_the_quota_of_a_tenant(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        log = door.served.server.log
        # Each member counts with the audit record of its addition.
        await log.set_tenants([Tenant("chat", records_max=6)])
        members = [f"user:{number}" for number in range(499)]
        large = await door.http("POST", "/v1/chats", "ann", {"chat_id": "large", "members": members})
        assert error_of(large) == (507, "QUOTA_EXCEEDED", "chat", "records_max", 6, 6)
        assert (await door.http("GET", "/v1/chats/large", "ann")).status == 403
        await door.create("c", "ann", "bob", "cyd")
        again = await door.http("POST", "/v1/chats", "ann", {"chat_id": "c", "members": ["user:bob"]})
        assert again.status == 200, "nothing changes"
        assert error_of(await door.set_member("c", "ann", "dan")) == (
            507,
            "QUOTA_EXCEEDED",
            "chat",
            "records_max",
            6,
            6,
        )
        another = await door.http("POST", "/v1/chats", "ann", {"chat_id": "d"})
        assert error_of(another) == (507, "QUOTA_EXCEEDED", "chat", "records_max", 6, 6)
        assert (await door.set_member("c", "ann", "bob", present=False)).status == 200
        assert error_of(await door.set_member("c", "ann", "bob"))[0] == 507, "no room for the audit record"
        await log.set_tenants([Tenant("chat", records_max=8)])
        assert error_of(await door.set_member("c", "ann", "dan"))[0] == 507, "a removed member stays counted"
        assert (await door.set_member("c", "ann", "bob")).status == 200, (
            "a returning member needs its audit record only"
        )
        ((_, usage),) = await log.usage()
        await log.set_tenants([Tenant("chat", bytes_max=usage.bytes + 100)])
        long = await door.set_member("c", "ann", "x" * 400)
        assert error_of(long) == (507, "QUOTA_EXCEEDED", "chat", "bytes_max", usage.bytes + 100, usage.bytes)


@pytest.mark.rule("CO-30")
async def test_names_of_partitions_count_against_the_quota_of_a_tenant(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=(Tenant("acme", bytes_max=2000),)) as served:
        partitions = [f"acme/{number:02}{'x' * 240}" for number in range(64)]
        late = await served.submit({**item(1), "partitions": partitions})
        assert error_of(late) == (507, "quota_exceeded", "acme", "bytes_max", 2000, 0)
        assert (await served.submit({**item(1), "partitions": partitions[:2]})).status == 200
