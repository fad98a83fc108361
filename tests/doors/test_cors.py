"""What browsers are told about pages of other origins (CORS): those of configured origins may read answers, no others.

Every answer that a page asks for is looked at: without the header a browser hides it, the reason of an error too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from doors.serving import Answer, EventStream, Serving, api_key, item, run, serving

APP: Final = "https://app.example.org"
EVIL: Final = "https://evil.example"
ORIGINS: Final = (APP, "http://localhost:3000")
PATHS: Final = ("/v1/events", "/v1/events/stream", "/readyz", "/nowhere")
ASKING: Final = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
"""What a browser asks before it sends a page's request."""


def allowed(headers: Mapping[str, str]) -> dict[str, str]:
    """All that is said of CORS, but for the prefix. Credentials must never be: cookies are not ours to take."""
    found = {
        name.removeprefix("Access-Control-"): value
        for name, value in headers.items()
        if name.startswith("Access-Control-")
    }
    assert "Allow-Credentials" not in found
    assert found.get("Allow-Origin") != "*"
    return found


def told(origin: str) -> dict[str, str]:
    """With every answer to a page of a configured origin."""
    return {"Allow-Origin": origin, "Expose-Headers": "Retry-After"}


async def asked(served: Serving, path: str, origin: str | None) -> Answer:
    """The answer to a preflight. It has no credential: browsers send none with it."""
    named = {} if origin is None else {"Origin": origin}
    return await served.request("OPTIONS", path, headers={**ASKING, **named})


# --- before a request ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_configured_origin_is_told_what_it_may_send(tmp_path: Path, path: str, origin: str) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True, origins=ORIGINS) as served:
            answer = await asked(served, path, origin)
            assert (answer.status, answer.body) == (204, b"")
            assert allowed(answer.headers) == {
                **told(origin),
                "Allow-Methods": "GET, POST, PUT, DELETE",
                "Allow-Headers": "Authorization, Content-Type, Last-Event-ID",
                "Max-Age": "600",
            }
            assert answer.headers["Vary"] == "Origin"
            assert served.server.counts.auth_failures == 0

    run(main())


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize(
    "origin", [EVIL, "null", "*", "http://app.example.org", f"{APP}:8443", f"{APP}.evil.example", f"{APP}/", ""]
)
@pytest.mark.parametrize("origins", [ORIGINS, ()])
def test_another_origin_is_refused_before_it_sends_anything(
    tmp_path: Path, origin: str, origins: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with serving(tmp_path, origins=origins) as served:
            answer = await asked(served, "/v1/events", origin)
            assert answer.refusal == (403, "forbidden")
            assert allowed(answer.headers) == {}
            # Who caches it must not give it to a page that is allowed.
            assert answer.headers.get("Vary") == ("Origin" if origins else None)

    run(main())


def test_without_an_origin_there_is_nobody_to_allow(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, origins=ORIGINS) as served:
            answer = await asked(served, "/v1/events", None)
            assert answer.status == 204
            assert "Allow-Origin" not in allowed(answer.headers)

    run(main())


def test_options_that_ask_nothing_are_no_method_of_ours(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, origins=ORIGINS) as served:
            answer = await served.request("OPTIONS", "/v1/events", headers={"Origin": APP})
            assert answer.refusal == (405, "bad_request")
            assert answer.headers["Allow"] == "GET,HEAD,POST"
            assert allowed(answer.headers) == told(APP)

    run(main())


# --- with an answer --------------------------------------------------------------------------------------


async def answers(served: Serving, headers: Mapping[str, str]) -> dict[str, Answer | EventStream]:
    """One of each kind, of which a server with API keys has one for `a` alone."""
    key = api_key(served, "page", ["a"], ["a"])
    every: dict[str, Any] = {"headers": headers, "credential": key.text}
    return {
        "submitted": await served.submit(item(1), **every),
        "read": await served.page("a", **every),
        "followed": await served.stream("a", **every),
        "ready": await served.get("/readyz", headers=headers),
        "not a request": await served.page("a", since="x", **every),
        "a page of another partition": await served.page("b", **every),
        "a stream of another partition": await served.stream("b", **every),
        "without a credential": await served.page("a", headers=headers),
        "submitted without a credential": await served.submit(item(2), headers=headers),
        "a wrong type": await served.request("POST", "/v1/events", data=b"x", **every),
        "a body that is too large": await served.submit({**item(3), "filling": "x" * 20_000}, **every),
        "nowhere": await served.get("/nowhere", headers=headers),
    }


STATUSES: Final = [200, 200, 200, 200, 400, 403, 403, 401, 401, 415, 413, 404]


def seen(answer: Answer | EventStream) -> tuple[int, Mapping[str, str]]:
    if isinstance(answer, EventStream):
        return answer.response.status, answer.response.headers
    return answer.status, answer.headers


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_configured_origin_may_read_every_answer(tmp_path: Path, origin: str) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True, origins=ORIGINS, frame_bytes_max=10_000) as served:
            found = await answers(served, {"Origin": origin})
            assert [seen(one)[0] for one in found.values()] == STATUSES
            for name, answer in found.items():
                headers = seen(answer)[1]
                assert (allowed(headers), headers["Vary"]) == (told(origin), "Origin"), name
            followed = found["followed"]
            assert isinstance(followed, EventStream)
            await followed.connected()
            assert [one["committed_id"] for one in await followed.events(1)] == [1]

    run(main())


@pytest.mark.rule("CO-24")
@pytest.mark.parametrize("origins", [ORIGINS, ()])
@pytest.mark.parametrize("has_origin", [True, False])
def test_the_servers_own_pages_and_programs_need_no_permission(
    tmp_path: Path, origins: tuple[str, ...], has_origin: bool
) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True, origins=origins, frame_bytes_max=10_000) as served:
            found = await answers(served, {"Origin": served.url} if has_origin else {})
            assert [seen(one)[0] for one in found.values()] == STATUSES
            for name, answer in found.items():
                headers = seen(answer)[1]
                # A cache must know that the answer to another page is another one, if there can be one.
                vary = "Origin" if origins else None
                assert (allowed(headers), headers.get("Vary")) == ({}, vary), name

    run(main())


@pytest.mark.rule("CO-24")
def test_another_origin_gets_nothing_but_a_refusal(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True, origins=ORIGINS, frame_bytes_max=10_000) as served:
            for name, answer in (await answers(served, {"Origin": EVIL})).items():
                status, headers = seen(answer)
                assert (status, allowed(headers), headers["Vary"]) == (403, {}, "Origin"), name
            ready = await served.get("/readyz")
            assert ready.json["last_committed_id"] == 0

    run(main())


def test_an_origin_is_told_as_the_browser_wrote_it(tmp_path: Path) -> None:
    """A browser compares byte by byte; whether it is allowed is asked of its normal form."""

    async def main() -> None:
        async with serving(tmp_path, origins=ORIGINS) as served:
            for origin in (f"{APP}:443", "https://APP.example.org"):
                answer = await served.page("a", headers={"Origin": origin})
                assert (answer.status, allowed(answer.headers)) == (200, told(origin))

    run(main())


def test_a_busy_servers_page_can_read_when_to_come_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, origins=ORIGINS, connections_max=1) as served:
            await served.connected()
            stream = await served.stream("a", headers={"Origin": APP})
            headers = stream.response.headers
            assert (stream.response.status, headers["Retry-After"]) == (503, "1")
            assert allowed(headers) == told(APP)

    run(main())
