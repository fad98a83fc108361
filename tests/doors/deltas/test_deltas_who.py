"""Who may do what at the deltas door, and what everybody else learns: nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from databases import BOTH_STORES
from doors import material
from doors.deltas.delta_doors import Door, Gateway, change, opened, refusal, streamed, told
from doors.serving import Answer, api_key, run, until
from oncelog.doors.requests import body_of
from oncelog.errors import StoreUnavailableError
from oncelog.testing.clock import ManualClock

pytestmark = BOTH_STORES

SHOP: Final = "deltas/shop"
READS: Final = ("pull", "rows/t", "rows/t?rowId=r1", "snapshot", "live")


def token(read: Sequence[str] = (), write: Sequence[str] = (), **claims: Any) -> str:
    return material.token(grants={"read": list(read), "write": list(write)}, **claims)


ADA: Final = {"client_id": "till-1"}


def mine(hlc: int = 1, row: str = "r1", **columns: Any) -> Any:
    return change(hlc, row, client="till-1", **(columns or {"a": hlc}))


async def asked(gateway: Gateway) -> list[Answer]:
    """Everything that can be asked of a gateway; no stream may begin."""
    return [
        await gateway.push(mine(1)),
        await gateway.request("POST", "compact", json={"keep": 0}),
        *[await gateway.request("GET", path) for path in READS],
    ]


@pytest.mark.rule("CO-21", "CO-22")
def test_without_a_good_credential_nothing_is_to_be_had_or_learned(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True, auth_failures_per_minute_max=0) as door:
            await door.gateway(credential=token(write=[SHOP], **ADA)).pushed(mine(1))
            expired = token(read=["*"], write=["*"], exp=material.NOW_S - 3600)
            for credential in (None, "nonsense", expired):
                for gateway in (door.gateway(credential=credential), door.gateway("other", credential)):
                    answers = await asked(gateway)
                    assert {refusal(answer) for answer in answers} == {(401, "AUTH_FAILED")}
                    assert len({answer.body for answer in answers}) == 1
                    assert {answer.headers["WWW-Authenticate"] for answer in answers} == {"Bearer"}
            live = await door.gateway().live()
            error = await live.connect(token=expired)
            assert (error["type"], error["code"]) == ("error", "AUTH_FAILED")
            assert await live.closed() == 1008

    run(main())


@pytest.mark.rule("CO-20")
def test_the_server_says_who_wrote_a_delta_whatever_comes_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True) as door:
            gateway = door.gateway(credential=token(read=[SHOP], write=[SHOP], sub="ada", **ADA))
            body = {"deltas": [{**mine(1), "actor": "user:eve"}], "actor": "user:eve"}
            assert (await gateway.push_body(json.dumps(body).encode())).json["committed"] == 1
            (record,) = (await door.served.server.log.read(stream=SHOP)).records
            assert record.actor == "user:ada"
            assert b"eve" not in record.body
            assert "eve" not in json.dumps(await gateway.pull())

    run(main())


@pytest.mark.rule("CO-18", "CO-22")
def test_a_stranger_learns_nothing_of_what_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True) as door:
            await door.gateway(credential=token(write=[SHOP], **ADA)).pushed(mine(1), mine(2))
            stranger = door.gateway(credential=token(read=["deltas/shopping"], write=["deltas/shopping"], **ADA))
            known, unknown = await stranger.push(mine(1)), await stranger.push(mine(99))
            assert refusal(known) == (403, "FORBIDDEN")
            assert known.body == unknown.body
            for path in READS:
                answers = [await stranger.request("GET", path), await stranger.request("GET", path)]
                assert {refusal(answer) for answer in answers} == {(403, "FORBIDDEN")}
            elsewhere = door.gateway("nowhere", token(**ADA))
            assert (await elsewhere.push(mine(1))).body == known.body
            # One who may push, but not as another client, does not learn what the other has pushed either.
            other = door.gateway(credential=token(write=[SHOP], client_id="till-2"))
            known, unknown = await other.push(mine(1)), await other.push(mine(99))
            assert known.body == unknown.body
            live = await stranger.live()
            error = await live.connect()
            assert (error["type"], error["code"]) == ("error", "FORBIDDEN")

    run(main())


@pytest.mark.rule("DE-10", "DE-6")
def test_a_delta_of_another_client_refuses_the_push(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True) as door:
            gateway = door.gateway(credential=token([SHOP], [SHOP], **ADA))
            answer = await gateway.push(mine(1), mine(2), change(3, client="till-2", a=1))
            assert refusal(answer) == (403, "FORBIDDEN")
            assert answer.json == {
                "error": "deltas[2].clientId: must be that of the credential", "code": "FORBIDDEN", "index": 2,
            }  # fmt: skip
            assert await gateway.pull_all() == []
            assert await gateway.pushed(mine(1)) == [(1, False)]
            # Without a client of its own a credential is its actor, all of it.
            user = door.gateway(credential=token([SHOP], [SHOP]))
            assert refusal(await user.push(change(1, client="ada", a=1))) == (403, "FORBIDDEN")
            assert await user.pushed(change(1, client="user:ada", a=1)) == [(2, False)]

    run(main())


@pytest.mark.rule("CO-22", "DE-12")
def test_to_read_to_write_and_to_compact_are_granted_apart(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True) as door:
            reader, writer, compacter, all_of_it = (
                door.gateway(credential=token(read, write, **ADA))
                for read, write in (
                    ([SHOP], []),
                    ([], [SHOP]),
                    ([], [f"{SHOP}/compact"]),
                    (["deltas/shop*"], ["deltas/shop*"]),
                )
            )
            assert await writer.pushed(mine(1)) == [(1, False)]
            for gateway, may_push, may_compact, may_read in (
                (reader, False, False, True),
                (writer, True, False, False),
                (compacter, False, True, False),
                (all_of_it, True, True, True),
            ):
                push, compact, *reads = [
                    await gateway.push(mine(1)),
                    await gateway.request("POST", "compact", json={"upto": 0}),
                    *[await gateway.request("GET", path) for path in READS[:-1]],
                ]
                assert push.status == (200 if may_push else 403)
                assert compact.status == (200 if may_compact else 403)
                assert {answer.status for answer in reads} == {200 if may_read else 403}
            assert refusal(await writer.request("GET", "live")) == (403, "FORBIDDEN")
            stream = await reader.stream()
            await stream.connected()
            assert await streamed(stream, 1) == [told(mine(1), 1)]
            stream.close()

    run(main())


@pytest.mark.rule("CO-23")
@pytest.mark.parametrize("kind", ["token", "key"])
def test_live_streams_end_when_the_right_to_them_ends(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        async with opened(tmp_path, tokens=kind == "token", api_keys=kind == "key", clock=clock) as door:
            if kind == "token":
                credential = token([SHOP], exp=material.NOW_S + 60)
            else:
                made = api_key(door.served, "till-1", read=[SHOP])
                credential = made.text
            gateway = door.gateway(credential=credential)
            stream, live = await gateway.stream(), await door.gateway().live()
            await stream.connected()
            assert (await live.connect(token=credential))["type"] == "connected"
            await until(lambda: len(door.server.deltas.streams) == 2)
            if kind == "token":
                clock.advance(60_000 + 31_000)
                door.server._renew()
            else:
                assert door.served.api_keys is not None
                door.served.api_keys.revoke(made.key.id)
                door.server.reload()
            message = await stream.next()
            assert message is not None
            assert (message.kind, message.json["code"]) == ("error", "AUTH_FAILED")
            assert await stream.next() is None
            error = await live.receive()
            assert (error["type"], error["code"]) == ("error", "AUTH_FAILED")
            await live.closed()

    run(main())


@pytest.mark.rule("CO-30")
def test_who_guesses_is_put_off(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, tokens=True, auth_failures_per_minute_max=3) as door:
            gateway = door.gateway(credential="nonsense")
            answers = [refusal(await gateway.request("GET", "pull")) for _ in range(4)]
            assert answers == [(401, "AUTH_FAILED")] * 3 + [(429, "RATE_LIMITED")]
            answer = await gateway.push(mine(1))
            assert answer.json["retryAfterMs"] > 0
            assert int(answer.headers["Retry-After"]) > 0

    run(main())


@pytest.mark.rule("CO-15", "DE-4")
def test_new_deltas_have_a_rate_and_known_ones_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.doors.deltas.door.PUSH_DELTAS_MAX", 100)

    async def main() -> None:
        clock = ManualClock()
        async with opened(tmp_path, clock=clock, new_events_per_second_max=10) as door:
            gateway = door.gateway()
            many = [change(number, a=number) for number in range(1, 101)]
            assert len(await gateway.pushed(*many)) == 100  # a push is taken as a whole, whatever the rate
            answer = await gateway.push(many[0], change(0, a=0))
            assert refusal(answer) == (429, "RATE_LIMITED")
            assert 0 < answer.json["retryAfterMs"] <= 1000
            assert answer.headers["Retry-After"] == "1"
            assert len(await gateway.pushed(*many)) == 100
            clock.advance(1000)
            assert len(await gateway.pushed(*(change(0, f"r{number}", a=0) for number in range(10)))) == 10
            assert refusal(await gateway.push(change(0, a=1))) == (429, "RATE_LIMITED")

    run(main())


@pytest.mark.rule("CO-32")
def test_a_stopping_server_takes_nothing_new(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            gateway = door.gateway()
            await gateway.pushed(change(1, a=1))
            door.server.deltas.is_closing = True
            answer = await gateway.push(change(2, a=2))
            assert refusal(answer) == (503, "SERVER_BUSY")
            assert answer.json["retryAfterMs"] > 0
            assert len(await gateway.pull_all()) == 1

    run(main())


@pytest.mark.rule("CO-16")
def test_what_the_store_cannot_do_is_told_as_neither_success_nor_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            gateway = door.gateway()
            await gateway.pushed(change(1, a=1))
            break_store(door, monkeypatch)
            for answer in (
                await gateway.push(change(2, a=2)),
                await gateway.request("GET", "pull"),
                await gateway.request("GET", "rows/t"),
                await gateway.request("GET", "snapshot"),
                await gateway.request("GET", "live"),
                await gateway.request("POST", "compact", json={"keep": 0}),
            ):
                assert refusal(answer) == (503, "SERVER_ERROR")
                assert answer.json["retryAfterMs"] > 0
            assert await gateway.pushed(change(1, a=1)) == [(1, True)]  # that is known
            monkeypatch.undo()
            assert await gateway.pushed(change(2, a=2)) == [(2, False)]

    run(main())


def break_store(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("the disk is away")

    for name in ("commit", "read", "rows", "side_state"):
        monkeypatch.setattr(door.log._store, name, broken)


@pytest.mark.rule("CO-21")
def test_in_development_everybody_may_be_anybody(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            gateway = door.gateway(credential="whatever")
            assert await gateway.pushed(change(1, client="a", a=1), change(1, client="b", a=1)) == [
                (1, False),
                (2, False),
            ]

    run(main())


@pytest.mark.rule("CO-22")
def test_rights_that_end_while_a_body_comes_are_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path, api_keys=True) as door:
            made = api_key(door.served, "till-1", read=[SHOP], write=[SHOP])

            async def slow(request: web.Request) -> bytes:
                assert door.served.api_keys is not None
                door.served.api_keys.revoke(made.key.id)
                door.server.reload()
                return await body_of(request)

            monkeypatch.setattr("oncelog.doors.deltas.http.body_of", slow)
            answer = await door.gateway(credential=made.text).push(mine(1))
            assert refusal(answer) == (401, "AUTH_FAILED")
            assert await door.log.books.newest(SHOP) == 0

    run(main())
