"""The HTTP fast path: requests that the server answers without aiohttp, and the handover to aiohttp."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deadlines import soon, until
from oncelog.server import http_fast_path
from oncelog.server.http_server import KEEP_ALIVE_S
from server.raw_http import WRITE_PATH, RawConnection, post, raw_connection, write
from server.running_server import Serving, serving


def fast_connections(served: Serving) -> int:
    """Return the number of connections on the fast path."""
    return len(served.server._http.fast_path.connections)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server in development mode."""
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def client(served: Serving) -> AsyncIterator[RawConnection]:
    """A connection to the server."""
    async with raw_connection(served) as connection:
        yield connection


async def test_connection_answers_sequential_writes_and_retries(served: Serving, client: RawConnection) -> None:
    for number in (1, 2, 3):
        client.send(post(write(number)))
        assert await client.read_committed_sequence() == number
    assert fast_connections(served) == 1
    again = post(write(3))
    client.send(again)
    first = await client.read_answer()
    client.send(again)
    second = await client.read_answer()
    assert first[2] == second[2]  # the original answer with its proof


async def test_pipelined_requests_are_answered_in_order(client: RawConnection) -> None:
    client.send(*(post(write(number)) for number in range(1, 51)))
    assert [await client.read_committed_sequence() for _ in range(50)] == list(range(1, 51))


async def test_fast_path_sends_the_same_headers_as_aiohttp(served: Serving, client: RawConnection) -> None:
    async with raw_connection(served) as other:
        other.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # this hands the connection over to aiohttp
        await other.read_answer()
        for body, headers in (
            (write(1), ()),
            (write(1, sequence=0), ()),  # a malformed request
            (b"{", ()),
            (write(1, client="x" * 1000), ()),
        ):
            client.send(post(body, *headers))
            other.send(post(body, *headers))
            quickly, slowly = await client.read_answer(), await other.read_answer()
            for one in (quickly, slowly):
                one[1].pop("Date")
                one[1].pop("Connection", None)
            assert (quickly[0], quickly[1]) == (slowly[0], slowly[1])
            assert quickly[2] == slowly[2]
            if slowly[0] != 200:
                break  # aiohttp closes the connection after a malformed request
        assert fast_connections(served) == 1


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(post(write(1), "Origin: http://example.org"), 403, id="origin"),
        pytest.param(post(write(1), "Transfer-Encoding: chunked"), 400, id="both lengths"),
        pytest.param(post(write(1), "Content-Length: 5", f"Content-Length: {len(write(1))}"), 400, id="two lengths"),
        pytest.param(post(write(1), "Content-Length: +5"), 400, id="no length"),
        pytest.param(post(write(1)).replace(b"application/json", b"text/plain"), 415, id="not json"),
        pytest.param(post(write(1), host="example.org"), 403, id="another host"),
        pytest.param(post(write(1), path="/v1/ledger/nothing"), 404, id="no such path"),
        pytest.param(
            post(write(1)).replace(b"HTTP/1.1\r\nHost: 127.0.0.1", b"HTTP/1.1\nHost: 127.0.0.1"), 400, id="lf"
        ),
        pytest.param(b"\0" * 3000, 400, id="not http"),
        pytest.param(post(b"", path=WRITE_PATH), 400, id="no body"),
        pytest.param(b"GET" + post(write(1))[4:], 405, id="another method"),
    ],
)
async def test_aiohttp_refuses_requests_outside_the_fast_path(shared_server: Serving, data: bytes, status: int) -> None:
    async with raw_connection(shared_server) as connection:
        connection.send(data)
        assert (await connection.read_answer())[0] == status


@pytest.mark.parametrize("at", [1, 30, 90, -1])
async def test_partial_request_is_handed_over_to_aiohttp(served: Serving, client: RawConnection, at: int) -> None:
    client.send(post(write(1)))
    assert await client.read_committed_sequence() == 1
    request = post(write(2))
    client.send(request[:at])
    await until(lambda: not fast_connections(served))
    client.send(request[at:])
    assert await client.read_committed_sequence() == 2
    client.send(post(write(3)))
    assert await client.read_committed_sequence() == 3


async def test_other_requests_hand_the_connection_over_to_aiohttp(served: Serving, client: RawConnection) -> None:
    client.send(
        post(write(1)), b"GET /v1/ledger/entity?organization=acme&key=entity/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    assert await client.read_committed_sequence() == 1
    assert (await client.read_answer())[2]["entity"]["version"] == 1
    client.send(post(write(2)))
    assert await client.read_committed_sequence() == 2
    assert fast_connections(served) == 0


async def test_client_errors_keep_the_connection_open(served: Serving, client: RawConnection) -> None:
    client.send(post(write(1, sequence=0)), post(b"{"), post(write(1)))
    assert [(await client.read_answer())[0] for _ in range(3)] == [400, 400, 200]
    assert fast_connections(served) == 1
    assert served.server.counts.requests["ledger", "http", "bad_request"] == 2


async def test_server_fault_is_answered_with_500_and_logged(
    served: Serving, client: RawConnection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_commit(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(served.server.apis.ledger.service, "to_submission", fail_commit)
        client.send(post(write(1)))
        assert (await client.read_answer())[0] == 500
    client.send(post(write(1)))
    assert await client.read_committed_sequence() == 1
    assert "a request failed" in caplog.text


async def test_failed_authentication_is_answered_counted_and_limited(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, tokens=True, auth_failures_per_minute_max=2) as served,
        raw_connection(served) as client,
    ):
        client.send(*(post(write(1), "Authorization: Bearer wrong") for _ in range(3)))
        assert [(await client.read_answer())[0] for _ in range(3)] == [401, 401, 429]
        counts = served.server.counts
        assert (counts.auth_failures, counts.auth_failures_limited) == (3, 1)


async def test_pipelined_input_is_limited_while_a_commit_is_pending(
    served: Serving, client: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = served.hold_commits(monkeypatch)
    client.send(post(write(1)))
    await soon(gate.reached.wait())
    (connection,) = served.server._http.fast_path.connections
    client.send(*(post(write(number)) for number in range(2, 302)))
    await until(lambda: connection.is_reading_paused)
    assert len(connection._buffered) < 8 * http_fast_path.BUFFERED_BYTES_MAX
    gate.open()
    assert [await client.read_committed_sequence() for _ in range(301)] == list(range(1, 302))


async def test_client_that_does_not_read_gets_no_more_answers(served: Serving, client: RawConnection) -> None:
    client.send(post(write(1)))
    assert await client.read_committed_sequence() == 1
    (connection,) = served.server._http.fast_path.connections
    connection.pause_writing()
    answered = served.server.counts.requests["ledger", "http", "ok"]
    for number in range(2, 302):
        client.send(post(write(number)))
        await asyncio.sleep(0)
    await until(lambda: connection.is_reading_paused)
    assert served.server.counts.requests["ledger", "http", "ok"] == answered
    connection.resume_writing()
    assert [await client.read_committed_sequence() for _ in range(300)] == list(range(2, 302))


async def test_write_is_committed_even_if_its_client_disconnects(
    served: Serving, client: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = served.hold_commits(monkeypatch)
    client.send(post(write(1)))
    await soon(gate.reached.wait())
    client.writer.transport.abort()
    await until(lambda: not fast_connections(served))
    gate.open()
    await soon(served.server.log.wait_idle())
    async with raw_connection(served) as other:
        other.send(post(write(1)))
        status, _, answer = await other.read_answer()
        assert (status, answer["assigned_sequence"]) == (200, 1)


async def test_idle_connections_are_closed(served: Serving, client: RawConnection) -> None:
    client.send(post(write(1)))
    assert await client.read_committed_sequence() == 1
    now_s = asyncio.get_running_loop().time()
    served.server._http.fast_path.close_idle(now_s - KEEP_ALIVE_S)
    assert fast_connections(served) == 1
    served.server._http.fast_path.close_idle(now_s + 1)
    assert await soon(client.reader.read()) == b""
    await until(lambda: not fast_connections(served))


async def test_stopping_server_answers_accepted_requests(
    served: Serving, client: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_connection(served) as idle:
        idle.send(post(write(1, client="other")))
        assert await idle.read_committed_sequence() == 1
        gate = served.hold_commits(monkeypatch)
        client.send(post(write(1)))
        await soon(gate.reached.wait())
        stopping = asyncio.ensure_future(served.server.stop())
        await until(lambda: served.server.is_closing)
        assert not stopping.done()
        gate.open()
        await soon(stopping)
        assert await client.read_committed_sequence() == 1
        assert await soon(client.reader.read()) == b""
        assert await soon(idle.reader.read()) == b""
