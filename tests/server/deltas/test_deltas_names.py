"""Names in paths are decoded once, and gateway names contain no control characters (DE-10)."""

from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from aiohttp import ClientSession
from yarl import URL

from databases import BOTH_STORES
from deadlines import soon
from oncelog.client.deltas import DeltasClient
from oncelog.core.deltas import deltas_scope, find_gateway_fault
from oncelog.errors import CanonicalError, SettingsError
from oncelog.server.auth.principal import parse_grants
from server.deltas.delta_servers import Json, SharedServer, change
from server.running_server import Answer

CONTROLS: Final = ("%00", "%0a", "%0D", "%1f", "%7F", "%c2%80", "%C2%9f")
NOT_UTF8: Final = ("%ff", "%C3", "%ed%a0%80", "%c0%80")
NOT_ENCODED: Final = ("%", "%zz", "a%2", "100%")


class Raw:
    """Sends paths exactly as given."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self.session = session
        self._url = url

    def url(self, path: str) -> URL:
        return URL(self._url + path, encoded=True)

    async def request(self, method: str, path: str, **options: object) -> Answer:
        async with self.session.request(method, self.url(path), **options) as response:  # type: ignore[arg-type]
            return Answer(response, await response.read())


@pytest_asyncio.fixture(loop_scope="session")
async def raw(shared_server: SharedServer) -> AsyncIterator[Raw]:
    """A client of the shared server that does not normalize paths."""
    async with ClientSession() as session:
        yield Raw(session, shared_server.server.served.url)


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Return the status, code and message of an error."""
    error: Json = answer.json
    return answer.status, error["code"], error["error"]


@BOTH_STORES
@pytest.mark.rule("DE-10")
async def test_control_characters_in_a_gateway_name_are_refused(raw: Raw) -> None:
    message = "gateway: must not contain control characters (U+0000 to U+001F, U+007F to U+009F)"
    for name in CONTROLS:
        base = f"/v1/sync/a{name}b"
        for method, path, body in (
            ("POST", "push", {"deltas": [change(1, a=1)]}),
            ("POST", "compact", {"keep": 0}),
            ("GET", "pull", None),
            ("GET", "snapshot", None),
            ("GET", "rows/t", None),
            ("GET", "live", None),
        ):
            answer = await raw.request(method, f"{base}/{path}", json=body)
            assert error_of(answer) == (400, "BAD_REQUEST", message), (name, path)
        async with raw.session.ws_connect(raw.url(f"{base}/live")) as socket:
            await socket.send_json({"type": "connect"})
            frame = await soon(socket.receive_json())
            assert (frame["type"], frame["code"], frame["error"]) == ("error", "BAD_REQUEST", message)


@BOTH_STORES
@pytest.mark.rule("DE-10")
async def test_gateway_name_that_is_not_utf8_is_refused(raw: Raw) -> None:
    for name in NOT_UTF8:
        answer = await raw.request("POST", f"/v1/sync/{name}/push", json={"deltas": [change(1, a=1)]})
        assert error_of(answer) == (400, "BAD_REQUEST", "gateway: must be percent-encoded UTF-8 in the path"), name
    for name in NOT_ENCODED:
        answer = await raw.request("GET", f"/v1/sync/{name}/pull")
        assert error_of(answer) == (400, "BAD_REQUEST", "gateway: must encode % as %25 in the path"), name


@BOTH_STORES
@pytest.mark.rule("DE-10")
async def test_gateway_name_is_decoded_once(raw: Raw, shared_server: SharedServer) -> None:
    """A percent sign has no special meaning after decoding, and an encoded slash is part of the name."""
    name = shared_server.name
    spellings = {f"{name}%ff": "%25ff", f"{name}%25ff": "%2525ff", f"{name}/x": "%2Fx", f"{name}%2Fx": "%252Fx"}
    for place, spelling in enumerate(spellings.values(), 1):
        pushed = {"deltas": [change(place, a=place)]}
        assert (await raw.request("POST", f"/v1/sync/{name}{spelling}/push", json=pushed)).status == 200
    for place, (gateway, spelling) in enumerate(spellings.items(), 1):
        found = (await raw.request("GET", f"/v1/sync/{name}{spelling}/pull")).json["deltas"]
        assert [one["hlc"] for one in found] == [str(place)]
        records = (await shared_server.server.log.read(stream=deltas_scope(gateway))).records
        assert len(records) == 1


@BOTH_STORES
@pytest.mark.rule("DE-10")
async def test_other_names_in_paths_are_decoded_once(raw: Raw) -> None:
    answer = await raw.request("GET", "/v1/sync/shop/rows/%ff")
    assert error_of(answer) == (400, "BAD_REQUEST", "table: must be percent-encoded UTF-8 in the path")
    assert (await raw.request("GET", "/v1/sync/shop/rows/%74")).status == 200
    for path, field in (("%ff", "chat_id"), ("c/members/user:%ff", "user_id"), ("%zz", "chat_id")):
        method = "PUT" if "members" in path else "GET"
        answer = await raw.request(method, f"/v1/chats/{path}")
        assert answer.status == 400, path
        assert answer.json["error"]["message"].startswith(f"{field}: must ")


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize("name", ["", "x" * 81, "a\nb", "\x7f", "a\x9f", ".", "..", "e\u0301", "\ud800", None, b"a"])
def test_clients_refuse_invalid_gateway_names(name: str) -> None:
    assert find_gateway_fault(name) is not None
    with pytest.raises(SettingsError, match="gateway must "):
        DeltasClient("http://127.0.0.1:9", name, path=":memory:", client_id="ann")


@pytest.mark.rule("DE-10")
def test_gateway_grants_have_no_control_characters() -> None:
    for text in ("deltas/a\nb", "deltas/\x85*", "deltas/a\x7f/compact"):
        with pytest.raises(CanonicalError, match="must not contain control characters"):
            parse_grants(write=[text])
        with pytest.raises(CanonicalError, match="must not contain control characters"):
            parse_grants(read=["deltas/a", text])
    assert parse_grants(read=["deltas/a b", "events\n"]).may_read("deltas/a b")
