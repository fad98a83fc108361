"""The examples in the OpenAPI document work: sent in the document's order, each gets a documented success status."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from databases import BOTH_STORES
from deadlines import soon
from server.running_server import Serving, serving


async def load_document(served: Serving) -> dict[str, Any]:
    found = (await served.get("/openapi.json")).json
    assert isinstance(found, dict)
    return found


def list_operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield method, path and description of every operation, in the order of the document."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def to_request(path: str, operation: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the options of the request that the operation's examples describe."""
    query: list[tuple[str, str]] = []
    for parameter in operation.get("parameters", ()):
        assert "example" in parameter or not parameter.get("required"), (path, parameter["name"])
        value = parameter.get("example")
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(value, safe=""))
        elif value is not None:
            assert parameter["in"] == "query"
            query += [(parameter["name"], str(one)) for one in (value if isinstance(value, list) else [value])]
    if query:
        path = f"{path}?{urlencode(query)}"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return path, {} if content is None else {"json": content["example"]}


async def send_example(served: Serving, method: str, path: str, operation: Mapping[str, Any]) -> int:
    """Send an operation's example and return the status. Read only the beginning of a stream."""
    to, options = to_request(path, operation)
    if "101" in operation["responses"]:
        socket = await soon(served.session.ws_connect(served.url + to))
        await soon(socket.close())
        return 101
    async with served.session.request(method, served.url + to, **options) as response:
        if response.content_type == "text/event-stream":
            assert await soon(response.content.readline())
        else:
            await soon(response.read())
        return response.status


@BOTH_STORES
@pytest.mark.rule("EV-16")
async def test_examples_of_all_operations_succeed_in_the_order_of_the_document(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        operations = list(list_operations(await load_document(served)))
        assert len(operations) > 40
        for _ in range(2):  # a reader of `/docs` sends examples several times
            for method, path, operation in operations:
                succeeds = {int(status) for status in operation["responses"] if int(status) < 300}
                assert await send_example(served, method, path, operation) in succeeds, (method, path)
