"""Lookups by id: the outcome and proof of an event, message, transaction or delta."""

from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from databases import BOTH_STORES
from oncelog.core.chat import chat_scope
from oncelog.core.deltas import deltas_scope
from oncelog.engine.log import Log
from oncelog.errors import StoreUnavailableError
from oncelog.proof import decode, verify
from oncelog.server.errors import UNREADABLE
from server.auth.auth_material import token
from server.deltas.delta_servers import change
from server.running_server import Answer, Serving, event_id, item, serving

pytestmark = BOTH_STORES
UNKNOWN: Final = "no record: it was never committed here, or it was refused, which leaves no trace"
MESSAGE_ID: Final = "00000000-0000-4000-8000-000000000001"
KEY: Final = f"{1:032x}"


def check_proof(answer: Answer) -> dict[str, Any]:
    """Check the proof in the answer to a lookup, and return the answer."""
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    assert verify(decode(orjson.dumps(found["proof"]))).is_valid
    assert found["status"] == "committed"
    assert found["reason"].startswith("committed as ")
    return found


def not_found(answer: Answer) -> str:
    assert (answer.status, answer.json["code"].lower()) == (404, "not_found"), answer.body
    detail: str = answer.json["detail"]
    return detail


async def write(served: Serving, **headers: str) -> dict[str, Any]:
    body = {
        "organization": "acme",
        "sequence": 1,
        "idempotency_key": KEY,
        "operations": [{"set_entity": {"key": "a", "value": "MQ=="}}],
    }
    answer = await served.request("POST", "/v1/ledger/write", json=body, headers=headers)
    assert answer.status == 200, answer.body
    receipt: dict[str, Any] = answer.json
    return receipt


async def send(served: Serving, chat_id: str = "tea") -> dict[str, Any]:
    await served.request("POST", "/v1/chats", json={"chat_id": chat_id})
    message = {"client_message_id": MESSAGE_ID, "content": "hello"}
    sent: dict[str, Any] = (await served.request("POST", f"/v1/chats/{chat_id}/messages", json=message)).json
    return sent


async def push(served: Serving) -> str:
    delta = change(1, a=1, client="user:developer")
    assert (await served.request("POST", "/v1/sync/shop/push", json={"deltas": [delta]})).status == 200
    found: str = delta["deltaId"]
    return found


async def test_event_is_found_by_its_id_with_its_proof(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1, "a", "b"))
        found = check_proof(await served.get(f"/v1/events/{event_id(1)}?partition=b&partition=c"))
        (paged,) = (await served.page("a")).json["events"]
        assert found["event"] == paged
        assert found["proof"]["record"]["position"] == paged["committed_id"]
        assert UNKNOWN in not_found(await served.get(f"/v1/events/{event_id(2)}?partition=a"))
        for path in (f"/v1/events/{event_id(1)}", "/v1/events/none?partition=a"):
            assert (await served.get(path)).status == 400


@pytest.mark.rule("CO-22")
async def test_event_in_other_partitions_is_answered_like_an_unknown_one(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        everything = {"Authorization": f"Bearer {token(grants={'read': ['*'], 'write': ['*']})}"}
        reader = {"Authorization": f"Bearer {token(grants={'read': ['b']})}"}
        body = {"events": [item(1, "a")]}
        assert (await served.request("POST", "/v1/events", json=body, headers=everything)).status == 200
        assert (await served.get(f"/v1/events/{event_id(1)}?partition=a", headers=everything)).status == 200
        answers = [await served.get(f"/v1/events/{event_id(n)}?partition=b", headers=reader) for n in (1, 2)]
        assert not_found(answers[0]) == not_found(answers[1])
        forbidden = [await served.get(f"/v1/events/{event_id(n)}?partition=a", headers=reader) for n in (1, 2)]
        assert [one.status for one in forbidden] == [403, 403]
        assert forbidden[0].body == forbidden[1].body


async def test_proof_of_an_event_is_omitted_if_actors_are_hidden(tmp_path: Path) -> None:
    async with serving(tmp_path, show_actors=False) as served:
        await served.commit(item(1, "a"))
        found = (await served.get(f"/v1/events/{event_id(1)}?partition=a")).json
    assert found.keys() == {"status", "reason", "event"}
    assert b"developer" not in orjson.dumps(found["event"].get("actor", ""))


async def test_erased_event_is_reported_as_erased(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1, "a"))
        await served.server.log.erase(key=event_id(1))
        found = check_proof(await served.get(f"/v1/events/{event_id(1)}?partition=a"))
    assert "its content has been erased since" in found["reason"]
    assert (found["event"]["event"], found["proof"]["body"]) == (None, None)


async def test_message_is_found_by_its_id_and_by_the_id_of_its_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        sent = await send(served)
        by_id = check_proof(await served.get(f"/v1/chats/tea/messages/{sent['message_id']}"))
        by_sender = check_proof(await served.get(f"/v1/chats/tea/messages/{MESSAGE_ID}"))
        (listed,) = (await served.get("/v1/chats/tea/messages")).json["messages"]
        assert by_id == by_sender
        assert by_id["message"] == listed
        assert by_id["proof"]["record"]["scope"] == chat_scope("tea")
        other = MESSAGE_ID.replace("0001", "0002")
        for message_id in (other, "msg_" + "0" * 25 + "9", sent["message_id"][:-1] + "f"):
            assert UNKNOWN in not_found(await served.get(f"/v1/chats/tea/messages/{message_id}"))
        assert (await served.get("/v1/chats/tea/messages/none")).status == 400


@pytest.mark.rule("CO-22", "CH-9")
async def test_message_lookup_reveals_nothing_to_non_members(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        sent = await send(served)
        await send(served, "milk")
        headers = {"Authorization": "Bearer mallory"}
        paths = [f"/v1/chats/{chat}/messages/{sent['message_id']}" for chat in ("tea", "none")]
        answers = [await served.get(path, headers=headers) for path in paths]
        assert [one.status for one in answers] == [403, 403]
        assert answers[0].body == answers[1].body
        not_found(await served.get(f"/v1/chats/milk/messages/{sent['message_id']}"))  # in another chat


async def test_transaction_is_found_by_its_id_and_by_its_key(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        receipt = await write(served)
        path = "/v1/ledger/outcome?organization=acme"
        by_id = check_proof(await served.get(f"{path}&tx_id={receipt['committed_tx_id']}"))
        by_key = check_proof(await served.get(f"{path}&idempotency_key={KEY}"))
        query = f"organization=acme&tx_id={receipt['committed_tx_id']}"
        assert by_id == by_key
        assert by_id["transaction"] == (await served.get(f"/v1/ledger/transaction?{query}")).json
        assert by_id["proof"] == (await served.get(f"/v1/ledger/proof?{query}")).json
        assert UNKNOWN in not_found(await served.get(f"{path}&idempotency_key={2:032x}"))
        not_found(await served.get(f"/v1/ledger/outcome?organization=other&tx_id={receipt['committed_tx_id']}"))
        for query in ("", f"&tx_id={receipt['committed_tx_id']}&idempotency_key={KEY}", "&idempotency_key=x"):
            assert (await served.get(f"{path}{query}")).status == 400


@pytest.mark.parametrize("key", ["ab", "0" * 32, "a" * 64])
async def test_invalid_transaction_key_is_refused(tmp_path: Path, key: str) -> None:
    async with serving(tmp_path) as served:
        answer = await served.get(f"/v1/ledger/outcome?organization=acme&idempotency_key={key}")
    assert (answer.status, answer.json["errors"][0]["path"]) == (400, "idempotency_key"), answer.body


@pytest.mark.rule("CO-22")
async def test_transaction_lookup_requires_read_access_to_the_scope(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        writer = {"Authorization": f"Bearer {token(grants={'read': ['*'], 'write': ['*']})}"}
        stranger = {"Authorization": f"Bearer {token(grants={'write': ['ledger/acme']})}"}
        receipt = await write(served, **writer)
        path = "/v1/ledger/outcome?organization=acme"
        queries = (f"tx_id={receipt['committed_tx_id']}", "tx_id=0000000000000009", f"idempotency_key={KEY}")
        answers = [await served.get(f"{path}&{query}", headers=stranger) for query in queries]
    assert {(one.status, one.body) for one in answers} == {(403, answers[0].body)}


async def test_delta_is_found_by_its_id_with_its_proof(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        delta_id = await push(served)
        found = check_proof(await served.get(f"/v1/sync/shop/deltas/{delta_id}"))
        assert found["delta"] == (await served.get("/v1/sync/shop/pull")).json["deltas"][0]
        assert found["proof"]["record"]["scope"] == deltas_scope("shop")
        assert UNKNOWN in not_found(await served.get(f"/v1/sync/other/deltas/{delta_id}"))
        assert (await served.get("/v1/sync/shop/deltas/none")).status == 400
        assert (await served.request("POST", "/v1/sync/shop/compact", json={"upto": 1})).status == 200
        compacted = check_proof(await served.get(f"/v1/sync/shop/deltas/{delta_id}"))
    assert (compacted["delta"], compacted["proof"]["body"]) == (None, None)


@pytest.mark.rule("CO-22")
async def test_delta_lookup_requires_read_access_to_the_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        headers = {"Authorization": f"Bearer {token(grants={'read': ['deltas/other']})}"}
        answer = await served.get(f"/v1/sync/shop/deltas/{'0' * 64}", headers=headers)
    assert answer.status == 403


async def test_lookup_during_a_read_failure_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailableError("no connection")

    async with serving(tmp_path) as served:
        await served.commit(item(1, "a"))
        sent, receipt, delta_id = await send(served), await write(served), await push(served)
        paths = (
            f"/v1/events/{event_id(1)}?partition=a",
            f"/v1/chats/tea/messages/{sent['message_id']}",
            f"/v1/chats/tea/messages/{MESSAGE_ID}",
            f"/v1/ledger/outcome?organization=acme&tx_id={receipt['committed_tx_id']}",
            f"/v1/ledger/outcome?organization=acme&idempotency_key={KEY}",
            f"/v1/sync/shop/deltas/{delta_id}",
        )
        for name in ("prove", "lookup"):
            monkeypatch.setattr(Log, name, fail)
            answers = [await served.get(path) for path in paths]
            assert [one.json["detail"] for one in answers] == [UNREADABLE] * len(paths)
            assert all(one.headers["Retry-After"] == "1" for one in answers)
