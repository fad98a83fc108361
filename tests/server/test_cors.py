"""CORS: pages of configured origins may read the server's answers; other pages may not.

The tests check every kind of answer, because a browser hides answers without the header, including errors, from the
page.
"""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from server.running_server import Answer, EventStream, Serving, api_key, item, serving

APP: Final = "https://app.example.org"
EVIL: Final = "https://evil.example"
ORIGINS: Final = (APP, "http://localhost:3000")
PATHS: Final = ("/v1/events", "/v1/events/stream", "/readyz", "/nowhere")
ASKING: Final = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
"""Headers of a preflight request."""


def allowed(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the CORS headers without their prefix. Assert that credentials are never allowed, because there are no
    cookies.
    """
    found = {
        name.removeprefix("Access-Control-"): value
        for name, value in headers.items()
        if name.startswith("Access-Control-")
    }
    assert "Allow-Credentials" not in found
    assert found.get("Allow-Origin") != "*"
    return found


def cors_headers_for(origin: str) -> dict[str, str]:
    """Return the CORS headers that every answer to a page of a configured origin has."""
    return {"Allow-Origin": origin, "Expose-Headers": "Retry-After"}


async def preflight(served: Serving, path: str, origin: str | None) -> Answer:
    """Send a preflight request without a credential, as browsers do, and return the answer."""
    named = {} if origin is None else {"Origin": origin}
    return await served.request("OPTIONS", path, headers={**ASKING, **named})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_server(
    session_loop: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mapping[tuple[str, ...], Serving]]:
    """Servers with API keys for preflight requests, by configured origins."""
    async with (
        serving(tmp_path_factory.mktemp("configured"), api_keys=True, origins=ORIGINS) as configured,
        serving(tmp_path_factory.mktemp("default"), api_keys=True) as default,
    ):
        yield {ORIGINS: configured, (): default}


# --- preflight ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", ORIGINS)
async def test_preflight_of_a_configured_origin_is_allowed(
    shared_server: Mapping[tuple[str, ...], Serving], path: str, origin: str
) -> None:
    served = shared_server[ORIGINS]
    answer = await preflight(served, path, origin)
    assert (answer.status, answer.body) == (204, b"")
    assert allowed(answer.headers) == {
        **cors_headers_for(origin),
        "Allow-Methods": "GET, POST, PUT, DELETE",
        "Allow-Headers": "Authorization, Content-Type, Last-Event-ID, Traceparent, Tracestate",
        "Max-Age": "600",
    }
    assert answer.headers["Vary"] == "Origin"
    assert served.server.counts.auth_failures == 0


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    "origin", [EVIL, "null", "*", "http://app.example.org", f"{APP}:8443", f"{APP}.evil.example", f"{APP}/", ""]
)
@pytest.mark.parametrize("origins", [ORIGINS, ()])
async def test_preflight_of_another_origin_is_refused(
    shared_server: Mapping[tuple[str, ...], Serving], origin: str, origins: tuple[str, ...]
) -> None:
    answer = await preflight(shared_server[origins], "/v1/events", origin)
    assert answer.refusal == (403, "forbidden")
    assert allowed(answer.headers) == {}
    # A cache must not serve the refusal to an allowed page.
    assert answer.headers.get("Vary") == ("Origin" if origins else None)


async def test_preflight_without_an_origin_allows_no_origin(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=ORIGINS) as served:
        answer = await preflight(served, "/v1/events", None)
        assert answer.status == 204
        assert "Allow-Origin" not in allowed(answer.headers)


async def test_options_without_a_preflight_header_is_not_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=ORIGINS) as served:
        answer = await served.request("OPTIONS", "/v1/events", headers={"Origin": APP})
        assert answer.refusal == (405, "method_not_allowed")
        assert answer.headers["Allow"] == "GET,HEAD,POST"
        assert allowed(answer.headers) == cors_headers_for(APP)


# --- answers --------------------------------------------------------------------------------------


async def answers(served: Serving, headers: Mapping[str, str]) -> dict[str, Answer | EventStream]:
    """Return one answer of each kind, using an API key with grants only for `a`."""
    key = api_key(served, "page", ["a"], ["a"])
    every: dict[str, Any] = {"headers": headers, "credential": key.text}
    return {
        "submitted": await served.submit(item(1), **every),
        "read": await served.page("a", **every),
        "followed": await served.stream("a", **every),
        "ready": await served.get("/readyz", headers=headers),
        "a malformed request": await served.page("a", since="x", **every),
        "a page of another partition": await served.page("b", **every),
        "a stream of another partition": await served.stream("b", **every),
        "without a credential": await served.page("a", headers=headers),
        "submitted without a credential": await served.submit(item(2), headers=headers),
        "a wrong content type": await served.request("POST", "/v1/events", data=b"x", **every),
        "a body that is too large": await served.submit({**item(3), "filling": "x" * 20_000}, **every),
        "nowhere": await served.get("/nowhere", headers=headers),
    }


STATUSES: Final = [200, 200, 200, 200, 400, 403, 403, 401, 401, 415, 413, 404]


def status_and_headers(answer: Answer | EventStream) -> tuple[int, Mapping[str, str]]:
    if isinstance(answer, EventStream):
        return answer.response.status, answer.response.headers
    return answer.status, answer.headers


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("origin", ORIGINS)
async def test_configured_origin_may_read_every_answer(tmp_path: Path, origin: str) -> None:
    async with serving(tmp_path, api_keys=True, origins=ORIGINS, frame_bytes_max=10_000) as served:
        found = await answers(served, {"Origin": origin})
        assert [status_and_headers(one)[0] for one in found.values()] == STATUSES
        for name, answer in found.items():
            headers = status_and_headers(answer)[1]
            assert (allowed(headers), headers["Vary"]) == (cors_headers_for(origin), "Origin"), name
        followed = found["followed"]
        assert isinstance(followed, EventStream)
        await followed.connected()
        assert [one["committed_id"] for one in await followed.events(1)] == [1]


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("origins", [ORIGINS, ()])
@pytest.mark.parametrize("has_origin", [True, False])
async def test_same_origin_and_non_browser_requests_get_no_cors_headers(
    tmp_path: Path, origins: tuple[str, ...], has_origin: bool
) -> None:
    async with serving(tmp_path, api_keys=True, origins=origins, frame_bytes_max=10_000) as served:
        found = await answers(served, {"Origin": served.url} if has_origin else {})
        assert [status_and_headers(one)[0] for one in found.values()] == STATUSES
        for name, answer in found.items():
            headers = status_and_headers(answer)[1]
            # Caches must know that answers vary by origin if any origin is configured.
            vary = "Origin" if origins else None
            assert (allowed(headers), headers.get("Vary")) == ({}, vary), name


@pytest.mark.rule("CO-24")
async def test_all_requests_from_another_origin_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True, origins=ORIGINS, frame_bytes_max=10_000) as served:
        for name, answer in (await answers(served, {"Origin": EVIL})).items():
            status, headers = status_and_headers(answer)
            assert (status, allowed(headers), headers["Vary"]) == (403, {}, "Origin"), name
        ready = await served.get("/readyz")
        assert ready.json["last_committed_id"] == 0


async def test_allowed_origin_is_echoed_as_sent(tmp_path: Path) -> None:
    """A browser compares the header byte by byte, while the server compares normalized origins."""
    async with serving(tmp_path, origins=ORIGINS) as served:
        for origin in (f"{APP}:443", "https://APP.example.org"):
            answer = await served.page("a", headers={"Origin": origin})
            assert (answer.status, allowed(answer.headers)) == (200, cors_headers_for(origin))


async def test_configured_origin_may_read_the_retry_after_header(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=ORIGINS, connections_max=1) as served:
        await served.connected()
        stream = await served.stream("a", headers={"Origin": APP})
        headers = stream.response.headers
        assert (stream.response.status, headers["Retry-After"]) == (503, "1")
        assert allowed(headers) == cors_headers_for(APP)
