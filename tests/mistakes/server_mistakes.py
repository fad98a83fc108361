"""Mistakes in requests to the server."""

import io
import json
from typing import Any

from deadlines import soon
from mistakes.mistake import SECRET, MistakeTable
from mistakes.workplace import AUDIENCE, EVENT, EVENT_ID, Workplace, describe
from server.auth import auth_material

MISTAKES = MistakeTable()
ITEM = {"id": EVENT_ID, "partitions": ["orders"], "event": EVENT}
JSON = {"Content-Type": "application/json"}


async def post(workplace: Workplace, body: Any, path: str = "/v1/events", **options: Any) -> str:
    """Send JSON, or text that should be JSON, and return the error."""
    data = json.dumps(body) if isinstance(body, dict) else body
    options.setdefault("headers", JSON)
    return describe(await workplace.development.request("POST", path, data=data, **options))


@MISTAKES.add("404", remedy="`GET /` lists its APIs")
async def unknown_path(workplace: Workplace) -> str:
    return describe(await workplace.development.get("/v1/event"))


@MISTAKES.add("405", remedy="accepts only GET, HEAD, POST")
async def wrong_method(workplace: Workplace) -> str:
    return describe(await workplace.development.request("PUT", "/v1/events", json={}))


@MISTAKES.add("415", "Content-Type", remedy="must be application/json")
async def wrong_content_type(workplace: Workplace) -> str:
    return await post(workplace, {"events": [ITEM]}, headers={"Content-Type": "text/plain"})


@MISTAKES.add("400", "not JSON", "character 1", remedy="Expecting property name enclosed in double quotes")
async def malformed_json(workplace: Workplace) -> str:
    return await post(workplace, "{'events': []}")


@MISTAKES.add("400", "not JSON", remedy="Expecting value")
async def no_body(workplace: Workplace) -> str:
    return await post(workplace, "")


@MISTAKES.add("400", "$.events", remedy="is missing")
async def missing_member(workplace: Workplace) -> str:
    return await post(workplace, {})


@MISTAKES.add("400", "$.events", remedy="must be an array")
async def one_event_instead_of_a_list(workplace: Workplace) -> str:
    return await post(workplace, {"events": ITEM})


@MISTAKES.add("400", "$.events[0].id", remedy="must be a UUID")
async def event_id(workplace: Workplace) -> str:
    return await post(workplace, {"events": [{**ITEM, "id": "17"}]})


@MISTAKES.add("partitions", "not 0", remedy="must have 1 to 64")
async def event_without_partitions(workplace: Workplace) -> str:
    answer = await workplace.development.submit({**ITEM, "partitions": []})
    return str(answer.json["results"][0])


@MISTAKES.add("400", "partition", remedy="must have 1 to 64")
async def page_without_a_partition(workplace: Workplace) -> str:
    return describe(await workplace.development.get("/v1/events"))


@MISTAKES.add("400", "limit", remedy="must be a whole number")
async def limit_that_is_text(workplace: Workplace) -> str:
    return describe(await workplace.development.get("/v1/events?partition=orders&limit=all"))


@MISTAKES.add("400", "partitions", remedy="whose parameters are: partition")
async def misspelt_parameter(workplace: Workplace) -> str:
    return describe(await workplace.development.get("/v1/events?partitions=orders"))


@MISTAKES.add("epoch", remedy="from 0")
async def cursor_of_another_epoch(workplace: Workplace) -> str:
    page = "/v1/events?partition=orders&since=1&epoch=another"
    return describe(await workplace.development.get(page))


@MISTAKES.add("401", remedy="send a valid token or API key")
async def no_credential(workplace: Workplace) -> str:
    return describe(await workplace.secured.get("/v1/events?partition=orders"))


@MISTAKES.add("401", remedy="send a valid token or API key")
async def wrong_credential(workplace: Workplace) -> str:
    return describe(await workplace.secured.get("/v1/events?partition=orders", credential=SECRET))


@MISTAKES.add("401", remedy="send a valid token or API key")
async def basic_authentication(workplace: Workplace) -> str:
    headers = {"Authorization": "Basic YW5uOmFubg=="}
    return describe(await workplace.secured.get("/v1/events?partition=orders", headers=headers))


@MISTAKES.add("403", "partitions", remedy="no read access")
async def partition_without_a_grant(workplace: Workplace) -> str:
    granted = auth_material.token(aud=AUDIENCE)
    workplace.secrets.append(granted)
    return describe(await workplace.secured.get("/v1/events?partition=invoices", credential=granted))


@MISTAKES.add("413", remedy="at most")
async def body_that_is_too_large(workplace: Workplace) -> str:
    return await post(workplace, io.BytesIO(b"a" * (5 * 2**20)))


@MISTAKES.add("403", "only members of the chat", remedy="only members")
async def unknown_chat(workplace: Workplace) -> str:
    return describe(await workplace.development.get("/v1/chats/nowhere/messages", credential="ann"))


@MISTAKES.add("400", "organization", remedy="is missing")
async def ledger_write_without_an_organization(workplace: Workplace) -> str:
    return await post(workplace, {"client_id": "a", "sequence": 1}, "/v1/ledger/write")


@MISTAKES.add("400", "deltas", remedy="is missing")
async def push_without_deltas(workplace: Workplace) -> str:
    return await post(workplace, {}, "/v1/sync/shop/push")


# --- WebSocket


async def receive_error(workplace: Workplace, text: str) -> str:
    """Send a message over a new WebSocket, and return the error in the answer."""
    socket = await workplace.development.socket()
    await socket.socket.send_str(text)
    error = (await soon(socket.receive()))["payload"]
    return f"{error['code']}: {error['message']} {error.get('details')}"


@MISTAKES.add("not JSON", remedy="Expecting value")
async def message_that_is_not_json(workplace: Workplace) -> str:
    return await receive_error(workplace, "hello")


@MISTAKES.add("the first message", remedy="must be connect")
async def message_before_connect(workplace: Workplace) -> str:
    return await receive_error(
        workplace, '{"type":"sync","protocol_version":"1.0","payload":{"partitions":["a"],"since_committed_id":0}}'
    )


@MISTAKES.add("$.type", remedy="must be connect, submit_events or sync")
async def unknown_message_type(workplace: Workplace) -> str:
    socket = await workplace.development.connected()
    error = await socket.request("subscribe", {})
    return f"{error['code']}: {error['message']} {error.get('details')}"
