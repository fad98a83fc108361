"""Limits on chats and members: tenant quotas and rates, read-only mode. Partition names count too."""

from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from deadlines import until
from oncelog.core.tenants import Tenant
from oncelog.engine.write_gate import RETRY_AFTER_MS
from oncelog.testing.clock import ManualClock
from server.chat.chat_servers import ChatServer, run_server
from server.running_server import Answer, item, serving

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
async def test_chats_and_members_count_against_the_tenant_quota(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        log = server.served.server.log
        # Each member counts, and so does the audit record of adding the member.
        await log.set_tenants([Tenant("chat", records_max=6)])
        members = [f"user:{number}" for number in range(499)]
        large = await server.http("POST", "/v1/chats", "ann", {"chat_id": "large", "members": members})
        assert error_of(large) == (507, "QUOTA_EXCEEDED", "chat", "records_max", 6, 0)
        assert (await server.http("GET", "/v1/chats/large", "ann")).status == 403
        await server.create("c", "ann", "bob", "cyd")
        again = await server.http("POST", "/v1/chats", "ann", {"chat_id": "c", "members": ["user:bob"]})
        assert again.status == 200, "nothing changes"
        assert error_of(await server.set_member("c", "ann", "dan")) == (
            507,
            "QUOTA_EXCEEDED",
            "chat",
            "records_max",
            6,
            6,
        )
        another = await server.http("POST", "/v1/chats", "ann", {"chat_id": "d"})
        assert error_of(another) == (507, "QUOTA_EXCEEDED", "chat", "records_max", 6, 6)
        assert (await server.set_member("c", "ann", "bob", present=False)).status == 200
        assert error_of(await server.set_member("c", "ann", "bob"))[0] == 507, "no room for the audit record"
        await log.set_tenants([Tenant("chat", records_max=8)])
        assert error_of(await server.set_member("c", "ann", "dan"))[0] == 507, "a removed member stays counted"
        assert (await server.set_member("c", "ann", "bob")).status == 200, (
            "a returning member only needs its audit record"
        )
        ((_, usage),) = await log.usage()
        await log.set_tenants([Tenant("chat", bytes_max=usage.bytes + 100)])
        long = await server.set_member("c", "ann", "x" * 400)
        assert error_of(long) == (507, "QUOTA_EXCEEDED", "chat", "bytes_max", usage.bytes + 100, usage.bytes)


async def set_role(server: ChatServer, role: str) -> Answer:
    return await server.http("PUT", "/v1/chats/c/members/user:bob", "ann", {"role": role})


async def member_refusals(server: ChatServer) -> list[tuple[int, str, int]]:
    """Request a new member, a new role and a new chat. Return status, code and retry delay of the errors."""
    answers = [
        await server.set_member("c", "ann", "eve"),
        await set_role(server, "owner"),
        await server.http("POST", "/v1/chats", "ann", {"chat_id": "d", "members": ["user:bob"]}),
        await server.http("POST", "/v1/chats", "ann", {"chat_id": "c", "members": ["user:eve"]}),
    ]
    for one in answers:
        assert int(one.headers["Retry-After"]) >= 1
    errors = [one.json["error"] for one in answers]
    return [(one.status, error["code"], error["retry_after_ms"]) for one, error in zip(answers, errors, strict=True)]


async def assert_repeated_requests_are_answered(server: ChatServer) -> None:
    assert (await server.set_member("c", "ann", "bob")).status == 200
    assert (await set_role(server, "member")).status == 200
    again = await server.http("POST", "/v1/chats", "ann", {"chat_id": "c", "members": ["user:bob"]})
    assert again.status == 200


@pytest.mark.rule("CO-18", "CO-30")
async def test_read_only_server_refuses_new_chats_members_and_roles_but_no_removal(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        log = server.served.server.log
        await server.create("c", "ann", "bob", "cyd")
        log.set_read_only()
        await until(lambda: not log._act_queue.waiting)
        before = (await log.audit()).after
        assert await member_refusals(server) == [(503, "READ_ONLY", RETRY_AFTER_MS)] * 4
        await assert_repeated_requests_are_answered(server)
        assert (await log.audit()).after == before
        assert (await server.http("GET", "/v1/chats/d", "ann")).status == 403
        assert (await server.set_member("c", "bob", "bob", present=False)).status == 200
        assert (await server.set_member("c", "ann", "cyd", present=False)).status == 200
        log.set_read_only(False)
        assert (await server.set_member("c", "ann", "bob")).status == 200


@pytest.mark.rule("CO-18", "CO-30")
async def test_members_and_roles_count_against_the_tenant_rate(tmp_path: Path) -> None:
    async with run_server(tmp_path, clock=ManualClock()) as server:
        log = server.served.server.log
        await log.set_tenants([Tenant("chat", new_writes_per_second_max=1)])
        # A new chat is admitted even if it has more members than the rate allows in one burst.
        await server.create("c", "ann", "bob", "cyd")
        refusals = await member_refusals(server)
        assert {(status, code) for status, code, _ in refusals} == {(429, "RATE_LIMITED")}
        assert all(1 <= wait_ms <= 3000 for *_, wait_ms in refusals)
        before = (await log.audit()).after
        answers = [await set_role(server, ("owner", "member")[number % 2]) for number in range(20)]
        assert [one.status for one in answers] == [429, 200] * 10, "every second request changes nothing"
        assert (await log.audit()).after == before
        await assert_repeated_requests_are_answered(server)
        assert (await server.set_member("c", "ann", "cyd", present=False)).status == 200


@pytest.mark.rule("CO-18")
async def test_clock_jump_refuses_members_and_answers_repeated_requests(tmp_path: Path) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock) as server:
        await server.create("c", "ann", "bob")
        clock.jump(8 * 24 * 3_600_000)
        for status, code, wait_ms in await member_refusals(server):
            assert (status, code) == (503, "BUSY")
            assert wait_ms > 0
        await assert_repeated_requests_are_answered(server)


@pytest.mark.rule("CO-30")
async def test_partition_names_count_against_the_tenant_quota(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=(Tenant("acme", bytes_max=2000),)) as served:
        partitions = [f"acme/{number:02}{'x' * 240}" for number in range(64)]
        late = await served.submit({**item(1), "partitions": partitions})
        assert error_of(late) == (507, "quota_exceeded", "acme", "bytes_max", 2000, 0)
        assert (await served.submit({**item(1), "partitions": partitions[:2]})).status == 200
