"""Requests that come by the thousand: what is answered without aiohttp, what is handed over to it, both in one way."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from doors.serving import Serving, run, serving, soon, until
from engine.watched import Gate
from oncelog.doors import quick
from oncelog.doors.server import KEEP_ALIVE_S
from oncelog.stores.protocol import Decided

PATH = "/v1/ledger/write"


def write(number: int, client: str = "c1", **more: Any) -> bytes:
    """A transaction, numbered by its client."""
    operations = [{"set_entity": {"key": f"entity/{number}", "value": "dmFsdWU="}}]
    key = str(UUID(int=number, version=4))
    named = {"organization": "acme", "client_id": client, "sequence": number, "idempotency_key": key}
    return json.dumps({**named, "operations": operations, **more}).encode()


def post(body: bytes, *headers: str, path: str = PATH, host: str = "127.0.0.1") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Plain:
    """A connection on which a test sends bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of the next response."""
        head = (await soon(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        body = await soon(self.reader.readexactly(int(headers["Content-Length"])))
        is_json = headers["Content-Type"] == "application/json"
        return int(head[0].split()[1]), headers, json.loads(body) if is_json else body

    async def written(self) -> int:
        """The sequence of a write that was committed."""
        status, _, answer = await self.answer()
        assert status == 200, answer
        return int(answer["assigned_sequence"])


@asynccontextmanager
async def plain(served: Serving) -> AsyncIterator[Plain]:
    reader, writer = await soon(asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2])))
    try:
        yield Plain(reader, writer)
    finally:
        writer.close()


def quick_ones(served: Serving) -> int:
    return len(served.server._quick.connections)


def on_a_server(test: Callable[[Serving, Plain], Any], tmp_path: Path, **settings: Any) -> None:
    """Runs a test with one connection to a server in development mode."""

    async def main() -> None:
        async with serving(tmp_path, development=True, **settings) as served, plain(served) as client:
            await test(served, client)

    run(main())


def test_one_after_the_other_on_one_connection(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        for number in (1, 2, 3):
            client.send(post(write(number)))
            assert await client.written() == number
        assert quick_ones(served) == 1
        again = post(write(3))
        client.send(again)
        first = await client.answer()
        client.send(again)
        second = await client.answer()
        assert first[2] == second[2]  # the original answer, proof and all

    on_a_server(test, tmp_path)


def test_several_that_are_sent_at_once_are_answered_in_order(tmp_path: Path) -> None:
    async def test(_: Serving, client: Plain) -> None:
        client.send(*(post(write(number)) for number in range(1, 51)))
        assert [await client.written() for _ in range(50)] == list(range(1, 51))

    on_a_server(test, tmp_path)


def test_the_same_headers_as_the_long_way(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        async with plain(served) as other:
            other.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # from now on it is aiohttp's
            await other.answer()
            for body, headers in (
                (write(1), ()),
                (write(1, sequence=0), ()),  # a bad one
                (b"{", ()),
                (write(1, client="x" * 1000), ()),
            ):
                client.send(post(body, *headers))
                other.send(post(body, *headers))
                quickly, slowly = await client.answer(), await other.answer()
                for one in (quickly, slowly):
                    one[1].pop("Date")
                    one[1].pop("Connection", None)
                assert (quickly[0], quickly[1]) == (slowly[0], slowly[1])
                assert quickly[2] == slowly[2]
                if slowly[0] != 200:
                    break  # what was not understood ends a connection of the long way
            assert quick_ones(served) == 1

    on_a_server(test, tmp_path)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(post(write(1), "Origin: http://example.org"), 403, id="origin"),
        pytest.param(post(write(1), "Transfer-Encoding: chunked"), 400, id="both lengths"),
        pytest.param(post(write(1), "Content-Length: 5", f"Content-Length: {len(write(1))}"), 400, id="two lengths"),
        pytest.param(post(write(1), "Content-Length: +5"), 400, id="no length"),
        pytest.param(post(write(1)).replace(b"application/json", b"text/plain"), 415, id="no json"),
        pytest.param(post(write(1), host="example.org"), 403, id="another host"),
        pytest.param(post(write(1), path="/v1/ledger/nothing"), 404, id="no such path"),
        pytest.param(
            post(write(1)).replace(b"HTTP/1.1\r\nHost: 127.0.0.1", b"HTTP/1.1\nHost: 127.0.0.1"), 400, id="lf"
        ),
        pytest.param(b"\0" * 3000, 400, id="no http"),
        pytest.param(post(b"", path=PATH), 400, id="no body"),
        pytest.param(b"GET" + post(write(1))[4:], 405, id="another method"),
    ],
)
def test_what_is_not_plain_is_refused_as_ever(tmp_path: Path, data: bytes, status: int) -> None:
    async def test(_: Serving, client: Plain) -> None:
        client.send(data)
        assert (await client.answer())[0] == status

    on_a_server(test, tmp_path)


@pytest.mark.parametrize("at", [1, 30, 90, -1])
def test_a_request_in_pieces_is_handed_over_whole(tmp_path: Path, at: int) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(post(write(1)))
        assert await client.written() == 1
        request = post(write(2))
        client.send(request[:at])
        await until(lambda: not quick_ones(served))
        client.send(request[at:])
        assert await client.written() == 2
        client.send(post(write(3)))
        assert await client.written() == 3

    on_a_server(test, tmp_path)


def test_other_requests_of_the_connection_go_the_long_way(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(
            post(write(1)), b"GET /v1/ledger/entity?organization=acme&key=entity/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert await client.written() == 1
        assert (await client.answer())[2]["entity"]["version"] == 1
        client.send(post(write(2)))
        assert await client.written() == 2
        assert quick_ones(served) == 0

    on_a_server(test, tmp_path)


def test_an_error_leaves_the_connection(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(post(write(1, sequence=0)), post(b"{"), post(write(1)))
        assert [(await client.answer())[0] for _ in range(3)] == [400, 400, 200]
        assert quick_ones(served) == 1
        assert served.server.counts.requests["ledger", "http", "bad_request"] == 2

    on_a_server(test, tmp_path)


def test_a_fault_of_the_server_is_told_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(served: Serving, client: Plain) -> None:
        def failing(*_: Any) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(served.server.ledger.door, "submission", failing)
            client.send(post(write(1)))
            assert (await client.answer())[0] == 500
        client.send(post(write(1)))
        assert await client.written() == 1
        assert "a request failed" in caplog.text

    on_a_server(test, tmp_path)


def test_who_is_not_let_in_is_told_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True, auth_failures_per_minute_max=2) as served, plain(served) as client:
            client.send(*(post(write(1), "Authorization: Bearer wrong") for _ in range(3)))
            assert [(await client.answer())[0] for _ in range(3)] == [401, 401, 429]
            assert served.server.counts.auth_failures == 2

    run(main())


def test_what_a_client_sends_while_it_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Serving, client: Plain) -> None:
        gate, store = Gate(), served.server.log._store
        commit = store.commit

        async def held(*arguments: Any) -> Decided:
            await gate()
            return await commit(*arguments)

        monkeypatch.setattr(store, "commit", held)
        gate.shut()
        client.send(post(write(1)))
        await soon(gate.reached.wait())
        (connection,) = served.server._quick.connections
        client.send(*(post(write(number)) for number in range(2, 602)))
        await until(lambda: connection._is_paused)
        assert len(connection._waiting) < 8 * quick.WAITING_BYTES_MAX
        gate.open()
        assert [await client.written() for _ in range(601)] == list(range(1, 602))

    on_a_server(test, tmp_path)


def test_one_that_does_not_read_is_not_answered_without_end(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(post(write(1)))
        assert await client.written() == 1
        (connection,) = served.server._quick.connections
        connection.pause_writing()
        answered = served.server.counts.requests["ledger", "http", "ok"]
        for number in range(2, 602):
            client.send(post(write(number)))
            await asyncio.sleep(0)
        await until(lambda: connection._is_paused)
        assert served.server.counts.requests["ledger", "http", "ok"] == answered
        connection.resume_writing()
        assert [await client.written() for _ in range(600)] == list(range(2, 602))

    on_a_server(test, tmp_path)


def test_one_that_goes_while_it_waits_is_committed_all_the_same(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(post(write(1)))
        await until(lambda: served.server.log.queued == 1 or quick_ones(served) == 1)
        client.writer.transport.abort()
        await until(lambda: not quick_ones(served))
        async with plain(served) as other:
            other.send(post(write(1)))
            assert await other.written() == 1

    on_a_server(test, tmp_path)


def test_idle_connections_are_closed(tmp_path: Path) -> None:
    async def test(served: Serving, client: Plain) -> None:
        client.send(post(write(1)))
        assert await client.written() == 1
        now_s = asyncio.get_running_loop().time()
        served.server._quick.close_idle(now_s - KEEP_ALIVE_S)
        assert quick_ones(served) == 1
        served.server._quick.close_idle(now_s + 1)
        assert await soon(client.reader.read()) == b""
        await until(lambda: not quick_ones(served))

    on_a_server(test, tmp_path)


def test_a_server_that_stops_answers_what_it_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Serving, client: Plain) -> None:
        async with plain(served) as idle:
            idle.send(post(write(1, client="other")))
            assert await idle.written() == 1
            gate = served.hold_commits(monkeypatch)
            client.send(post(write(1)))
            await soon(gate.reached.wait())
            stopping = asyncio.ensure_future(served.server.stop())
            await until(lambda: served.server.ledger.is_closing)
            assert not stopping.done()
            gate.open()
            await soon(stopping)
            assert await client.written() == 1
            assert await soon(client.reader.read()) == b""
            assert await soon(idle.reader.read()) == b""

    on_a_server(test, tmp_path)
