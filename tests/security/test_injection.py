"""Injection of SQL and of response headers. tests/server/test_log_format.py tests injection into log lines."""

from pathlib import Path
from uuid import uuid4

import pytest

from databases import BOTH_STORES
from deadlines import soon
from server.raw_http import raw_connection
from server.running_server import serving

NAMES = [
    "'; DROP TABLE oncelog_records; --",
    '"; DELETE FROM oncelog_records; --',
    "a' OR '1'='1",
    "a\\'; SELECT pg_sleep(10); --",
    "$1; %s; ?; :name; {0}",
    "a%' ESCAPE '\\",
    "a_%",
    "\r\nX-Injected: yes\r\n\r\n",
]


@BOTH_STORES
@pytest.mark.rule("CO-30")
async def test_names_that_contain_sql_are_stored_as_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for name in NAMES:
            event = {"type": name, name: [name]}
            item = {"id": str(uuid4()), "partitions": [name], "event": event}
            assert (await served.submit(item, client_id=name)).json["results"][0]["status"] == "committed"
        for number, name in enumerate(NAMES, start=1):
            (found,) = (await served.page(name)).json["events"]
            assert (found["committed_id"], found["client_id"], found["partitions"]) == (number, name, [name])
            assert found["event"] == {"type": name, name: [name]}


@pytest.mark.rule("CO-30")
async def test_request_header_cannot_inject_a_response_header(tmp_path: Path) -> None:
    path = "/v1/events?partition=%0d%0aX-Injected:%20yes"
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Origin: a%0d%0aX-Injected: yes"]
    async with serving(tmp_path, origins=("https://app.example.org",)) as served, raw_connection(served) as connection:
        connection.send("\r\n".join([*lines, "", ""]).encode())
        head = await soon(connection.reader.readuntil(b"\r\n\r\n"))
    assert b"X-Injected" not in head
