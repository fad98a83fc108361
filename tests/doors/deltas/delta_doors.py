"""Servers whose deltas door is tested, and a plain client of it."""

import asyncio
import io
import json
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import WSMsgType

from core.delta_faults import id_of
from databases import is_postgres, log_at, query
from doors.serving import RUN_S, WAIT_S, Answer, EventStream, Serving, serving, soon

T = TypeVar("T")
Json = dict[str, Any]
MS: Final = 2**16
"""Of an HLC."""


def change(hlc: int = 1, row: str = "r1", /, **members: Any) -> Json:
    """A delta with its id. What is no member of deltas (`client`, `op`, `table`) is a column."""
    client, op, table = members.pop("client", "c1"), members.pop("op", "UPDATE"), members.pop("table", "t")
    listed = [{"column": name, "value": value} for name, value in members.items()]
    made = {"op": op, "table": table, "rowId": row, "clientId": client, "hlc": str(hlc), "columns": listed}
    return {"deltaId": id_of(made), **made}


class Live:
    """A WebSocket at `live`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, **members: Any) -> None:
        await self.socket.send_str(json.dumps(members))

    async def receive(self) -> Json:
        message = await soon(self.socket.receive())
        assert message.type is WSMsgType.TEXT, message
        found: Json = json.loads(message.data)
        return found

    async def connect(self, **members: Any) -> Json:
        await self.send(type="connect", **members)
        return await self.receive()

    async def deltas(self, count: int) -> list[Json]:
        """That many deltas, in however many frames."""
        found: list[Json] = []
        while len(found) < count:
            frame = await self.receive()
            assert frame["type"] == "deltas"
            assert frame["cursor"] == frame["deltas"][-1]["sequence"]
            found += frame["deltas"]
        assert len(found) == count
        return found

    async def closed(self) -> int | None:
        message = await soon(self.socket.receive())
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING), message
        return self.socket.close_code


class Gateway:
    """One gateway of a server, as a client that shows a credential sees it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, credential: str | None = None) -> None:
        self.session = session
        self.url = f"{url}/v1/sync/{name}"
        self._headers = {} if credential is None else {"Authorization": f"Bearer {credential}"}

    async def request(self, method: str, path: str, *, headers: Any = None, **options: Any) -> Answer:
        async with asyncio.timeout(WAIT_S):
            async with self.session.request(
                method, f"{self.url}/{path}", headers={**self._headers, **(headers or {})}, **options
            ) as response:
                return Answer(response, await response.read())

    async def ok(self, method: str, path: str, **options: Any) -> Any:
        """The answer to what must be taken."""
        answer = await self.request(method, path, **options)
        assert answer.status == 200, answer.body
        assert answer.content_type == "application/json"
        return answer.json

    async def push(self, *deltas: Json) -> Answer:
        return await self.push_body(json.dumps({"deltas": deltas}).encode())

    async def push_body(self, body: bytes, **headers: str) -> Answer:
        shown = {"Content-Type": "application/json", **headers}
        return await self.request("POST", "push", data=io.BytesIO(body), headers=shown)  # it may be long

    async def pushed(self, *deltas: Json) -> list[tuple[int, bool]]:
        """Sequence, and whether it was known, of deltas that must be taken."""
        told = await self.push(*deltas)
        assert told.status == 200, told.body
        answer = told.json
        assert [one["deltaId"] for one in answer["results"]] == [delta["deltaId"] for delta in deltas]
        found = [(one["sequence"], one["duplicate"]) for one in answer["results"]]
        assert answer["duplicates"] == sum(is_known for _, is_known in found)
        assert answer["committed"] == len(found) - answer["duplicates"]
        return found

    async def pull(self, since: int = 0, **given: Any) -> Json:
        answer: Json = await self.ok("GET", "pull", params={"since": since, **given})
        return answer

    async def pull_all(self, since: int = 0, **given: Any) -> list[Json]:
        """From page to page to the end. There must be no snapshot in the way."""
        found: list[Json] = []
        while True:
            page = await self.pull(since, **given)
            assert "snapshot" not in page
            found += page["deltas"]
            since = page["cursor"]
            if not page["hasMore"]:
                return found

    async def rows(self, table: str = "t", limit: int = 500) -> dict[str, Any]:
        """Columns by row id, of all rows of a table, from page to page."""
        found: dict[str, Any] = {}
        after = ""
        while True:
            page = await self.ok("GET", f"rows/{table}", params={"after": after, "limit": limit})
            found |= {row["rowId"]: row["columns"] for row in page["rows"]}
            after = page["next"]
            if not after:
                return found

    async def snapshot(self, limit: int = 500) -> tuple[list[Json], int]:
        """All rows with their stamps, and the cursor to go on from."""
        page = await self.ok("GET", "snapshot", params={"limit": limit})
        rows, cursor = page["rows"], page["cursor"]
        while page["next"]:
            page = await self.ok("GET", "snapshot", params={"limit": limit, "page": page["next"]})
            rows += page["rows"]
            assert page["cursor"] == cursor
        return rows, cursor

    async def compact(self, **body: int) -> Json:
        answer: Json = await self.ok("POST", "compact", json=body)
        return answer

    async def stream(self, *, headers: Any = None, **given: Any) -> EventStream:
        """Server-sent events."""
        shown = {**self._headers, **(headers or {})}
        return EventStream(await soon(self.session.get(f"{self.url}/live", params=given, headers=shown)))

    async def live(self, *, headers: Any = None) -> Live:
        shown = {**self._headers, **(headers or {})}
        return Live(await soon(self.session.ws_connect(f"{self.url}/live", headers=shown)))


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and code of an error, which must look like one of this door."""
    assert answer.content_type == "application/json"
    told = answer.json
    assert {"error", "code"} <= set(told) <= {
        "error", "code", "index", "expected", "limit", "epoch", "newest", "serverTime", "retryAfterMs",
        "tenant", "quota", "usage",
    }  # fmt: skip
    assert isinstance(told["error"], str)
    return answer.status, told["code"]


async def streamed(stream: EventStream, count: int) -> list[Json]:
    """That many deltas of a stream, each with its sequence for an id."""
    found = []
    for _ in range(count):
        message = await stream.next()
        assert message is not None
        assert (message.kind, message.id) == ("message", str(message.json["sequence"]))
        found.append(message.json)
    return found


def told(delta: Json, sequence: int) -> Json:
    """A delta as readers get it."""
    return {"sequence": sequence, **delta}


# --- servers ------------------------------------------------------------------------------------------------------


class Door:
    """A server in this process."""

    def __init__(self, served: Serving) -> None:
        self.served = served
        self.server = served.server
        self.log = served.server.log
        self.counts = served.server.counts

    def gateway(self, name: str = "shop", credential: str | None = None) -> Gateway:
        return Gateway(self.served.session, self.served.url, name, credential)


@asynccontextmanager
async def opened(directory: Path, *, force_close: bool = False, **options: Any) -> AsyncIterator[Door]:
    """A server with a log in the directory; options are those of `serving`."""
    connector = aiohttp.TCPConnector(limit=0, force_close=force_close)  # many may ask at the same time
    async with serving(directory, connector=connector, **options) as served:
        yield Door(served)


class House:
    """A server that tests share, in a loop that goes on from test to test. Each has gateways of its own."""

    def __init__(self, directory: Path) -> None:
        self._runner = asyncio.Runner()
        # What is wrong with a request may close its connection: it must not be the next test's.
        self._opened = opened(directory, force_close=True)
        self.directory = directory
        self.door = self.run(self._opened.__aenter__())
        self.name = ""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(main, RUN_S))

    def gateway(self, suffix: object = "") -> Gateway:
        """One that only the test that is running has."""
        return self.door.gateway(f"{self.name}{suffix}")

    @property
    def scope(self) -> str:
        return f"deltas/{self.name}"

    def close(self) -> None:
        self.run(self._opened.__aexit__(None, None, None))
        self._runner.close()


# --- what is stored ---------------------------------------------------------------------------------------------


async def stored(directory: Path) -> dict[str, int]:
    """How many rows each table of the log has: of what is known, nothing may grow."""
    return await asyncio.to_thread(_stored, directory / "events.db")


def _stored(path: Path) -> dict[str, int]:
    if is_postgres():
        address = log_at(path)
        names = query(address, "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
        return {name: query(address, f"SELECT count(*) FROM {name}")[0][0] for (name,) in names}  # noqa: S608
    connection = sqlite3.connect(path)
    try:
        listed = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for (name,) in listed}  # noqa: S608
    finally:
        connection.close()


def rows_of(model: dict[tuple[str, str], Any], table: str = "t") -> dict[str, Any]:
    """Those of a table, as `Gateway.rows` has them."""
    return {row_id: row for (name, row_id), row in model.items() if name == table}


def merged_of(rows: Sequence[Json], deltas: Sequence[Json]) -> list[Json]:
    """A snapshot as deltas that come to it, and deltas behind it: what a client would merge."""
    found = []
    for row in rows:
        place = {"table": row["table"], "rowId": row["rowId"]}
        for column in row["columns"]:
            stamp = {name: column[name] for name in ("hlc", "clientId", "deltaId")}
            kept = [{"column": column["column"], "value": column["value"]}]
            found.append({**place, **stamp, "op": "UPDATE", "columns": kept, "part": column["column"]})
        for name, op in (("written", "UPDATE"), ("deleted", "DELETE")):
            if row[name] is not None:
                found.append({**place, **row[name], "op": op, "columns": [], "part": name})
    return found + list(deltas)
