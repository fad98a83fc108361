"""Client ids and actors of events: no credential can write under the client id of another. Readers see the actor."""

import json
from pathlib import Path
from typing import Any

import pytest

from client.events.event_clients import client_of, committed, numbered_draft, wait_until_live
from databases import BOTH_STORES
from deadlines import soon
from oncelog.errors import CanonicalError
from oncelog.server.auth.principal import Principal, parse_grants
from server.auth.auth_material import token
from server.running_server import Serving, SocketClient, api_key, item, serving

GRANTS = {"read": ["*"], "write": ["*"]}
WIRES = ("websocket", "http", "insieme")


def user(sub: str, client_id: str | None = None) -> str:
    """Return a token with grants to read and write everything."""
    return token(sub=sub, client_id=client_id, grants=GRANTS)


async def insieme_connect(socket: SocketClient, credential: str, client_id: str) -> Any:
    """Connect in the dialect of the npm package, and return the reply."""
    payload = {"token": credential, "clientId": client_id, "projectId": "p"}
    await socket.socket.send_str(json.dumps({"type": "connect", "protocolVersion": "1.0", "payload": payload}))
    return (await socket.receive())["payload"]


def insieme_item(number: int, client_id: str) -> dict[str, Any]:
    meta = {"clientId": client_id, "clientTs": 1}
    named = {"id": f"e{number}", "projectId": "p", "partition": "a", "type": "t", "schemaVersion": 1}
    return {**named, "payload": {}, "meta": meta}


async def write(served: Serving, wire: str, credential: str, client_id: str, number: int) -> str:
    """Write an event with the given client id; return the status, or the error code."""
    if wire == "http":
        answer = await served.submit(item(number), client_id=client_id, credential=credential)
        return str(answer.json["results"][0]["status"] if answer.status == 200 else answer.error["code"])
    socket = await served.socket()
    if wire == "websocket":
        connected = await socket.connect(client_id, credential)
        return str(connected["code"] if "code" in connected else (await socket.submit(item(number)))[0]["status"])
    connected = await insieme_connect(socket, credential, client_id)
    if "code" in connected:
        return str(connected["code"])
    payload = {"events": [insieme_item(number, client_id)]}
    await socket.socket.send_str(json.dumps({"type": "submit_events", "protocolVersion": "1.0", "payload": payload}))
    return str((await socket.receive())["payload"]["results"][0]["status"])


@BOTH_STORES
@pytest.mark.rule("EV-1", "CO-20")
@pytest.mark.parametrize("wire", WIRES)
async def test_token_without_client_claim_cannot_write_as_another_client(tmp_path: Path, wire: str) -> None:
    async with serving(tmp_path, tokens=True, api_keys=True) as served:
        key = api_key(served, "svcA", ["*"], ["*"])
        assert await write(served, wire, key.text, "svcA", 1) == "committed"
        assert await write(served, wire, user("mallory"), "svcA", 2) == "committed"
        assert await write(served, wire, user("mallory"), "user:ada", 3) == "committed"
        assert await write(served, wire, user("mallory"), "user:ada/laptop", 4) == "committed"
        events = (await served.page("a", credential=user("reader"))).json["events"]
    assert [(event["client_id"], event["actor"]) for event in events] == [
        ("svcA", "client:svcA"),
        ("user:mallory/svcA", "user:mallory"),
        ("user:mallory/user:ada", "user:mallory"),
        ("user:mallory/user:ada/laptop", "user:mallory"),
    ]
    if wire == "insieme":
        assert [event["event"]["meta"]["clientId"] for event in events] == [event["client_id"] for event in events]


@pytest.mark.rule("EV-1")
@pytest.mark.parametrize("wire", WIRES)
async def test_bound_credential_cannot_use_another_client_id(tmp_path: Path, wire: str) -> None:
    async with serving(tmp_path, tokens=True, auth_failures_per_minute_max=0) as served:
        for other in ("phone", "user:ada", "user:ada/laptop"):
            assert await write(served, wire, user("ada", "laptop"), other, 1) == "auth_failed"
        assert await write(served, wire, user("ada", "laptop"), "laptop", 1) == "committed"


@pytest.mark.rule("EV-1")
@pytest.mark.parametrize("wire", WIRES)
async def test_development_mode_uses_client_ids_unchanged(tmp_path: Path, wire: str) -> None:
    async with serving(tmp_path) as served:
        assert await write(served, wire, "ada", "svcA", 1) == "committed"
        (event,) = (await served.page("a")).json["events"]
    assert (event["client_id"], event["actor"]) == ("svcA", "user:ada")


def test_client_ids_of_different_actors_never_collide() -> None:
    asked = [None, "x", "y/x", "user:ada", "user:ada/x", "user:ada%2Fx", "user:ada%2Fx/x", "user:ada/x/x", "/", "%2Fx"]
    found: dict[str, str] = {}
    for actor in ("user:ada", "user:ada/x", "user:ada%2Fx", "user:ada/", "user:ad", "user:ada/x/x"):
        principal = Principal(actor=actor, client_id=None, grants=parse_grants())
        for one in asked:
            client_id = principal.get_event_client(one)
            assert client_id is not None
            assert found.setdefault(client_id, actor) == actor
            assert (
                principal.get_event_client(client_id) == client_id
            )  # a client may send back the id that the server returned


def test_client_id_and_actor_together_have_a_maximum_length() -> None:
    principal = Principal(actor="user:ada", client_id=None, grants=parse_grants())
    assert len(principal.get_event_client("x" * 503) or "") == 512
    with pytest.raises(CanonicalError, match="at most 512 characters including the actor"):
        principal.get_event_client("x" * 504)


@pytest.mark.rule("EV-14", "EV-16", "CO-20")
@pytest.mark.parametrize("is_shown", [True, False])
async def test_every_read_shows_the_actor_unless_disabled(tmp_path: Path, is_shown: bool) -> None:
    async with serving(tmp_path, tokens=True, show_actors=is_shown) as served:
        reader = await served.connected("reader", user("reader"))
        await reader.sync("a", "project/p")
        served.credential = user("ada")
        stream = await served.stream("a")
        connected = [await stream.connected(), await (await served.socket()).connect("laptop", user("ada"))]
        insieme = await served.socket()
        connected.append(await insieme_connect(insieme, user("ada"), "npm"))
        sync = {"projectId": "p", "sinceCommittedId": 0}
        await insieme.socket.send_str(json.dumps({"type": "sync", "protocolVersion": "1.0", "payload": sync}))
        await insieme.receive()
        event = {"type": "t", "schemaVersion": 1, "payload": {}, "meta": {}}
        await served.commit({**item(1, "a", "project/p"), "event": event})
        events = [
            (await reader.receive())["payload"],
            *(await stream.events(1)),
            (await served.page("a")).json["events"][0],
            (await reader.sync("a"))["events"][0],
            (await insieme.receive())["payload"],
        ]
    assert [one.get("actor") for one in (*connected, *events)] == ["user:ada" if is_shown else None] * 8


@pytest.mark.rule("EV-17", "CO-20")
async def test_python_client_sees_actor_and_stored_client_id_of_all_events(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, tokens=True) as served,
        client_of(served.url, token=user("ada"), client_id="laptop") as ada,
        client_of(served.url, token=user("bob"), client_id="laptop") as bob,
    ):
        iterators = [ada.events(), bob.events()]
        await wait_until_live(ada)
        await wait_until_live(bob)
        await committed(ada, numbered_draft(1), partitions=["a"])
        await committed(bob, numbered_draft(2), partitions=["a"])
        seen = [[await soon(anext(events)) for _ in range(2)] for events in iterators]
        assert seen[0] == seen[1]
        assert [(event.client_id, event.actor) for event in seen[0]] == [
            ("user:ada/laptop", "user:ada"),
            ("user:bob/laptop", "user:bob"),
        ]
