"""Stream tickets: a ticket opens one stream for its caller, until the ticket or the caller's credential is invalid.

A ticket expires. A credential expires or is revoked.
"""

import logging
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from databases import BOTH_STORES
from deadlines import soon
from oncelog.errors import AUTHENTICATION_FAILED
from oncelog.server.auth.stream_tickets import TICKET_PREFIX
from oncelog.server.settings import TicketSettings
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.auth.auth_material import token
from server.running_server import Answer, EventStream, Serving, api_key, item, numbers, serving

STREAM: Final = "/v1/events/stream"
DELTAS: Final = "/v1/sync/shop/live"
BLOCKS: Final = "/v1/ledger/blocks/stream?organization=acme"


async def get_ticket(served: Serving, to: str = f"{STREAM}?partition=a", credential: str | None = None) -> str:
    """Return a new ticket for the stream with this path and query."""
    answer = await served.request("POST", to, credential=credential)
    assert answer.status == 201, answer.body
    text = answer.json["ticket"]
    assert text.startswith(TICKET_PREFIX)
    assert set(answer.json) == {"ticket", "expires_at_ms"}
    return str(text)


def alter(ticket: str) -> str:
    """Return the ticket with another character in the middle.

    The last character may contain unused bits, so a change of that character may have no effect.
    """
    middle = len(ticket) // 2
    return f"{ticket[:middle]}{'B' if ticket[middle] == 'A' else 'A'}{ticket[middle + 1 :]}"


def with_ticket(to: str, ticket: str) -> str:
    return f"{to}{'&' if '?' in to else '?'}ticket={quote(ticket)}"


async def open_stream(served: Serving, ticket: str, *partitions: str, **headers: Any) -> EventStream:
    """Open a stream of events as `EventSource` does, without a credential."""
    assert served.credential is None
    return await served.stream(*(partitions or ("a",)), ticket=ticket, headers=headers)


async def refusal(served: Serving, to: str, **headers: str) -> tuple[int, str]:
    answer: Answer = await served.get(to, headers=headers)
    return answer.status, answer.json["code"].lower()


@BOTH_STORES
@pytest.mark.rule("EV-16", "CO-21")
async def test_ticket_opens_its_stream_and_resumes_it_any_number_of_times(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ada = token(grants={"read": ["a"], "write": ["a"]})
        ticket = await get_ticket(served, credential=ada)
        for number in (1, 2, 3):
            answer = await served.submit(item(number), credential=ada)
            assert answer.status == 200
            last = {"Last-Event-ID": str(number - 1)} if number > 1 else {}
            stream = await open_stream(served, ticket, **last)
            assert stream.response.headers["Cache-Control"] == "no-store"
            assert stream.response.headers["Referrer-Policy"] == "no-referrer"
            assert (await stream.connected())["actor"] == "user:ada"
            assert numbers(await stream.events(1)) == [number]
            stream.close()


@pytest.mark.rule("CO-21", "CO-22")
@pytest.mark.parametrize("to", [f"{STREAM}?partition=a", BLOCKS, DELTAS])
async def test_every_stream_has_tickets(tmp_path: Path, to: str) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ticket = await get_ticket(served, to, token(grants={"read": ["*"]}))
        response = await soon(served.session.get(served.url + with_ticket(to, ticket)))
        assert (response.status, response.content_type) == (200, "text/event-stream")
        response.close()


@pytest.mark.rule("CO-21", "CO-22")
async def test_ticket_opens_no_other_stream_and_no_other_operation(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        everything = token(grants={"read": ["*"], "write": ["*"]})
        ticket = await get_ticket(served, f"{STREAM}?partition=a&partition=b", everything)
        for to in (f"{STREAM}?partition=a", f"{STREAM}?partition=c", f"{STREAM}?partition=a%2Cb", DELTAS, BLOCKS):
            assert await refusal(served, with_ticket(to, ticket)) == (403, "forbidden"), to
        # Only streams accept tickets, and a ticket is not a bearer credential.
        assert await refusal(served, with_ticket("/v1/events?partition=a&partition=b", ticket)) == (401, "auth_failed")
        assert (await served.page("a", "b", credential=ticket)).status == 401
        assert (await served.request("POST", f"{STREAM}?partition=a", credential=ticket)).status == 401
        answer = await served.request("POST", with_ticket(f"{STREAM}?partition=a&partition=b", ticket))
        assert answer.refusal == (401, "auth_failed")
        # The order of the partitions does not matter.
        stream = await open_stream(served, ticket, "b", "a")
        assert stream.response.status == 200


async def test_asterisk_in_a_name_of_a_ticket_is_an_ordinary_character(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ticket = await get_ticket(served, f"{STREAM}?partition=*", token(grants={"read": ["*"]}))
        assert await refusal(served, with_ticket(f"{STREAM}?partition=a", ticket)) == (403, "forbidden")
        stream = await open_stream(served, ticket, "*")
        assert stream.response.status == 200


@pytest.mark.rule("CO-22")
async def test_caller_without_access_gets_no_ticket_whether_or_not_the_partition_exists(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        await served.submit(item(1, "secret"), credential=token(grants={"write": ["*"]}))
        own = token(grants={"read": ["a"]})
        answers = [
            await served.request("POST", f"{STREAM}?partition={name}", credential=own) for name in ("secret", "none")
        ]
        assert [one.refusal for one in answers] == [(403, "forbidden")] * 2
        assert answers[0].body == answers[1].body
        assert (await served.request("POST", f"{STREAM}?partition=a")).refusal == (401, "auth_failed")


@pytest.mark.rule("CO-21")
async def test_ticket_expires_after_its_lifetime_or_with_its_credential(tmp_path: Path) -> None:
    clock = ManualClock(auth_material.NOW_MS)
    async with serving(tmp_path, tokens=True, clock=clock, ticket_lifetime_ms=60_000) as served:
        long, short = token(grants={"read": ["a"]}), token(grants={"read": ["a"]}, exp=auth_material.NOW_S + 10)
        answers = [await served.request("POST", f"{STREAM}?partition=a", credential=one) for one in (long, short)]
        leeway_ms = 30_000
        expected = [auth_material.NOW_MS + 60_000, auth_material.NOW_MS + 10_000 + leeway_ms]
        assert [one.json["expires_at_ms"] for one in answers] == expected
        for answer in reversed(answers):
            ticket, expires_ms = answer.json["ticket"], answer.json["expires_at_ms"]
            clock.advance(expires_ms - 1 - clock.wall_ms())
            stream = await open_stream(served, ticket)
            assert stream.response.status == 200
            stream.close()
            clock.advance(1)
            assert await refusal(served, with_ticket(f"{STREAM}?partition=a", ticket)) == (401, "auth_failed")


@pytest.mark.rule("CO-23")
async def test_revoked_key_ends_the_stream_and_the_ticket(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        assert served.api_keys is not None
        gone, kept = api_key(served, "gone", ["a"]), api_key(served, "kept", ["a"])
        tickets = [await get_ticket(served, credential=key.text) for key in (gone, kept)]
        streams = [await open_stream(served, ticket) for ticket in tickets]
        for stream in streams:
            await stream.connected()
        served.api_keys.revoke(gone.key.id)
        served.server.reload()
        message = await streams[0].next()
        assert message is not None
        assert (message.kind, message.json["code"]) == ("error", "auth_failed")
        assert await streams[0].next() is None
        assert await refusal(served, with_ticket(f"{STREAM}?partition=a", tickets[0])) == (401, "auth_failed")
        resumed = await open_stream(served, tickets[1])
        assert resumed.response.status == 200


@pytest.mark.rule("CO-23")
async def test_ticket_has_the_current_rights_of_its_key(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "till", ["a"])
        ticket = await get_ticket(served, credential=key.text)
        path = tmp_path / "keys.json"
        path.write_text(path.read_text().replace('"a"', '"b"'))
        served.server.reload()
        assert await refusal(served, with_ticket(f"{STREAM}?partition=a", ticket)) == (403, "forbidden")


@pytest.mark.rule("CO-23")
async def test_ticket_ends_with_the_key_that_signed_its_token(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ticket = await get_ticket(served, credential=token(grants={"read": ["a"]}))
        auth_material.write_file(tmp_path / "HS256-0.key", auth_material.SECRET + b"another")
        served.server.reload()
        assert await refusal(served, with_ticket(f"{STREAM}?partition=a", ticket)) == (401, "auth_failed")


async def test_servers_with_the_same_key_file_accept_each_others_tickets(tmp_path: Path) -> None:
    key_file = tmp_path / "tickets.key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    options: Any = {"tokens": True, "tickets": TicketSettings(key_file=str(key_file))}
    async with serving(tmp_path, **options) as served:
        ticket = await get_ticket(served, credential=token(grants={"read": ["a"]}))
    async with serving(tmp_path, **options) as restarted:
        stream = await open_stream(restarted, ticket)
        assert stream.response.status == 200
        key_file.write_bytes(b"n" * 32)
        restarted.server.reload()
        assert await refusal(restarted, with_ticket(f"{STREAM}?partition=a", ticket)) == (401, "auth_failed")
    async with serving(tmp_path, tokens=True) as other:
        assert await refusal(other, with_ticket(f"{STREAM}?partition=a", ticket)) == (401, "auth_failed")


@pytest.mark.rule("CO-25")
async def test_wrong_tickets_count_as_failed_authentications(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, auth_failures_per_minute_max=2) as served:
        good = await get_ticket(served, credential=token(grants={"read": ["a"]}))
        wrong = with_ticket(f"{STREAM}?partition=a", alter(good))
        found = [await refusal(served, wrong) for _ in range(3)]
        assert found == [(401, "auth_failed"), (401, "auth_failed"), (429, "rate_limited")]
        assert served.server.counts.auth_failures == 3
        stream = await open_stream(served, good)  # a valid ticket is never throttled
        assert stream.response.status == 200


async def test_tickets_are_limited_like_other_requests_and_streams(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, requests_per_second_max=1) as served:
        ada = token(grants={"read": ["a"]})
        ticket = await get_ticket(served, credential=ada)
        statuses = [(await served.request("POST", f"{STREAM}?partition=a", credential=ada)).status for _ in range(6)]
        assert statuses[-1] == 429
        answer = await served.get(with_ticket(f"{STREAM}?partition=a", ticket))
        # A request with a ticket counts against the request limit of the ticket's caller.
        assert answer.refusal == (429, "rate_limited")


@pytest.mark.parametrize("ticket", ["", "olt_", "olt_...", "olt_\u00e9", "none", "olt_" + "a" * 20_000, "olt_a.b.c"])
async def test_malformed_ticket_is_refused_like_a_wrong_one(tmp_path: Path, ticket: str) -> None:
    async with serving(tmp_path, tokens=True) as served:
        answer = await served.get(with_ticket(f"{STREAM}?partition=a", ticket))
        assert answer.refusal == (401, "auth_failed")
        assert answer.error["message"] == AUTHENTICATION_FAILED


async def test_request_has_a_ticket_or_a_credential_but_not_both(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ada = token(grants={"read": ["a"]})
        to = with_ticket(f"{STREAM}?partition=a", await get_ticket(served, credential=ada))
        assert (await served.get(to, credential=ada)).refusal == (400, "bad_request")
        assert (await served.get(f"{to}&ticket=x")).refusal == (400, "bad_request")


async def test_development_mode_issues_tickets_without_a_credential(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ticket = await get_ticket(served, credential="ann")
        stream = await open_stream(served, ticket)
        assert (await stream.connected())["actor"] == "user:ann"
        assert await refusal(served, with_ticket(f"{STREAM}?partition=b", ticket)) == (403, "forbidden")


async def test_no_log_line_or_metric_contains_a_ticket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tmp_path, tokens=True, metrics_public=True) as served:
        ticket = await get_ticket(served, credential=token(grants={"read": ["a"]}))
        wrong = alter(ticket)
        stream = await open_stream(served, ticket)
        await stream.connected()
        for text in (ticket, wrong):
            await served.get(with_ticket(f"{STREAM}?partition=b", text))
            await served.get(with_ticket(f"{STREAM}?partition=a&since=x", text))
            await served.get(with_ticket("/v1/none", text))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.server.apis.events_service, "check_epoch", lambda _: 1 / 0)
            assert (await served.get(with_ticket(f"{STREAM}?partition=a", ticket))).status == 500
        metrics = (await served.get("/metrics")).body.decode()
    assert "stream ticket: forged" in caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    secret = ticket.removeprefix(TICKET_PREFIX)[:40]
    assert secret not in metrics
    for record in caplog.records:
        assert secret not in record.getMessage() + str(record.__dict__) + caplog.text, record
