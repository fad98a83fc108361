"""Spans of a server's requests and deliveries, from `traceparent` on every transport to live readers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from databases import BOTH_STORES
from deadlines import soon
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1.ledger_pb2_grpc import LedgerStub
from oncelog.server import trace_export
from oncelog.server.ledger import write_batcher
from oncelog.server.settings import TracingSettings
from server.chat.chat_servers import ChatServer
from server.ledger.ledger_servers import LedgerServer
from server.ledger.ledger_transports import GRPC, put
from server.ledger.write_streams import open_stream, write_of
from server.running_server import Serving, item, serving
from server.test_write_refusals import write_functions_of
from traces import (
    INVALID,
    TRACE_ID,
    TRACEPARENT,
    UNSAMPLED,
    Traces,
    link_ids,
    parent_id,
    span_id,
    trace_id,
    traceparent,
)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """The spans of servers with tracing."""
    traces = Traces()
    monkeypatch.setattr(trace_export, "_build_provider", lambda _: traces.provider)
    return traces


@asynccontextmanager
async def tracing_server(directory: Path, **settings: Any) -> AsyncIterator[Serving]:
    async with serving(directory, tracing=TracingSettings(enabled=True), **settings) as served:
        yield served


@BOTH_STORES
async def test_http_write_its_commit_and_its_broadcast_are_one_trace(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        reader = await served.connected("reader")
        await reader.sync("a")
        answer = await served.submit(item(1), headers={"traceparent": TRACEPARENT})
        assert answer.status == 200
        broadcast = await reader.receive()
    [request], [commit] = traces.named("POST /v1/events"), traces.named("oncelog.commit")
    [delivery] = traces.named("oncelog.broadcast")
    assert {trace_id(span) for span in (request, commit, delivery)} == {TRACE_ID}
    assert parent_id(request) == TRACEPARENT.split("-")[2]
    assert parent_id(commit) == span_id(request)
    assert parent_id(delivery) == span_id(request)
    assert link_ids(delivery) == {span_id(request), span_id(commit)}
    assert broadcast["payload"]["traceparent"] == traceparent(request), "the reader continues the trace"
    assert request.attributes is not None
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/events",
        "url.path": "/v1/events",
        "url.scheme": "http",
        "http.response.status_code": 200,
    }


async def test_traceparent_of_a_websocket_message_is_continued(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        writer = await served.connected()
        stream = await served.stream("a")
        await stream.connected()
        # The full decoder handles the second message, because its event has an escape.
        for number, text in ((1, "plain"), (2, "with \n")):
            payload = {"events": [item(number) | {"event": {"type": text}}]}
            await writer.send("submit_events", payload, traceparent=TRACEPARENT)
            assert (await writer.receive())["payload"]["results"][0]["status"] == "committed"
        shown = await stream.events(2)
    requests = traces.named("events write")
    assert {trace_id(span) for span in requests} == {TRACE_ID}
    assert [event["traceparent"] for event in shown] == [traceparent(span) for span in requests]
    deliveries = traces.named("oncelog.follow")
    assert {trace_id(span) for span in deliveries} == {TRACE_ID}


async def test_grpc_metadata_continue_the_trace(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served, grpc.aio.insecure_channel(served.server.grpc_address) as channel:
        stub: Any = LedgerStub(channel)
        operation = pb.Operation(delete_entity=pb.DeleteEntity(key="k"))
        request = pb.WriteRequest(organization="acme", sequence=1, operations=[operation])
        metadata = (("traceparent", TRACEPARENT),)
        assert (await soon(stub.Write(request, metadata=metadata))).WhichOneof("result") == "success"
        with pytest.raises(grpc.aio.AioRpcError):
            await soon(stub.Write(pb.WriteRequest(), metadata=metadata))
    [written, refused], [commit] = traces.named("oncelog.ledger.v1.Ledger/Write"), traces.named("oncelog.commit")
    assert (trace_id(commit), parent_id(commit)) == (TRACE_ID, span_id(written))
    assert written.attributes is not None
    assert refused.attributes is not None
    assert written.attributes["rpc.grpc.status_code"] == grpc.StatusCode.OK.value[0]
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT"


async def test_ledger_write_over_http_continues_the_trace(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        write = {"organization": "acme", "sequence": 1, "operations": [{"delete_entity": {"key": "k"}}]}
        for headers in ({}, {"traceparent": TRACEPARENT}):
            answer = await served.request("POST", "/v1/ledger/write", json=write, headers=headers)
            assert answer.status == 200, answer.body
            write["sequence"] = 2
    fast, slow = traces.named("oncelog.commit")
    assert trace_id(slow) == TRACE_ID != trace_id(fast)
    assert parent_id(fast) == span_id(traces.named("POST /v1/ledger/write")[0])


async def test_every_api_has_request_spans_without_a_traceparent(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served, write_functions_of(served) as write_functions:
        for way, write in write_functions.items():
            before = len(traces.names())
            assert await write(1) is None
            spans = traces.names()[before:]
            assert "oncelog.commit" in spans, way
    names = set(traces.names())
    assert {
        "events write",
        "POST /v1/events",
        "chat write",
        "POST /v1/chats/{chat_id}/messages",
        "oncelog.ledger.v1.Ledger/StreamWrites",
        "oncelog.ledger.v1.Ledger/Write",
        "POST /v1/ledger/write",
    } <= names


@pytest.mark.parametrize("sent", INVALID)
async def test_an_invalid_traceparent_is_ignored(tmp_path: Path, traces: Traces, sent: str) -> None:
    async with tracing_server(tmp_path) as served:
        writer = await served.connected()
        for value in (sent, None, 7, [sent]):
            await writer.send("submit_events", {"events": [item(1)]}, traceparent=value)
            assert (await writer.receive())["payload"]["results"][0]["status"] == "committed"
        if sent.isascii():
            assert (await served.submit(item(2), headers={"traceparent": sent})).status == 200
    assert TRACE_ID not in {trace_id(span) for span in traces.named("oncelog.commit")}


async def test_two_traceparent_headers_start_a_new_trace(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        headers = [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)]
        answer = await served.session.post(f"{served.url}/v1/events", json={"events": [item(1)]}, headers=headers)
        assert answer.status == 200
    [request] = traces.named("POST /v1/events")
    assert trace_id(request) != TRACE_ID


async def test_a_retry_with_another_traceparent_gets_the_first_receipt(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        first = await served.submit(item(1), headers={"traceparent": TRACEPARENT})
        retry = await served.submit(item(1), headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
        assert first.json == retry.json
        found = await served.get(f"/v1/events/{item(1)['id']}?partition=a")
        assert found.json["event"]["traceparent"].split("-")[1] == TRACE_ID


async def test_a_client_that_does_not_sample_gets_no_spans(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        assert (await served.submit(item(1), headers={"traceparent": UNSAMPLED})).status == 200
    assert traces.names() == []


async def test_failed_requests_have_their_status(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        assert (await served.submit({})).status == 400
        served.server.log.set_read_only()
        assert (await served.submit(item(1))).status == 503
        assert (await served.get("/v1/nothing")).status == 404
        assert (await served.get("/healthz")).status == 200
    malformed, read_only = traces.named("POST /v1/events")
    assert malformed.attributes is not None
    assert read_only.attributes is not None
    assert (malformed.attributes["http.response.status_code"], malformed.status.is_unset) == (400, True)
    assert (read_only.attributes["error.type"], read_only.status.is_ok) == ("503", False)
    assert traces.names().count("GET") == 1, "an unknown path has no route, and health checks have no span"


async def test_held_grpc_writes_keep_their_own_traces(
    tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_batcher, "BATCHING_THRESHOLD", 0)
    async with tracing_server(tmp_path) as served:
        ledger = LedgerServer(served, GRPC)
        try:
            await ledger.ledger("acme").write(1, put("k", b"v"))
        finally:
            await ledger.close()
    [request], [commit] = traces.named("oncelog.ledger.v1.Ledger/Write"), traces.named("oncelog.commit")
    assert parent_id(commit) == span_id(request)
    assert request.attributes is not None
    assert request.attributes["rpc.grpc.status_code"] == 0


async def test_each_write_of_a_stream_continues_its_own_trace(tmp_path: Path, traces: Traces) -> None:
    own = f"00-{'a' * 32}-{'b' * 16}-01"
    async with tracing_server(tmp_path) as served:
        ledger = LedgerServer(served, GRPC)
        try:
            stream = open_stream(ledger, metadata=[("traceparent", TRACEPARENT)])
            await stream.request(write_of(1))
            await stream.request(write_of(2, traceparent=own), write_of(0, traceparent=own))
            await stream.request(write_of(3, traceparent="nonsense"))
        finally:
            await ledger.close()
    first, refused, second, third = traces.named("oncelog.ledger.v1.Ledger/StreamWrites")
    commits = traces.named("oncelog.commit")
    assert [parent_id(commit) for commit in commits] == [span_id(first), span_id(second), span_id(third)]
    assert [trace_id(span) for span in (first, second, refused)] == [TRACE_ID, "a" * 32, "a" * 32]
    assert trace_id(third) not in (TRACE_ID, "a" * 32)
    assert [span.attributes["rpc.grpc.status_code"] for span in (first, refused) if span.attributes] == [0, 3]


async def test_chat_message_carries_the_trace_to_its_readers(tmp_path: Path, traces: Traces) -> None:
    async with tracing_server(tmp_path) as served:
        chats = ChatServer(served)
        await chats.create("tea", "ann", "bob")
        ann, bob = await chats.connect("ann"), await chats.connect("bob", live=True)
        await ann.send_committed("tea", 1, traceparent=TRACEPARENT)
        await ann.send_committed("tea", 1, traceparent="nonsense")
        shown = await bob.wait_for_frame(type="message")
        [stored] = await bob.sync_all("tea")
        await chats.close()
    [request] = [span for span in traces.named("chat write") if trace_id(span) == TRACE_ID]
    assert shown["traceparent"] == stored["traceparent"] == traceparent(request)
