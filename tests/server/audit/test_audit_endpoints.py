"""`GET /v1/audit`: the grant, filters and pages, and the acts that the server itself records (CO-43)."""

import logging
from pathlib import Path
from typing import Any, Final

import pytest

from databases import BOTH_STORES
from deadlines import until
from oncelog.core.values import RecordAct
from oncelog.engine.audit import AuditFilter
from oncelog.server.auth.principal import parse_grants
from oncelog.storage.metadata import EPOCH_BYTES
from server.running_server import Serving, serving

pytestmark = pytest.mark.rule("CO-43")
EPOCH_DIGITS: Final = 2 * EPOCH_BYTES


async def read(served: Serving, credential: str | None = None, **parameters: Any) -> tuple[int, dict[str, Any]]:
    headers = {} if credential is None else {"Authorization": f"Bearer {credential}"}
    async with served.session.get(f"{served.url}/v1/audit", params=parameters, headers=headers) as response:
        return response.status, await response.json()


async def record(served: Serving, *targets: str, scope: str = "") -> None:
    for target in targets:
        await served.server.log.submit(RecordAct(act="erase", actor="user:ada", target=target, scope=scope))


async def test_reading_acts_requires_a_separate_grant(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        assert served.api_keys is not None
        everything = served.api_keys.create("all", "all", parse_grants(["*"], ["*"])).text
        auditor = served.api_keys.create("auditor", "auditor", parse_grants(audit=["*"])).text
        of_chats = served.api_keys.create("some", "some", parse_grants(audit=["chat/*"])).text
        served.server.reload()
        await record(served, "log")
        await record(served, "member", scope="chat/1")
        assert (await read(served))[0] == 401
        status, body = await read(served, everything, after="not even a cursor")
        assert (status, body["error"]["code"]) == (403, "forbidden")
        assert "the credential has no `audit` grant" in body["error"]["message"]
        status, body = await read(served, auditor)
        assert [one["target"] for one in body["acts"]] == ["log", "member"]
        assert (await read(served, of_chats))[0] == 403
        assert (await read(served, of_chats, stream="deltas/1"))[0] == 403
        status, body = await read(served, of_chats, stream="chat/1")
        assert [one["target"] for one in body["acts"]] == ["member"]


async def test_acts_are_paged_and_filtered(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await record(served, "a", "b", "c")
        status, first = await read(served, limit=2)
        assert status == 200
        assert ([one["target"] for one in first["acts"]], first["has_more"]) == (["a", "b"], True)
        _, second = await read(served, limit=2, after=first["cursor"])
        assert ([one["target"] for one in second["acts"]], second["has_more"]) == (["c"], False)
        _, found = await read(served, target="b", actor="user:ada", act="erase", since=1)
        assert [one["target"] for one in found["acts"]] == ["b"]
        assert found["acts"][0].keys() == {
            *("time_ms", "act", "actor", "stream", "target", "details"),
            *("lane", "position", "log_time_ms", "erased"),
        }
        _, none = await read(served, until=1)
        assert none["acts"] == []


@pytest.mark.parametrize(
    ("parameters", "field", "status"),
    [
        ({"limit": "0"}, "limit", 400),
        ({"limit": "501"}, "limit", 400),
        ({"since": "yesterday"}, "since", 400),
        ({"actor": "x" * 513}, "actor", 400),
        ({"colour": "red"}, "colour", 400),
        ({"after": "x~1"}, "after", 400),
        ({"after": "x"}, "after", 400),
        ({"after": "another-epoch~0-1"}, "after", 400),
        ({"after": "0" * EPOCH_DIGITS + "~"}, "after", 400),
        ({"after": "0" * EPOCH_DIGITS + "~0-1"}, "after", 409),
        ({"after": "0" * EPOCH_DIGITS}, "after", 409),
    ],
)
async def test_bad_parameters_are_refused_by_name(
    parameters: dict[str, str], field: str, status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as served:
        found, body = await read(served, **parameters)
        assert (found, body["error"]["details"]["field"]) == (status, field)
        code = "bad_request" if status == 400 else "history_changed"
        assert body["error"]["code"] == code
    # Without the filter, the list would contain asyncio errors from sessions that an earlier test closed.
    errors = [one.message for one in caplog.records if one.levelno >= logging.ERROR and one.name.startswith("oncelog")]
    assert errors == []


async def test_revoked_api_key_is_recorded_once_across_restarts(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        assert served.api_keys is not None
        created = served.api_keys.create("shop", "shop", parse_grants(["*"]))
        auditor = served.api_keys.create("auditor", "auditor", parse_grants(audit=["*"])).text
        served.server.reload()
        served.api_keys.revoke(created.key.id)
        served.server.reload()
        await until(lambda: not served.server.log._act_queue.waiting)
        _, body = await read(served, auditor, act="key_revoked")
        (act,) = body["acts"]
        assert (act["actor"], act["target"]) == ("system:server", created.key.id)
        assert act["details"]["client_id"] == "shop"
        assert created.text not in str(body)
        served.server._authenticator.subscribe(lambda _: None)
        # Another server with the same file detects the revocation again at startup.
        noticed = served.server.log
        before = (await noticed.audit()).after
        for _ in range(2):
            served.server.reload()
        await until(lambda: not noticed._act_queue.waiting)
        assert (await noticed.audit()).after == before


async def test_startup_with_a_revoked_key_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        assert served.api_keys is not None
        key_id = served.api_keys.create("shop", "shop", parse_grants(["*"])).key.id
    served.api_keys.revoke(key_id)
    caplog.clear()
    async with serving(tmp_path, api_keys=True) as served:
        assert await revoked_keys(served) == [key_id]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_read_only_mode_from_the_settings_is_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, read_only=True) as served:
        await until(lambda: not served.server.log._act_queue.waiting)
        _, body = await read(served)
        assert [(one["act"], one["actor"]) for one in body["acts"]] == [("read_only_on", "system:server")]


async def revoked_keys(*servers: Serving) -> list[str]:
    """Wait until the servers have recorded all revocations, and return the ids of the recorded keys."""
    for served in servers:
        await until(lambda served=served: not served.server.log._act_queue.waiting)  # type: ignore[misc]
    page = await servers[0].server.log.audit(wanted=AuditFilter(act="key_revoked"))
    return [entry.target for entry in page.entries]


@BOTH_STORES
async def test_two_servers_record_a_revoked_key_once_even_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as one, serving(tmp_path, api_keys=True) as other:
        assert one.api_keys is not None
        keys = [one.api_keys.create(name, name, parse_grants(["*"])).key.id for name in ("shop", "till")]
        for served in (one, other):
            served.server.reload()
        one.api_keys.revoke(keys[0])
        for served in (one, other):
            served.server.reload()
        assert await revoked_keys(one, other) == keys[:1]
    # This key is revoked while no server is running. Both servers detect that at startup.
    one.api_keys.revoke(keys[1])
    async with serving(tmp_path, api_keys=True) as one, serving(tmp_path, api_keys=True) as other:
        assert await revoked_keys(one, other) == keys
    async with serving(tmp_path, api_keys=True) as one:
        assert await revoked_keys(one) == keys
