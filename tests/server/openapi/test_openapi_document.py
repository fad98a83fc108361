"""The OpenAPI document describes the server. The tests use schemathesis to send requests that conform to the document
or violate it.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import schemathesis
from schemathesis.engine import from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.engine.recorder import ScenarioRecorder

from deadlines import WAIT_S
from oncelog.core.identity import delta_id_from_json
from oncelog.errors import CanonicalError
from oncelog.server.openapi import build_document
from oncelog.server.settings import GeneralSettings
from server.auth.auth_material import token
from server.running_server import Serving, item, serving

METHODS: Final = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})
STREAM: Final = "/v1/events/stream"
CONFIG: Final[dict[str, Any]] = {
    "seed": 7,
    "generation": {"deterministic": True, "no-shrink": True},
    "checks": {
        # A cursor ahead of the log, another user's partition and a condition that is false are well-formed.
        "positive_data_acceptance": {"expected-statuses": ["200", "201", "403", "404", "409", "412"]},
        "negative_data_rejection": {"expected-statuses": ["400", "401", "413", "415"]},
    },
    "phases": {"stateful": {"enabled": False}},
}
SCHEMA_CANNOT_SAY: Final = (
    "must be the credential's client",
    "requires a resource or a subject",
    "must be a token from a previous page",
    "must be a cursor of an earlier page",
    "must be in NFC",
    "must not be all zero",
    "must have the same scope as the batch",
    "would become",
    "beyond the largest double",
    "UUID, or 32 hexadecimal digits",
    "appears more than once",
    "does not match the content of the delta",
    "from 0 to 2^64−1",
    "must not be combined with",
    "exactly one of tx_id and idempotency_key is required",
    "$.content: must have at most",
)
"""Messages of the ledger, deltas and chat APIs that refuse requests for reasons that JSON Schema cannot express."""


@contextmanager
def server_in_thread(directory: Path, **options: Any) -> Iterator[Serving]:
    """Run a server in another thread, because schemathesis blocks this one while it waits for answers."""
    started: list[Serving] = []
    is_up, stopping = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(directory, **options) as served:
            await served.submit(*(item(number, "a", "b") for number in range(1, 20)))
            started.append(served)
            is_up.set()
            await stopping.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()
            is_up.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert is_up.wait(WAIT_S)
        yield started[0]
    finally:
        if started:
            loop.call_soon_threadsafe(stopping.set)
        thread.join()


def send_generated_requests(served: Serving, cases_max: int, path_regex: str, **config: Any) -> tuple[int, list[str]]:
    """Send generated requests; return their number and the faults in the answers."""
    generation = {**CONFIG["generation"], **config.get("generation", {}), "max-examples": cases_max}
    made = schemathesis.Config.from_dict({**CONFIG, **config, "generation": generation})
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=made).include(path_regex=path_regex)
    schema.hook("map_body")(adjust_body)
    requests = 0
    faults: list[str] = []
    for event in from_schema(schema).execute():
        if isinstance(event, ScenarioFinished):
            requests += len(event.recorder.interactions)
            faults += _faults(event.recorder)
        elif isinstance(event, NonFatalError | FatalError):
            faults.append(repr(event))
    return requests, faults


def _faults(recorder: ScenarioRecorder) -> Iterator[str]:
    for case_id, checks in recorder.checks.items():
        response = recorder.interactions[case_id].response
        for found in (check.failure_info for check in checks if check.failure_info is not None):
            answer = None if response is None else (response.status_code, response.content)
            if response is not None and any(words in response.content.decode() for words in SCHEMA_CANNOT_SAY):
                continue
            yield f"{found.failure.title}: {found.failure.message}\n{found.code_sample}\n{answer}"


def adjust_body(_: Any, body: Any) -> Any:
    """Apply rules that JSON Schema cannot express: distinct ids, integers without a fraction, derived delta ids."""
    if isinstance(body, dict) and isinstance(body.get("deltas"), list):
        return {**body, "deltas": [_fill_in_delta_id(delta) for delta in body["deltas"]]}
    events = body.get("events") if isinstance(body, dict) else None
    if not isinstance(events, list):
        return body
    return {**body, "events": [_adjust_event(event, index) for index, event in enumerate(events)]}


def _adjust_event(event: Any, index: int) -> Any:
    if not isinstance(event, dict):
        return event
    changed = dict(event)
    if isinstance(event.get("id"), str) and len(event["id"]) == 36:
        changed["id"] = f"{event['id'][:-4]}{index:04x}"
    expected = event.get("expected_committed_id")
    if isinstance(expected, float) and expected.is_integer():
        changed["expected_committed_id"] = int(expected)
    return changed


def _fill_in_delta_id(delta: Any) -> Any:
    """Return the delta with its derived id if it is otherwise valid."""
    try:
        return {**delta, "deltaId": delta_id_from_json(delta).hex()} if len(delta["deltaId"]) == 64 else delta
    except (CanonicalError, LookupError, TypeError):
        return delta


@pytest.mark.rule("EV-16", "CO-33")
def test_answers_conform_to_the_document_in_development_mode(tmp_path: Path, is_soak: bool) -> None:
    few, some, many = (10, 15, 40) if is_soak else (2, 3, 8)
    # Development mode requires no credential. An accepted stream does not end.
    checks = {**CONFIG["checks"], "ignored_auth": {"enabled": False}}
    config = {"checks": checks, "generation": {**CONFIG["generation"], "with-security-parameters": False}}
    with server_in_thread(tmp_path, request_events_max=20) as served:
        found = {
            "events": send_generated_requests(served, many, "^(?!.*/stream|/v1/ledger/|/v1/sync/|/v1/chat)", **config),
            "ledger": send_generated_requests(served, few, "^/v1/ledger/(?!.*/stream)", **config),
            "deltas": send_generated_requests(served, some, "^/v1/sync/(?!.*/live)", **config),
            "chat": send_generated_requests(served, few, "^/v1/chats", **config),
        }
    assert not faults_of(found), faults_of(found)
    requests = {name: count for name, (count, _) in found.items()}
    assert min(requests.values()) > 50, requests
    assert requests["events"] + requests["ledger"] > 200, requests


@pytest.mark.rule("EV-16", "CO-21", "CO-22")
def test_answers_conform_to_the_document_for_a_client_without_grants(tmp_path: Path, is_soak: bool) -> None:
    few, many = (5, 25) if is_soak else (4, 10)
    # The coverage phase sends hundreds of requests, and the server refuses nearly all of them for the same reason.
    phases = {**CONFIG["phases"], "coverage": {"enabled": is_soak}}
    # The ledger and events APIs check the syntax first; the deltas and chat APIs check access first.
    rejected = {"expected-statuses": ["400", "401", "403", "413", "415"]}
    checks = {**CONFIG["checks"], "negative_data_rejection": rejected}
    with server_in_thread(tmp_path, tokens=True, auth_failures_per_minute_max=0, request_events_max=20) as served:
        headers = {"Authorization": f"Bearer {token(grants={})}"}
        found = {
            "events": send_generated_requests(served, many, "^/v1/events", headers=headers),
            "ledger": send_generated_requests(served, few, "^/v1/ledger/", headers=headers, phases=phases),
            "deltas and chat": send_generated_requests(
                served, few, "^/v1/(sync/|chats)", headers=headers, checks=checks, phases=phases
            ),
        }
    assert not faults_of(found), faults_of(found)
    assert sum(count for count, _ in found.values()) > 100


def faults_of(found: Mapping[str, tuple[int, list[str]]]) -> str:
    return "\n\n".join(fault for _, faults in found.values() for fault in faults)


# --- the document itself ---------------------------------------------------------------------------------


def document_of(served: Serving) -> dict[str, Any]:
    return build_document(served.server.list_endpoints(), served.server.settings.api_limits)


async def test_document_describes_exactly_the_routes(tmp_path: Path) -> None:
    pages = {("get", "/docs"), ("get", "/assets/{name}")}
    async with serving(tmp_path, tokens=True) as served:  # development mode adds the web chat
        paths = document_of(served)["paths"]
        described = {(method, path) for path, operations in paths.items() for method in operations.keys() & METHODS}
        runner = served.server._http.runner
        assert runner is not None
        routes = {
            (route.method.lower(), route.resource.canonical)
            for route in runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    assert routes - pages == described


async def test_disabled_metrics_and_openapi_endpoints_are_not_found(tmp_path: Path) -> None:
    async with serving(tmp_path, metrics=False, openapi=False) as served:
        statuses = [(await served.get(path)).status for path in ("/metrics", "/openapi.json", "/healthz")]
    assert statuses == [404, 404, 200]
    assert GeneralSettings().metrics
    assert GeneralSettings().openapi


async def test_document_has_the_limits_of_the_server(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"request_events_max": 7, "page_events_max": 11, "frame_bytes_max": 4321}
    async with serving(tmp_path, **limits) as served:
        found = (await served.get("/openapi.json")).json
        assert found == document_of(served)
    schemas = found["components"]["schemas"]
    assert schemas["Submission"]["properties"]["events"]["maxItems"] == 7
    assert schemas["Page"]["properties"]["events"]["maxItems"] == 11
    limit = next(one for one in found["paths"]["/v1/events"]["get"]["parameters"] if one["name"] == "limit")
    assert limit["schema"]["default"] == 11  # the default is clamped to the largest page
    assert "11" in limit["description"]
    assert "4321" in found["paths"]["/v1/events"]["post"]["requestBody"]["description"]


async def test_document_describes_every_status(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        paths = document_of(served)["paths"]
    for path, method, others in (
        ("/v1/events", "post", {200, 408, 413, 415, 507}),
        ("/v1/events", "get", {200, 409}),
        (STREAM, "get", {200, 409}),
        ("/v1/ledger/write", "post", {200, 408, 409, 412, 413, 415, 507}),
        ("/v1/ledger/blocks/stream", "get", {200, 409}),
        ("/v1/sync/{gateway}/push", "post", {200, 408, 409, 413, 415, 422, 507}),
        ("/v1/sync/{gateway}/pull", "get", {200, 409}),
        ("/v1/sync/{gateway}/live", "get", {200, 409}),
        ("/v1/sync/{gateway}/snapshot", "get", {200, 409}),
        ("/v1/sync/{gateway}/compact", "post", {200, 408, 413, 415}),
        ("/v1/chats", "post", {200, 201, 408, 413, 415, 507}),
        ("/v1/chats/{chat_id}", "get", {200}),
        ("/v1/chats/{chat_id}/messages", "get", {200, 409}),
        ("/v1/chats/{chat_id}/messages", "post", {200, 201, 408, 413, 415, 507}),
        ("/v1/chats/{chat_id}/ack", "post", {200, 408, 409, 413, 415}),
        ("/v1/chats/{chat_id}/members/{user_id}", "put", {200, 408, 409, 413, 415, 507}),
        ("/v1/chats/{chat_id}/members/{user_id}", "delete", {200}),
    ):
        described = set(map(int, paths[path][method]["responses"]))
        assert described == {400, 401, 403, 429, 500, 503} | others


@pytest.mark.rule("EV-16")
async def test_streamed_event_equals_the_paged_event_and_matches_its_schema(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1), item(2, "a", "b"))
        stream = await served.stream("a")
        await stream.connected()
        streamed = await stream.events(2)
        paged = (await served.page("a")).json["events"]
        document = document_of(served)
    assert streamed == paged
    schema = {"$ref": "#/components/schemas/Event", "components": document["components"]}
    for event in streamed:
        jsonschema_rs.Draft202012Validator(schema).validate(event)
