"""The Events API over HTTP: credentials, grants, origins and hosts."""

import json
from pathlib import Path

import pytest

from databases import BOTH_STORES
from oncelog.errors import AUTHENTICATION_FAILED
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.auth.auth_material import token
from server.events.event_requests import NO_WRITE_ACCESS, PATH, committed_count
from server.running_server import api_key, item, serving

# --- credentials and grants --------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
async def test_every_invalid_credential_gets_the_same_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, api_keys=True) as served:
        key = api_key(served, "billing", ["a"])
        good = token()
        credentials = ["x", token(exp=1), token(key=auth_material.make_key("HS256", 1)), good[:-4] + "AAAA", "olk_x_y"]
        headers = [{"Authorization": f"Bearer {one}"} for one in credentials]
        headers += [{}, {"Authorization": f"Basic {good}"}, {"Authorization": good}, {"Authorization": "Bearer"}]
        requests = [("GET", f"{PATH}?partition=orders/1"), ("POST", PATH), ("GET", f"{PATH}/stream?partition=a")]
        answers = [await served.request(method, path, headers=one) for method, path in requests for one in headers]
        assert {(one.status, one.body, one.headers["WWW-Authenticate"]) for one in answers} == {
            (401, answers[0].body, "Bearer")
        }
        assert answers[0].error == {"code": "auth_failed", "message": AUTHENTICATION_FAILED, "details": {}}
        assert (await served.page("orders/1", headers={"Authorization": f"bearer  {good}"})).status == 200
        assert (await served.page("a", credential=key.text)).status == 200
        counts = served.server.counts
        assert counts.auth_failures == len(requests) * len(credentials)
        assert counts.unauthenticated_requests == len(answers) - counts.auth_failures


@pytest.mark.rule("CO-21")
async def test_token_of_the_maximum_length_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        long = token(grants={"read": [f"orders/{number:040}" for number in range(200)], "write": []})
        assert 12_000 < len(long) < 16_384
        assert (await served.page(f"orders/{7:040}", credential=long)).status == 200


@pytest.mark.rule("CO-20", "CO-22", "EV-1")
async def test_token_bound_to_another_client_is_refused_like_an_invalid_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, tokens=True) as served:
        served.credential = token(client_id="laptop")
        answer = await served.submit(item(1, "orders/1"), client_id="phone")
        assert "the credential does not belong to the client 'phone'" in str([one.__dict__ for one in caplog.records])
        bad = await served.submit(item(1, "orders/1"), credential="bad")
        assert answer.refusal == (401, "auth_failed")
        assert answer.body == bad.body
        assert (await served.submit(item(1, "orders/1"), client_id="laptop")).status == 200
        assert (await served.submit(item(2, "orders/1"))).status == 200
        assert (await served.submit(item(3, "orders/1"), credential=token())).status == 200
        events = (await served.page("orders/1")).json["events"]
        assert [event["client_id"] for event in events] == ["laptop", "laptop", "user:ada"]
        records = (await served.server.log.read()).records
        assert {record.actor for record in records} == {"user:ada"}


@BOTH_STORES
@pytest.mark.rule("CO-22", "EV-10")
async def test_unauthorized_write_does_not_reveal_existing_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        owner = token(grants={"read": ["*"], "write": ["*"]})
        await served.submit(item(1, "secret"), credential=owner)
        served.credential = token()  # grants: read orders/*, write orders/1
        answers = set()
        for number, partitions in ((1, ["secret"]), (2, ["secret"]), (1, ["nothing"]), (1, ["orders/1", "secret"])):
            one = {**item(number), "partitions": partitions}
            results = (await served.submit(one, item(100 + number, "orders/1"))).json["results"]
            assert results[1]["status"] == "committed"
            answers.add(json.dumps({**results[0], "id": ""}))
        (only,) = answers
        assert json.loads(only) == {
            "id": "",
            "status": "rejected",
            "reason": "forbidden",
            "errors": [
                {
                    "field": "partitions",
                    "message": NO_WRITE_ACCESS,
                }
            ],
        }
        bodies = {(await served.submit(item(number, "secret"))).body.replace(b"2", b"1") for number in (1, 2)}
        assert len(bodies) == 1
        # Without the grant, a client is refused even for events that it wrote itself.
        await served.submit(item(5, "orders/1"))
        less = token(grants={"read": [], "write": []})
        (late,) = (await served.submit(item(5, "orders/1"), credential=less)).json["results"]
        assert late["reason"] == "forbidden"


@BOTH_STORES
@pytest.mark.rule("EV-11", "CO-22")
async def test_unauthorized_read_does_not_reveal_existing_partitions(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        await served.submit(item(1, "secret"), credential=token(grants={"write": ["*"]}))
        served.credential = token()
        asked: list[tuple[str, ...]] = [("secret",), ("nothing",), ("orders/1", "secret"), ("orders/1", "nothing")]
        answers = [await served.page(*one) for one in asked]
        answers += [await served.page("secret", since=1000, epoch="x"), await served.page("nothing", since=1000)]
        assert {one.body for one in answers} == {answers[0].body}
        assert answers[0].refusal == (403, "forbidden")
        assert (await served.page("orders/2")).status == 200


@pytest.mark.rule("CO-21", "CO-30")
async def test_failed_authentications_are_rate_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, auth_failures_per_minute_max=3) as served:
        for _ in range(3):
            assert (await served.page("orders/1", credential="wrong")).refusal == (401, "auth_failed")
        answer = await served.page("orders/1", credential="wrong")
        assert answer.refusal == (429, "rate_limited")
        assert answer.error["details"] == {"retry_after_ms": 20_000}
        assert answer.headers["Retry-After"] == "20"
        assert (await served.page("orders/1")).refusal == (401, "auth_failed")
        assert (await served.page("orders/1", credential=token())).status == 200
        assert isinstance(served.clock, ManualClock)
        served.clock.advance(20_000)
        assert (await served.page("orders/1", credential="wrong")).refusal == (401, "auth_failed")


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("is_trusted", [True, False])
async def test_forwarded_address_is_used_only_from_trusted_proxies(tmp_path: Path, is_trusted: bool) -> None:
    proxies = ("127.0.0.0/8",) if is_trusted else ("10.0.0.0/8",)
    async with serving(tmp_path, tokens=True, trusted_proxies=proxies, auth_failures_per_minute_max=2) as served:
        statuses = [
            (
                await served.page("a", credential="wrong", headers={"X-Forwarded-For": f"1.2.3.4, 192.0.2.{number}"})
            ).status
            for number in (1, 1, 1, 2)
        ]
        assert statuses == ([401, 401, 429, 401] if is_trusted else [401, 401, 429, 429])


# --- browsers ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
async def test_requests_from_other_origins_are_refused_unless_configured(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=("https://app.example.org",)) as served:
        paths = ("/", "/metrics", f"{PATH}?partition=a", f"{PATH}/stream?partition=a", "/nowhere")
        for origin in (
            "https://evil.example",
            "null",
            "",
            "https://app.example.org.evil",
            "http://app.example.org",
        ):
            for path in paths:
                answer = await served.get(path, headers={"Origin": origin})
                assert answer.refusal == (403, "forbidden")
                assert answer.error["details"] == {"field": "Origin"}
            assert (await served.submit(item(1), headers={"Origin": origin})).refusal == (403, "forbidden")
        for origin in ("https://app.example.org", "HTTPS://APP.example.org:443", served.url):
            assert (await served.page("a", headers={"Origin": origin})).status == 200
        assert await committed_count(served) == 0


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(("proxies", "status"), [(("127.0.0.1",), 200), ((), 403)])
async def test_forwarded_scheme_is_used_only_from_trusted_proxies(
    tmp_path: Path, proxies: tuple[str, ...], status: int
) -> None:
    async with serving(tmp_path, trusted_proxies=proxies) as served:
        origin = served.url.replace("http:", "https:")
        answer = await served.page("a", headers={"Origin": origin, "X-Forwarded-Proto": "https"})
        assert answer.status == status


@pytest.mark.rule("CO-21", "CO-24")
async def test_development_mode_requires_a_loopback_host_header(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for host in ("evil.example", "evil.example:7171", "127.0.0.1.evil.example", ""):
            answer = await served.page("a", headers={"Host": host})
            assert answer.refusal == (403, "forbidden")
            assert answer.error["details"] == {"field": "Host"}
        for host in ("localhost", "LOCALHOST:1", "app.localhost", "127.9.9.9:80", "[::1]:7171"):
            assert (await served.page("a", headers={"Host": host})).status == 200
    async with serving(tmp_path, tokens=True) as served:
        answer = await served.page("orders/1", credential=token(), headers={"Host": "log.example.org"})
        assert answer.status == 200
