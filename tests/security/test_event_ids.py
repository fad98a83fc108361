"""Event ids are scoped to tenants: no tenant can claim an id that another tenant will use."""

import asyncio
import json
from pathlib import Path

import pytest

from cli.runner import COMMAND, RUNNER
from databases import BOTH_STORES
from oncelog import Tenant, event_scope
from oncelog.engine.outcome import Status
from oncelog.errors import SettingsError
from oncelog.server.settings import load
from oncelog.storage import key_search
from server.auth.auth_material import token
from server.running_server import Serving, event_id, item, numbers, serving

A = token(sub="a", grants={"read": ["a/*"], "write": ["a/*"]})
B = token(sub="b", grants={"read": ["b/*"], "write": ["b/*"]})
BOTH = token(sub="c", grants={"read": ["*"], "write": ["*"]})
OWN = (Tenant("a", own_ids=True), Tenant("b", own_ids=True))


async def statuses(served: Serving, *writes: tuple[str, int, str]) -> list[str]:
    """Submit one event per (token, number, partition) and return the status of each."""
    answers = [await served.submit(item(number, partition), credential=who) for who, number, partition in writes]
    return [answer.json["results"][0]["status"] if answer.status == 200 else answer.error["code"] for answer in answers]


@BOTH_STORES
@pytest.mark.rule("EV-4", "EV-5", "CO-22")
async def test_tenant_cannot_squat_on_the_id_of_another(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=OWN) as served:
        squatted = await served.submit({**item(1, "b/x"), "event": {"type": "squat"}}, credential=B)
        assert squatted.json["results"][0]["status"] == "committed"
        first = await served.submit(item(1, "a/x"), credential=A)
        again = await served.submit(item(1, "a/x"), credential=A)
        assert (
            numbers(first.json["results"]) == numbers(again.json["results"]) == [3]
        )  # Position 1 is the audit record of the quotas.
        assert await statuses(served, (A, 1, "a/other")) == ["rejected"]
        socket = await served.connected("laptop", A)
        assert numbers(await socket.submit(item(1, "a/x"))) == [3]
        assert [event["id"] for event in (await served.page("a/x", "b/x", credential=BOTH)).json["events"]] == [
            event_id(1)
        ] * 2


async def test_id_is_unique_in_the_whole_log_if_no_tenant_has_separate_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=(Tenant("a"), Tenant("b"))) as served:
        assert await statuses(served, (B, 1, "b/x"), (A, 1, "a/x")) == ["committed", "rejected"]


@BOTH_STORES
@pytest.mark.rule("EV-4")
async def test_ids_written_before_the_switch_are_still_known(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        assert await statuses(served, (A, 1, "a/x"), (B, 2, "b/x")) == ["committed"] * 2
    async with serving(tmp_path, tokens=True, tenants=OWN) as served:
        for _ in range(2):
            assert numbers((await served.submit(item(1, "a/x"), credential=A)).json["results"]) == [1]
        assert await statuses(served, (A, 2, "a/x")) == ["committed"]
        assert numbers((await served.submit(item(2, "b/x"), credential=B)).json["results"]) == [2]
    with pytest.raises(SettingsError, match="must keep own_ids of 'a'"):
        async with serving(tmp_path, tokens=True):
            pass


async def test_server_that_is_not_aware_of_the_switch_requests_a_retry(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        assert await statuses(served, (A, 1, "a/x")) == ["committed"]
        await served.server.log.set_tenants(OWN)  # as another server does
        assert await statuses(served, (A, 1, "a/x"), (A, 2, "a/x")) == ["committed", "server_busy"]
        served.server._reloader._wanted_tenants = OWN
        await served.server._reloader._update_tenants()
        assert await statuses(served, (A, 2, "a/x")) == ["committed"]


@BOTH_STORES
@pytest.mark.rule("EV-4", "EV-5")
async def test_event_of_two_tenants_is_still_known_after_the_second_gets_own_ids(tmp_path: Path) -> None:
    first, second = ({**item(number, "a/x"), "partitions": ["a/x", "b/x"]} for number in (1, 2))
    async with serving(tmp_path, tokens=True, tenants=OWN[:1]) as served:
        before = numbers((await served.submit(first, credential=BOTH)).json["results"])
        await served.server.log.set_tenants(OWN)  # as another server does
        assert numbers((await served.submit(first, credential=BOTH)).json["results"]) == before
        assert (await served.submit(second, credential=BOTH)).error["code"] == "server_busy"
    async with serving(tmp_path, tokens=True, tenants=OWN) as served:
        assert numbers((await served.submit(first, credential=BOTH)).json["results"]) == before
        assert (await served.submit(second, credential=BOTH)).json["results"][0]["status"] == "committed"


@pytest.mark.parametrize("scanned_max", [key_search.SCAN_RECORDS_MAX, -1], ids=["records", "index"])
@BOTH_STORES
async def test_show_and_lookup_find_ids_of_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scanned_max: int
) -> None:
    monkeypatch.setattr(key_search, "SCAN_RECORDS_MAX", scanned_max)
    async with serving(tmp_path, tokens=True, tenants=OWN) as served:
        assert await statuses(served, (A, 1, "a/x"), (A, 2, "a/x"), (B, 2, "b/x")) == ["committed"] * 3
        log = served.server.log
        assert (await log.lookup(event_id(1), scope=event_scope("a"))).status is Status.COMMITTED
        assert (await log.lookup(event_id(1), scope=event_scope("b"))).status is Status.UNKNOWN
        store = served.server.settings.store
    one, several = [
        await asyncio.to_thread(RUNNER.invoke, COMMAND, ["show", store, event_id(number), "--json"])
        for number in (1, 2)
    ]
    assert one.exit_code == 0
    assert "tenant/a" in one.stdout
    assert (several.exit_code, len(json.loads(several.stdout))) == (3, 2)


@BOTH_STORES
async def test_id_without_a_scope_is_not_reported_as_unknown_if_a_tenant_may_have_it(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=OWN) as served:
        assert await statuses(served, (A, 1, "a/x"), (BOTH, 2, "z")) == ["committed"] * 2
        log = served.server.log
        with pytest.raises(LookupError, match="2 tenants of this log have separate ids"):
            await log.lookup(event_id(1))
        with pytest.raises(LookupError, match="pass scope, such as"):
            await log.erase(key=event_id(1))
        assert (await log.lookup(event_id(1), scope="")).status is Status.UNKNOWN
        assert (await log.lookup(event_id(2))).status is Status.COMMITTED
        assert await log.erase(key=event_id(1), scope="") == 0
        assert await log.erase(key=event_id(1), scope=event_scope("a")) == 1
        assert [await log.erase(key=event_id(2)) for _ in range(2)] == [1, 0]


@BOTH_STORES
async def test_id_without_a_scope_is_unknown_if_no_tenant_has_separate_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=(Tenant("a"),)) as served:
        assert (await served.server.log.lookup(event_id(1))).status is Status.UNKNOWN
        assert await served.server.log.erase(key=event_id(1)) == 0


def test_separate_ids_are_a_setting_of_the_tenant(tmp_path: Path) -> None:
    environment = {"ONCELOG_TENANTS": "acme own_ids=true records_max=5", "ONCELOG_DEVELOPMENT": "true"}
    assert load(None, environment, {}).tenants == (Tenant("acme", records_max=5, own_ids=True),)
    file = tmp_path / "oncelog.toml"
    file.write_text('development = true\n[[tenants]]\nprefix = "acme"\nown_ids = true\n')
    assert load(str(file), {}, {}).tenants == (Tenant("acme", own_ids=True),)
    for text in ("acme own_ids=1", "acme own_ids=yes", "acme own_ids=true,acme/b own_ids=true"):
        with pytest.raises(SettingsError, match="own_ids"):
            load(None, {"ONCELOG_TENANTS": text, "ONCELOG_DEVELOPMENT": "true"}, {})
