"""Who may do what at the ledger door, who writes are signed with, and what everybody gets when there is too much."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from databases import BOTH_STORES
from doors import material
from doors.ledger.ledger_doors import Door, key, opened, prepare
from doors.ledger.test_ledger_sequences import already
from doors.ledger.wires import (
    GRPC,
    HTTP,
    CallError,
    Json,
    Ledger,
    Watching,
    code,
    failure,
    put,
    refused,
    relate,
    success,
)
from doors.serving import api_key, run, soon, until
from doors.test_server import SHUTDOWN_MS, SHUTDOWN_S
from oncelog.core.operations import SetEntity
from oncelog.core.transactions import ledger_scope, transaction
from oncelog.doors.ledger import messages, words
from oncelog.testing.clock import ManualClock

pytestmark = BOTH_STORES

SET: Final = put("a", b"1")
TX: Final = "0001000000000001"
SCOPE: Final = "ledger/acme"


def token(sub: str = "ada", read: Sequence[str] = ("*",), write: Sequence[str] = ("*",), **claims: Any) -> str:
    return material.token(sub=sub, grants={"read": list(read), "write": list(write)}, **claims)


async def begun(ledger: Ledger) -> Json | None:
    """The first block of a stream."""
    watching: Watching = await ledger.watch_blocks()
    found = await watching.next()
    await watching.close()
    return found


def writes(ledger: Ledger) -> list[Any]:
    return [ledger.write(1, SET, key=key(1)), ledger.batch_write(1, [SET], key=key(1))]


def reads(ledger: Ledger) -> list[Any]:
    return [
        ledger.get_entity("a"),
        ledger.list_entities(),
        ledger.list_relationships(),
        ledger.check_relationship("r"),
        ledger.get_transaction(TX),
        ledger.get_block(1),
        ledger.get_proof(TX),
        begun(ledger),
    ]


async def told(calls: Sequence[Any]) -> list[tuple[str, str, str | None]]:
    return [error.told for error in await asyncio.gather(*map(refused, calls))]


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21", "CO-18")
def test_without_a_good_credential_nothing_is_to_be_had(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True, api_keys=True, auth_failures_per_minute_max=0) as door:
            good = token()
            assert code(await door.ledger(credential=good).write(1, SET, key=key(1))) == "OK"
            revoked = api_key(door.served, "gone", ["*"], ["*"])
            assert await door.ledger(credential=revoked.text).last_sequence() == 0
            assert door.served.api_keys is not None
            door.served.api_keys.revoke(revoked.key.id)
            door.server.reload()
            texts = set()
            for bad in (
                None,
                "nothing",
                good[:-2],
                token(exp=material.NOW_S - 31),
                material.token(key=material.key_of("HS256", 1)),
                revoked.text,
                revoked.text[:-1],
            ):
                ledger = door.ledger(credential=bad)
                for call in (*writes(ledger), *reads(ledger), ledger.get_client_state()):
                    error = await refused(call)
                    assert (error.status, error.code, error.field) == ("UNAUTHENTICATED", "auth_failed", None), bad
                    texts.add(error.message)
            assert len(texts) == 1  # whoever guesses learns nothing
            assert await door.ledger(credential=good).last_sequence() == 1

    run(main())


@pytest.mark.rule("CO-21")
def test_a_credential_is_looked_at_before_what_is_sent_with_it(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True) as door:
            way = door.wire()
            error = await refused(way.raw("Write", b"\xff") if wire == GRPC else way.post("write", b"{"))
            assert error.status == "UNAUTHENTICATED"

    run(main())


@pytest.mark.rule("CO-21")
def test_who_guesses_too_often_has_to_wait(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        async with opened(tmp_path, wire, tokens=True, clock=clock, auth_failures_per_minute_max=3) as door:
            bad, good = door.ledger(credential="bad"), door.ledger(credential=token())
            for _ in range(3):
                assert (await refused(bad.last_sequence())).status == "UNAUTHENTICATED"
            retry_after_ms = 0
            for ledger in (bad, good):
                error = await refused(ledger.last_sequence())
                assert (error.status, error.code) == ("RESOURCE_EXHAUSTED", "rate_limited")
                retry_after_ms = error.retry_after_ms or 0
                assert 0 < retry_after_ms <= 20_000
            clock.advance(retry_after_ms)
            assert await good.last_sequence() == 0

    run(main())


@pytest.mark.rule("CO-23")
@pytest.mark.parametrize("how", ["expired", "revoked", "narrowed"])
def test_a_reader_whose_rights_end_is_sent_away(tmp_path: Path, wire: str, how: str) -> None:
    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        async with opened(tmp_path, wire, tokens=True, api_keys=True, clock=clock) as door:
            writer = door.ledger(credential=token("writer"))
            await writer.write(1, SET)
            shown = api_key(door.served, "reader", [SCOPE], [])
            ending = door.ledger(credential=token(exp=material.NOW_S + 100) if how == "expired" else shown.text)
            staying = await writer.watch_blocks()
            watching = await ending.watch_blocks()
            assert await watching.next() == await staying.next()
            await writer.write(2, SET)
            assert await watching.next() == await staying.next()
            if how == "expired":
                clock.advance(100_000 + 30_000 - 1)  # the leeway
                door.server._renew()
                await writer.write(3, SET)
                assert await watching.next() == await staying.next()
                clock.advance(1)
                door.server._renew()
            elif how == "revoked":
                assert door.served.api_keys is not None
                door.served.api_keys.revoke(shown.key.id)
                door.server.reload()
            else:
                path = tmp_path / "keys.json"
                path.write_text(path.read_text().replace(f'"{SCOPE}"', '"ledger/other"'))
                door.server.reload()
            error = await refused(watching.next())
            assert (error.status, error.code) == ("UNAUTHENTICATED", "auth_failed")
            assert error.message == "the token has expired, or its rights have changed"
            error = await refused(ending.get_entity("a"))
            assert error.status == ("PERMISSION_DENIED" if how == "narrowed" else "UNAUTHENTICATED")
            last = await writer.last_sequence()
            await writer.write(last + 1, SET)
            block = await staying.next()
            assert block is not None
            assert len(block["tx_ids"]) == 1
            await until(lambda: door.server._readers == 1)
            await staying.close()
            if wire == GRPC:  # of HTTP that is noticed when there is something to send
                await until(lambda: door.server._readers == 0)

    run(main())


@pytest.mark.rule("CO-23", "CO-31")
@pytest.mark.parametrize("how", ["expired", "stopped"])
def test_a_reader_who_does_not_read_is_sent_away_too(
    tmp_path: Path, wire: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than a connection takes wait for one who is slow: he gets what is on its way, and then the end."""
    sent = 0

    def counted(name: str) -> Any:
        made: Any = messages.block if name == "block" else words.block_json

        def count(block: Any) -> Any:
            nonlocal sent
            sent += 1
            return made(block)

        return count

    async def fill(door: Door) -> None:
        scope, operations = ledger_scope("acme"), [SetEntity("a", b"")]
        for number in range(12):
            await door.log.submit_many([transaction(scope, f"{number}-{n}", 1, operations) for n in range(1000)])

    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        async with opened(tmp_path, wire, shutdown_ms=SHUTDOWN_MS, tokens=True, clock=clock) as door:
            reader = door.ledger(credential=token(exp=material.NOW_S + 100))
            await reader.write(1, SET)
            watching = await reader.watch_blocks()
            await watching.next()
            monkeypatch.setattr(messages, "block", counted("block"))
            monkeypatch.setattr(words, "block_json", counted("block_json"))
            await fill(door)
            await until(Unchanged(lambda: sent))
            if how == "expired":
                clock.advance(200_000)
                door.server._renew()
                assert await ending(watching) == "UNAUTHENTICATED"
                return
            stopping, read = asyncio.ensure_future(door.server.stop()), asyncio.ensure_future(ending(watching))
            done, _ = await asyncio.wait([stopping], timeout=SHUTDOWN_S)
            assert await read == ("UNAVAILABLE" if wire == GRPC else "OK")
            await soon(stopping)
            assert done

    run(main())


class Unchanged:
    """Whether a number has been the same for a hundred looks."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._last = 0
        self._looks = 0

    def __call__(self) -> bool:
        number = self._number()
        self._looks = self._looks + 1 if number == self._last else 0
        self._last = number
        return number > 0 and self._looks >= 100


async def ending(watching: Watching) -> str:
    """The status of what comes behind the last block."""
    try:
        while await watching.next() is not None:
            pass
    except CallError as error:
        return error.status
    except aiohttp.ClientError:  # a server that stops does not wait for long: the connection is cut
        pass
    return "OK"


# --- who it was -------------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-1", "CO-20")
def test_the_actor_is_the_user_of_a_token_and_the_client_of_a_key(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True, api_keys=True) as door:
            shown = api_key(door.served, "api_key_abc", ["*"], ["*"])
            for credential, actor, client in (
                (token("789"), "user:789", "user:789"),
                (shown.text, "client:api_key_abc", "api_key_abc"),
                (token("ada", client_id="laptop"), "user:ada", "laptop"),
            ):
                ledger = door.ledger(credential=credential)
                forged = {"actor": "system:gc"} if wire == HTTP else {}
                answer = success(await ledger.write(1, SET, key=key(1), **forged))
                assert answer["actor"] == actor
                found = await ledger.get_transaction(answer["committed_tx_id"])
                assert (found["actor"], found["client_id"]) == (actor, client)
                assert (await ledger.get_proof(answer["committed_tx_id"]))["record"]["actor"] == actor
                # Its own name may be said, or be left out.
                assert await ledger.of(client_id=client).write(1, SET, key=key(1)) == answer
                assert await ledger.of(client_id=client).last_sequence() == 1

    run(main())


@pytest.mark.rule("LG-1")
def test_nobody_writes_as_another_client(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True, api_keys=True) as door:
            shown = api_key(door.served, "shop", ["*"], ["*"])
            victim = door.ledger(credential=token("victim"))
            await victim.write(1, SET, key=key(1))
            for credential in (token("ada"), token("ada", client_id="laptop"), shown.text):
                ledger = door.ledger(credential=credential)
                message = "client_id: must be that of the credential, or be left out"
                for other in ("user:victim", "Ada", "laptop ", "ada"):
                    forged = ledger.of(client_id=other)
                    expected = ("INVALID_ARGUMENT", message, "client_id")
                    assert await told([*writes(forged), forged.get_client_state()]) == [expected] * 3
                assert await ledger.last_sequence() == 0
            assert await victim.last_sequence() == 1

    run(main())


# --- grants -----------------------------------------------------------------------------------------------------

MAY_NOT_READ: Final = ("PERMISSION_DENIED", "organization, vault: may not be read", "organization")
MAY_NOT_WRITE: Final = ("PERMISSION_DENIED", "organization, vault: may not be written", "organization")
MAY_NOTHING: Final = ("PERMISSION_DENIED", "organization, vault: may neither be read nor written", "organization")


async def filled(door: Door, *scopes: tuple[str, str]) -> None:
    """Scopes in which somebody has written under the keys that others will try."""
    for organization, vault in scopes:
        ledger = door.ledger(organization, vault, credential=token("root"))
        assert code(await ledger.write(1, SET, relate("r"), key=key(1))) == "OK"


async def rights(ledger: Ledger) -> str:
    """What one may do: r, w, both or nothing. Whatever is refused is refused with one text."""
    found = ""
    refusals = [await error_or_none(call) for call in reads(ledger)]
    if MAY_NOT_READ in refusals:
        assert refusals == [MAY_NOT_READ] * 8
    else:
        found += "r"
    written, state = await error_or_none(ledger.write(1, put("b"))), await error_or_none(ledger.get_client_state())
    assert written in (None, MAY_NOT_WRITE)
    found += "w" if written is None else ""
    assert state == (None if found else MAY_NOTHING)
    return found


async def error_or_none(call: Any) -> tuple[str, str, str | None] | None:
    try:
        await call
    except CallError as error:
        return error.told
    return None


@pytest.mark.rule("CO-22", "LG-7")
@pytest.mark.parametrize(
    ("read", "write", "expected"),
    [
        ([], [], ["", "", "", "", ""]),
        (["ledger/acme"], [], ["r", "", "", "", ""]),
        ([], ["ledger/acme"], ["w", "", "", "", ""]),
        (["ledger/acme/main"], ["ledger/acme/main"], ["", "rw", "", "", ""]),
        (["ledger/acme/*"], ["ledger/acme/*"], ["", "rw", "rw", "", ""]),
        (["ledger/acme*"], ["ledger/acme/main"], ["r", "rw", "r", "r", ""]),
        (["ledger/acme", "ledger/acme/*"], ["ledger/acme"], ["rw", "r", "r", "", ""]),
        (["ledger/*"], ["*"], ["rw", "rw", "rw", "rw", "rw"]),
        (["acme", "ledger/acme/"], ["acme/main"], ["", "", "", "", ""]),
        (["ledger/a%2Fb"], ["ledger/a%2Fb"], ["", "", "", "", "rw"]),
        (["ledger/a/b", "ledger/a/*"], ["ledger/a/b"], ["", "", "", "", ""]),
    ],
)
def test_grants_are_of_a_scope(
    tmp_path: Path, wire: str, read: list[str], write: list[str], expected: list[str]
) -> None:
    scopes = [("acme", ""), ("acme", "main"), ("acme", "other"), ("acme2", ""), ("a/b", "")]

    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True) as door:
            await filled(door, *scopes)
            shown = token("ada", read, write)
            found = [await rights(door.ledger(*scope, credential=shown)) for scope in scopes]
            assert found == expected

    run(main())


@pytest.mark.rule("CO-22", "LG-2")
def test_who_may_write_and_not_read_is_not_shown_what_a_condition_found(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True) as door:
            await door.ledger(credential=token()).write(1, put("a"))
            ledger = door.ledger(credential=token("bob", [], ["*"]))
            answer = await ledger.write(1, put("a", condition={"must_not_exist": True}))
            assert answer["error"]["code"] == "KEY_EXISTS"
            assert answer["error"]["key"] == "a"
            assert not answer["error"].keys() & {"current_value", "current_version"}
            assert "1" not in answer["error"]["message"]

    run(main())


@pytest.mark.rule("CO-22", "CO-18")
def test_who_may_not_write_learns_nothing_of_keys_and_sequences(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, tokens=True) as door:
            owner = door.ledger(credential=token())
            await owner.write(1, SET, key=key(1))
            for readable in (["*"], []):
                ledger = door.ledger(credential=token("ada", readable, []))  # the same client
                calls = [
                    ledger.write(1, SET, key=key(1)),
                    ledger.write(1, put("x"), key=key(1)),
                    ledger.write(1, SET),
                    ledger.write(2, SET, key=key(2)),
                    ledger.write(1, SET, key=key(2)),
                    ledger.write(9, SET, key=key(2)),
                    ledger.write(2, put("a", condition={"must_not_exist": True}), key=key(2)),
                    ledger.batch_write(1, [SET], key=key(1)),
                    ledger.batch_write(2, [SET], key=key(2)),
                ]
                assert await told(calls) == [MAY_NOT_WRITE] * len(calls)
            # What is malformed is told first: it says nothing about anybody.
            error = await refused(ledger.write(0, SET, key=key(1)))
            assert error.field == "sequence"
            assert await owner.last_sequence() == 1

    run(main())


@pytest.mark.rule("CO-22")
def test_a_retry_after_the_right_was_taken_away_gets_the_refusal(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, api_keys=True) as door:
            shown = api_key(door.served, "app", [SCOPE], [SCOPE])
            ledger = door.ledger(credential=shown.text)
            answer = success(await ledger.write(1, SET, key=key(1)))
            assert await ledger.write(1, SET, key=key(1)) == answer
            path = tmp_path / "keys.json"
            kept = path.read_text()
            path.write_text(kept.replace(f'"{SCOPE}"', '"ledger/other"'))
            door.server.reload()
            assert await told(writes(ledger)) == [MAY_NOT_WRITE] * 2
            assert (await refused(ledger.get_client_state())).told == MAY_NOTHING
            path.write_text(kept)
            door.server.reload()
            assert await ledger.write(1, SET, key=key(1)) == answer

    run(main())


@pytest.mark.rule("CO-22")
def test_a_transaction_and_a_proof_of_another_scope_are_not_found(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        await prepare(tmp_path, clock)  # in one lane: the id alone does not tell the scopes apart
        async with opened(tmp_path, wire, tokens=True, clock=clock) as door:
            owner = door.ledger(vault="secret", credential=token("owner"))
            answer = success(await owner.write(1, SET, key=key(1)))
            tx_id = answer["committed_tx_id"]
            ledger = door.ledger(vault="mine", credential=token("ada", ["ledger/acme/mine"], ["ledger/acme/mine"]))
            await ledger.write(1, SET)
            missing = ("NOT_FOUND", "tx_id: the scope has no such transaction", "tx_id")
            for scope in ({"vault": "mine"}, {"vault": "", "organization": "acme2"}):
                one = door.ledger(credential=token()).of(**scope)
                for other in (tx_id, "0" * 16, "f" * 16, f"{int(tx_id, 16) + 7:016x}", "0000000000000001"):
                    assert await told([one.get_transaction(other), one.get_proof(other)]) == [missing] * 2
            assert (await refused(ledger.get_transaction(tx_id))).told == missing
            assert (await owner.get_transaction(tx_id))["tx_id"] == tx_id
            assert await told(reads(ledger.of(vault="secret"))) == [MAY_NOT_READ] * 8

    run(main())


# --- too much ---------------------------------------------------------------------------------------------------


def demand_delay(error: CallError, wire: str, status: str, http_status: int) -> None:
    assert error.status == status
    assert error.retry_after_ms is not None
    assert error.retry_after_ms > 0
    if wire == HTTP:
        assert (error.http_status, error.retry_after_s) == (http_status, str(-(-error.retry_after_ms // 1000)))


@pytest.mark.rule("CO-32", "CO-15", "CO-18")
def test_when_commits_queue_new_writes_are_told_to_wait_and_known_ones_are_answered(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            before = success(await door.ledger(client_id="earlier").write(1, SET, key=key(1)))
        async with opened(tmp_path, wire, queue_items_max=1) as door:
            earlier, known, new = (door.ledger(client_id=name) for name in ("earlier", "known", "new"))
            first = success(await known.write(1, SET, key=key(1)))
            gate = door.served.hold_commits(monkeypatch)
            held = asyncio.ensure_future(door.ledger(client_id="held").write(1, SET, key=key(1)))
            await soon(gate.reached.wait())
            # From memory at once.
            assert await known.write(1, SET, key=key(1)) == first
            assert code(await known.write(2, put("x"), key=key(1))) == "IDEMPOTENCY_KEY_REUSED"
            # What is not in memory is asked about behind what is held; there is room for one question.
            asked = asyncio.ensure_future(earlier.write(1, SET, key=key(1)))
            await until(lambda: len(door.log._committer._inquiries) == 1)
            demand_delay(await refused(new.write(1, SET, key=key(1))), wire, "UNAVAILABLE", 503)
            gate.open()
            assert code(await held) == "OK"
            place = (before["assigned_sequence"], before["committed_tx_id"], before["block_height"])
            assert already(await asked) == place
            assert await new.last_sequence() == 0
            assert code(await new.write(1, SET, key=key(1))) == "OK"

    run(main())


@pytest.mark.rule("CO-32")
def test_a_new_write_that_is_asked_about_while_the_queue_is_full_is_told_to_wait(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path, wire, queue_items_max=1) as door:
            new = door.ledger(client_id="new")
            gate = door.served.hold_commits(monkeypatch)
            held = asyncio.ensure_future(door.ledger(client_id="held").write(1, SET, key=key(1)))
            await soon(gate.reached.wait())
            asked = asyncio.ensure_future(refused(new.write(1, SET, key=key(1))))
            await until(lambda: len(door.log._committer._inquiries) == 1)
            gate.open()
            demand_delay(await asked, wire, "UNAVAILABLE", 503)
            assert code(await held) == "OK"
            assert await new.last_sequence() == 0
            assert success(await new.write(1, SET, key=key(1)))["version"] == 2

    run(main())


@pytest.mark.rule("CO-15", "CO-18", "CO-30")
def test_new_writes_are_limited_and_known_ones_are_not(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        clock = ManualClock(material.NOW_MS)
        options: dict[str, Any] = {"tokens": True, "clock": clock, "new_events_per_second_max": 2}
        async with opened(tmp_path, wire, **options) as door:
            ledger = door.ledger(credential=token())
            first = success(await ledger.write(1, SET, key=key(1)))
            await ledger.write(2, SET, key=key(2))
            limited = await refused(ledger.write(3, SET, key=key(3)))
            demand_delay(limited, wire, "RESOURCE_EXHAUSTED", 429)
            assert limited.code == "rate_limited"
            assert await ledger.last_sequence() == 2
            # What is known, or refused for another reason, is told so.
            assert await ledger.write(1, SET, key=key(1)) == first
            assert await ledger.write(1, SET) == first
            assert code(await ledger.write(2, put("x"), key=key(2))) == "IDEMPOTENCY_KEY_REUSED"
            assert code(await ledger.write(1, put("x"))) == "SEQUENCE_REUSED"
            assert code(await ledger.write(7, SET, key=key(7))) == "SEQUENCE_GAP"
            error = failure(await ledger.write(3, put("a", condition={"must_not_exist": True}), key=key(3)))
            assert error["code"] == "KEY_EXISTS"
            # Another actor has a limit of its own.
            assert code(await door.ledger(credential=token("bob")).write(1, SET, key=key(1))) == "OK"
        async with opened(tmp_path, wire, **options) as door:
            ledger = door.ledger(credential=token())
            assert (await refused(ledger.write(3, SET, key=key(3)))).status == "RESOURCE_EXHAUSTED"
            assert already(await ledger.write(1, SET, key=key(1)))[1] == first["committed_tx_id"]
            clock.advance(limited.retry_after_ms or 0)
            assert success(await ledger.write(3, SET, key=key(3)))["assigned_sequence"] == 3

    run(main())
