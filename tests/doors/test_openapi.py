"""What the server says of itself is true: schemathesis sends what the description allows, and what it does not."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import schemathesis
from schemathesis.engine import from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.engine.recorder import ScenarioRecorder

from doors.material import token
from doors.serving import Serving, item, run, serving
from oncelog.core.identity import delta_id_of
from oncelog.doors.limits import DoorLimits
from oncelog.doors.openapi import description
from oncelog.doors.requests import STATUS
from oncelog.doors.settings import GeneralSettings
from oncelog.errors import CanonicalError

METHODS: Final = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})
STREAM: Final = "/v1/events/stream"
CONFIG: Final[dict[str, Any]] = {
    "seed": 7,
    "generation": {"deterministic": True, "no-shrink": True},
    "checks": {
        # A cursor ahead of the log is good in form; the partition of somebody else too.
        "positive_data_acceptance": {"expected-statuses": ["200", "201", "403", "404", "409"]},
        "negative_data_rejection": {"expected-statuses": ["400", "401", "413", "415"]},
    },
    "phases": {"stateful": {"enabled": False}},
}
SCHEMA_CANNOT_SAY: Final = (
    "must be that of the credential",
    "needs a resource or a subject",
    "must be one that a page has given",
    "must be in NFC",
    "must not be all zero",
    "must be of the batch's scope",
    "(2^53−1)",
    "UUID, or its 32 hexadecimal digits",
    "is named twice",
    "is not that of the delta",
    "from 0 to 2^64−1",
    "cannot stand beside",
    "$.content: must have at most",
)
"""Why a request of the ledger, of deltas or of a chat may be refused though its schema allows it."""


@contextmanager
def served_elsewhere(directory: Path, **options: Any) -> Iterator[Serving]:
    """A server in a thread of its own: schemathesis waits for its answers in this one."""
    started: list[Serving] = []
    is_up, stopping = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with serving(directory, **options) as served:
            await served.submit(*(item(number, "a", "b") for number in range(1, 20)))
            started.append(served)
            is_up.set()
            await stopping.wait()

    def work() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()
            is_up.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert is_up.wait(30)
        yield started[0]
    finally:
        if started:
            loop.call_soon_threadsafe(stopping.set)
        thread.join()


def examined(served: Serving, cases_max: int, path_regex: str, **config: Any) -> tuple[int, list[str]]:
    """How many requests were sent, and all that was found wrong with their answers."""
    generation = {**CONFIG["generation"], **config.get("generation", {}), "max-examples": cases_max}
    made = schemathesis.Config.from_dict({**CONFIG, **config, "generation": generation})
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=made).include(path_regex=path_regex)
    schema.hook("map_body")(as_we_mean_it)
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


def as_we_mean_it(_: Any, body: Any) -> Any:
    """What JSON Schema cannot say: no id twice in a request, no `1.0` for a whole number, a delta's id is its own."""
    if isinstance(body, dict) and isinstance(body.get("deltas"), list):
        return {**body, "deltas": [_with_its_id(delta) for delta in body["deltas"]]}
    events = body.get("events") if isinstance(body, dict) else None
    if not isinstance(events, list):
        return body
    return {**body, "events": [_as_we_mean_it(event, index) for index, event in enumerate(events)]}


def _as_we_mean_it(event: Any, index: int) -> Any:
    if not isinstance(event, dict):
        return event
    changed = dict(event)
    if isinstance(event.get("id"), str) and len(event["id"]) == 36:
        changed["id"] = f"{event['id'][:-4]}{index:04x}"
    expected = event.get("expected_committed_id")
    if isinstance(expected, float) and expected.is_integer():
        changed["expected_committed_id"] = int(expected)
    return changed


def _with_its_id(delta: Any) -> Any:
    """The same, if that it has another id is all that is wrong with it."""
    try:
        return {**delta, "deltaId": delta_id_of(delta).hex()} if len(delta["deltaId"]) == 64 else delta
    except (CanonicalError, LookupError, TypeError):
        return delta


@pytest.mark.rule("EV-16", "CO-33")
def test_the_server_does_what_it_says(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path, request_events_max=20) as served:
        # Nobody is asked for a credential here. A stream that is let through does not end.
        checks = {**CONFIG["checks"], "ignored_auth": {"enabled": False}}
        generation = {**CONFIG["generation"], "with-security-parameters": False}
        requests, faults = examined(
            served, 40, "^(?!.*/stream|/v1/ledger/|/v1/sync/|/v1/chat)", checks=checks, generation=generation
        )
        more, others = examined(served, 10, "^/v1/ledger/(?!.*/stream)", checks=checks, generation=generation)
        requests, faults = requests + more, faults + others
        more, others = examined(served, 15, "^/v1/sync/(?!.*/live)", checks=checks, generation=generation)
        faults += others
        chats, others = examined(served, 10, "^/v1/chats", checks=checks, generation=generation)
        faults += others
    assert chats > 50
    assert not faults, "\n\n".join(faults)
    assert requests > 200
    assert more > 50


@pytest.mark.rule("EV-16", "CO-21", "CO-22")
def test_also_to_somebody_who_may_do_nothing(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path, tokens=True, auth_failures_per_minute_max=0, request_events_max=20) as served:
        headers = {"Authorization": f"Bearer {token(grants={})}"}
        requests, faults = examined(served, 25, "^/v1/events", headers=headers)
        more, others = examined(served, 5, "^/v1/ledger/", headers=headers)
        requests, faults = requests + more, faults + others
        # Whose gateway it is comes first there: to a stranger good and bad requests are alike.
        rejected = {"expected-statuses": ["400", "401", "403", "413", "415"]}
        checks = {**CONFIG["checks"], "negative_data_rejection": rejected}
        more, others = examined(served, 5, "^/v1/(sync/|chats)", headers=headers, checks=checks)
        requests, faults = requests + more, faults + others
    assert not faults, "\n\n".join(faults)
    assert requests > 100


# --- the document itself ---------------------------------------------------------------------------------


def test_every_route_is_described_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> set[tuple[str, str]]:
        async with serving(tmp_path, tokens=True) as served:  # in development mode there is a page too
            runner = served.server._runner
            assert runner is not None
            routes = runner.app.router.routes()
            return {
                (route.method.lower(), route.resource.canonical)
                for route in routes
                if route.resource is not None and route.method != "HEAD"
            }

    paths = description(DoorLimits())["paths"]
    described = {(method, path) for path, operations in paths.items() for method in operations.keys() & METHODS}
    assert run(main()) == described


def test_what_is_turned_off_is_not_there(tmp_path: Path) -> None:
    async def main() -> list[int]:
        async with serving(tmp_path, metrics=False, openapi=False) as served:
            return [(await served.get(path)).status for path in ("/metrics", "/openapi.json", "/healthz")]

    assert run(main()) == [404, 404, 200]
    assert GeneralSettings().metrics
    assert GeneralSettings().openapi


def test_it_tells_the_limits_that_the_server_has(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"request_events_max": 7, "page_events_max": 11, "frame_bytes_max": 4321}

    async def main() -> Any:
        async with serving(tmp_path, **limits) as served:
            return (await served.get("/openapi.json")).json

    found = run(main())
    assert found == description(DoorLimits(**limits))
    schemas = found["components"]["schemas"]
    assert schemas["Submission"]["properties"]["events"]["maxItems"] == 7
    assert schemas["Page"]["properties"]["events"]["maxItems"] == 11
    limit = next(one for one in found["paths"]["/v1/events"]["get"]["parameters"] if one["name"] == "limit")
    assert limit["schema"]["default"] == 11  # more than a page may have is not what one gets
    assert "11" in limit["description"]
    assert "4321" in found["paths"]["/v1/events"]["post"]["requestBody"]["description"]


def test_every_status_of_the_door_is_described() -> None:
    paths = description(DoorLimits())["paths"]
    for path, method, others in (
        ("/v1/events", "post", {200, 408, 413, 415, 507}),
        ("/v1/events", "get", {200, 409}),
        (STREAM, "get", {200, 409}),
        ("/v1/ledger/write", "post", {200, 408, 413, 415, 507}),
        ("/v1/ledger/blocks/stream", "get", {200, 409}),
        ("/v1/sync/{gateway}/push", "post", {200, 408, 409, 413, 415, 422, 507}),
        ("/v1/sync/{gateway}/pull", "get", {200, 409}),
        ("/v1/sync/{gateway}/live", "get", {200, 409}),
        ("/v1/sync/{gateway}/snapshot", "get", {200}),
        ("/v1/sync/{gateway}/compact", "post", {200, 408, 413, 415}),
        ("/v1/chats", "post", {200, 201, 408, 413, 415}),
        ("/v1/chats/{chat_id}", "get", {200}),
        ("/v1/chats/{chat_id}/messages", "get", {200, 409}),
        ("/v1/chats/{chat_id}/messages", "post", {200, 201, 408, 413, 415, 507}),
        ("/v1/chats/{chat_id}/ack", "post", {200, 408, 409, 413, 415}),
        ("/v1/chats/{chat_id}/members/{user_id}", "put", {200}),
    ):
        described = set(map(int, paths[path][method]["responses"]))
        assert described == set(STATUS.values()) - {404, 409, 507} | others


@pytest.mark.rule("EV-16")
def test_what_a_stream_sends_is_an_event_as_a_page_has_it(tmp_path: Path) -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        async with serving(tmp_path) as served:
            await served.commit(item(1), item(2, "a", "b"))
            stream = await served.stream("a")
            await stream.connected()
            return await stream.events(2), (await served.page("a")).json["events"]

    streamed, paged = run(main())
    assert streamed == paged
    document = description(DoorLimits())
    schema = {"$ref": "#/components/schemas/Event", "components": document["components"]}
    for event in streamed:
        jsonschema_rs.Draft202012Validator(schema).validate(event)
