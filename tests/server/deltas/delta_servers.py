"""Servers and a plain client for tests of the Deltas API."""

import asyncio
import io
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import WSMsgType

from core.delta_faults import id_of
from databases import is_postgres, log_at, query
from deadlines import WAIT_S, soon
from server.running_server import Answer, EventStream, Serving, close_code, serving
from server.shared_servers import pool_fixture

Json = dict[str, Any]
MS: Final = 2**16
"""HLC units per millisecond."""


def change(hlc: int = 1, row: str = "r1", /, **members: Any) -> Json:
    """Return a delta with its id. Keyword arguments other than `client`, `op` and `table` set columns."""
    client, op, table = members.pop("client", "c1"), members.pop("op", "UPDATE"), members.pop("table", "t")
    listed = [{"column": name, "value": value} for name, value in members.items()]
    made = {"op": op, "table": table, "rowId": row, "clientId": client, "hlc": str(hlc), "columns": listed}
    return {"deltaId": id_of(made), **made}


class Live:
    """A WebSocket connection to `live`."""

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
        """Receive `count` deltas from one or several frames."""
        found: list[Json] = []
        while len(found) < count:
            frame = await self.receive()
            assert frame["type"] == "deltas"
            assert frame["cursor"] == frame["deltas"][-1]["sequence"]
            found += frame["deltas"]
        assert len(found) == count
        return found

    async def wait_closed(self) -> int | None:
        message = await soon(self.socket.receive())
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING), message
        return close_code(message, self.socket)


class Gateway:
    """A client of one gateway that sends a credential."""

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
        """Send a request, assert that it succeeds, and return the JSON of the answer."""
        answer = await self.request(method, path, **options)
        assert answer.status == 200, answer.body
        assert answer.content_type == "application/json"
        return answer.json

    async def push(self, *deltas: Json) -> Answer:
        return await self.push_body(json.dumps({"deltas": deltas}).encode())

    async def push_body(self, body: bytes, **headers: str) -> Answer:
        shown = {"Content-Type": "application/json", **headers}
        # aiohttp warns about long bodies that are `bytes`.
        return await self.request("POST", "push", data=io.BytesIO(body), headers=shown)

    async def push_accepted(self, *deltas: Json) -> list[tuple[int, bool]]:
        """Push deltas and assert that the push succeeds. Return the sequence of each delta and whether it was known."""
        response = await self.push(*deltas)
        assert response.status == 200, response.body
        answer = response.json
        assert [one["deltaId"] for one in answer["results"]] == [delta["deltaId"] for delta in deltas]
        found = [(one["sequence"], one["duplicate"]) for one in answer["results"]]
        assert answer["duplicates"] == sum(is_known for _, is_known in found)
        assert answer["committed"] == len(found) - answer["duplicates"]
        return found

    async def pull(self, since: int = 0, **given: Any) -> Json:
        answer: Json = await self.ok("GET", "pull", params={"since": since, **given})
        return answer

    async def pull_all(self, since: int = 0, **given: Any) -> list[Json]:
        """Pull all pages, and assert that none of them requires a snapshot."""
        found: list[Json] = []
        while True:
            page = await self.pull(since, **given)
            assert "snapshot" not in page
            found += page["deltas"]
            since = page["cursor"]
            if not page["hasMore"]:
                return found

    async def rows(self, table: str = "t", limit: int = 500) -> dict[str, Any]:
        """Read all pages of a table and return columns by row id."""
        found: dict[str, Any] = {}
        after = ""
        while True:
            page = await self.ok("GET", f"rows/{table}", params={"after": after, "limit": limit})
            found |= {row["rowId"]: row["columns"] for row in page["rows"]}
            after = page["next"]
            if not after:
                return found

    async def snapshot(self, limit: int = 500) -> tuple[list[Json], int]:
        """Read all pages of a snapshot; return the rows with their stamps and the cursor to pull from."""
        page = await self.ok("GET", "snapshot", params={"limit": limit})
        rows, cursor = page["rows"], page["cursor"]
        while page["next"]:
            page = await self.ok("GET", "snapshot", params={"limit": limit, "page": page["next"]})
            rows += page["rows"]
            assert page["cursor"] == cursor
        return rows, cursor

    async def compact(self, **body: int | str) -> Json:
        answer: Json = await self.ok("POST", "compact", json=body)
        return answer

    async def stream(self, *, headers: Any = None, **given: Any) -> EventStream:
        """Open a stream of server-sent events."""
        shown = {**self._headers, **(headers or {})}
        return EventStream(await soon(self.session.get(f"{self.url}/live", params=given, headers=shown)))

    async def live(self, *, headers: Any = None) -> Live:
        shown = {**self._headers, **(headers or {})}
        return Live(await soon(self.session.ws_connect(f"{self.url}/live", headers=shown)))


def compaction_answer(deltas: int, upto: int, *, has_more: bool = False, dropped: int = 0, following: str = "") -> Json:
    """Return the expected answer to a compaction that no consumer holds back."""
    return {
        "compacted": deltas,
        "upto": upto,
        "hasMore": has_more,
        "droppedRows": dropped,
        "next": following,
        "heldBy": None,
    }


def refusal(answer: Answer) -> tuple[int, str]:
    """Check the members of an error and return its status and code."""
    assert answer.content_type == "application/problem+json"
    error = answer.json
    assert {"type", "title", "status", "detail", "error", "code"} <= set(error) <= {
        "type", "title", "status", "detail", "errors", "error", "code", "index", "expected", "limit", "epoch", "newest",
        "serverTime", "server_time_ms", "retryAfterMs", "retry_after_ms", "tenant", "quota", "usage", "snapshot",
    }  # fmt: skip
    assert (error["status"], error["detail"]) == (answer.status, error["error"])
    assert error["type"] == f"urn:oncelog:problem:{error['code'].lower()}"
    return answer.status, error["code"]


async def read_deltas(stream: EventStream, count: int) -> list[Json]:
    """Return the next deltas of a stream, and check that the event id of each is its sequence."""
    found = []
    for _ in range(count):
        message = await stream.next()
        assert message is not None
        assert (message.kind, message.id) == ("message", str(message.json["sequence"]))
        found.append(message.json)
    return found


def as_delivered(delta: Json, sequence: int) -> Json:
    """Return a delta in the form that readers get."""
    return {"sequence": sequence, **delta}


# --- servers ------------------------------------------------------------------------------------------------------


class DeltasServer:
    """A server in this process."""

    def __init__(self, served: Serving) -> None:
        self.served = served
        self.server = served.server
        self.log = served.server.log
        self.counts = served.server.counts

    def gateway(self, name: str = "shop", credential: str | None = None) -> Gateway:
        return Gateway(self.served.session, self.served.url, name, credential)


@asynccontextmanager
async def run_server(directory: Path, *, force_close: bool = False, **options: Any) -> AsyncIterator[DeltasServer]:
    """Run a server on the log in the directory, with the options of `serving`."""
    # No connection limit, because tests send many requests at the same time.
    connector = aiohttp.TCPConnector(limit=0, force_close=force_close)
    async with serving(directory, connector=connector, **{"grpc": False, **options}) as served:
        yield DeltasServer(served)


def server_pool_with(**options: Any) -> Any:
    """Return a fixture for a pool of servers with these options.

    A malformed request may close its connection, so the next test must not reuse it.
    """
    return pool_fixture(lambda directory: run_server(directory, **{"force_close": True, **options}))


class SharedServer:
    """A running server that many tests share. Each test uses separate gateways."""

    def __init__(self, server: DeltasServer, name: str) -> None:
        self.server = server
        self.name = name

    def gateway(self, suffix: object = "", credential: str | None = None) -> Gateway:
        """Return a client of a gateway that only this test uses."""
        return self.server.gateway(f"{self.name}{suffix}", credential)

    @property
    def scope(self) -> str:
        """The scope of the test's gateway, as in grants."""
        return f"deltas/{self.name}"


# --- stored data ------------------------------------------------------------------------------------------------


async def count_rows(directory: Path) -> dict[str, int]:
    """Return the row count of each table of the log."""
    return await asyncio.to_thread(_count_rows, directory / "events.db")


def _count_rows(path: Path) -> dict[str, int]:
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
    """Return the rows of a table in the form of `Gateway.rows`."""
    return {row_id: row for (name, row_id), row in model.items() if name == table}


def merge_onto_snapshot(rows: Sequence[Json], deltas: Sequence[Json]) -> list[Json]:
    """Merge a snapshot, converted to deltas, with the deltas that follow it, as a client does."""
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
