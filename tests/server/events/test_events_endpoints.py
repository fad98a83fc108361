"""The Events API over HTTP: submitting events and reading pages."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from databases import BOTH_STORES
from oncelog.core.limits import PARTITIONS_MAX
from server.auth.auth_material import token
from server.events.event_requests import PATH, committed_count, post
from server.running_server import Answer, Serving, event_id, item, numbers, serving

# --- submit ------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-4", "EV-5", "EV-8")
async def test_event_commits_once_and_conflicting_content_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = await served.submit(item(1), item(2, "b"))
        assert (first.status, first.content_type) == (200, "application/json")
        results = first.json["results"]
        assert [(one["id"], one["status"]) for one in results] == [
            (event_id(1), "committed"),
            (event_id(2), "committed"),
        ]
        assert numbers(results) == [1, 2]
        again = await served.submit(item(2, "b"), item(1), client_id="another")
        assert again.json["results"] == results[::-1]
        (conflict,) = (await served.submit(item(1, "b"))).json["results"]
        assert (conflict["status"], conflict["reason"]) == ("rejected", "validation_failed")
        assert conflict["errors"][0]["field"]
        assert conflict["errors"][0]["message"]
        assert await committed_count(served) == 2


@BOTH_STORES
@pytest.mark.rule("CO-2", "EV-4")
@pytest.mark.parametrize(
    ("written", "again"),
    [("1e21", "1000000000000000000000"), ("10000000000000000", "1e16"), ("9007199254740992", "9007199254740992.0")],
)
async def test_retry_with_a_different_spelling_of_a_large_number_is_known(
    tmp_path: Path, written: str, again: str
) -> None:
    body = '{"events":[{"id":"%s","partitions":["a"],"event":{"type":"counted","v":%s}}]}'
    async with serving(tmp_path) as served:
        first = await post(served, (body % (event_id(1), written)).encode())
        assert numbers(first.json["results"]) == [1]
        assert (await post(served, (body % (event_id(1), again)).encode())).body == first.body
        assert await committed_count(served) == 1


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-3", "EV-4")
async def test_committed_ids_and_results_survive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = await served.submit(item(1))
    async with serving(tmp_path) as served:
        assert (await served.submit(item(1))).body == first.body
        assert await served.commit(item(2)) == [2]


@BOTH_STORES
@pytest.mark.rule("EV-9")
async def test_event_id_is_echoed_as_sent_and_compared_case_insensitively(tmp_path: Path) -> None:
    small = str(UUID(int=0xABCDEF << 100))
    async with serving(tmp_path) as served:
        for text in (small.upper(), small):
            (result,) = (await served.submit({**item(1), "id": text})).json["results"]
            assert (result["id"], result["committed_id"]) == (text, 1)
        both = await served.submit({**item(1), "id": small}, {**item(1), "id": small.upper()})
        assert both.refusal == (400, "bad_request")


@BOTH_STORES
@pytest.mark.rule("EV-7")
async def test_repeated_id_refuses_the_whole_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answer = await served.submit(item(1), item(2), item(1))
        assert answer.refusal == (400, "bad_request")
        assert answer.error["details"] == {"field": "$.events[2].id"}
        assert await committed_count(served) == 0


@BOTH_STORES
@pytest.mark.rule("EV-8", "EV-9", "CO-33")
async def test_invalid_events_are_rejected_and_valid_ones_committed(tmp_path: Path) -> None:
    bad: Sequence[dict[str, Any]] = (
        {**item(2), "event": {}},
        {**item(3), "event": {"type": ""}},
        {**item(4), "event": ["no object"]},
        {**item(5), "partitions": []},
        {**item(6), "partitions": ["a", 1]},
        {**item(7), "partitions": ["x" * 257]},
        {**item(8), "partitions": [str(number) for number in range(PARTITIONS_MAX + 1)]},
        {**item(9), "event": {"type": "counted", "number": 2**53 + 1}},
    )
    async with serving(tmp_path) as served:
        results = (await served.submit(item(1), *bad, item(10))).json["results"]
        assert [one["status"] for one in results] == ["committed", *["rejected"] * len(bad), "committed"]
        for one in results[1:-1]:
            assert one["reason"] == "validation_failed"
            assert one["errors"][0]["field"].split(".")[0].split("[")[0] in ("event", "partitions")
        assert numbers([results[0], results[-1]]) == [1, 2]


@BOTH_STORES
@pytest.mark.rule("CO-19", "CO-18")
async def test_stale_expected_id_is_rejected_with_the_current_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = item(1, expected_committed_id=0)
        assert await served.commit(first) == [1]
        (stale,) = (await served.submit(item(2, expected_committed_id=0))).json["results"]
        assert stale["status"] == "rejected"
        assert stale["errors"][0]["field"] == "expected_committed_id"
        assert stale["errors"][0]["current_committed_id"] == 1
        assert await served.commit(item(3, expected_committed_id=1), first) == [2, 1]


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "$"),
        (b"{", "$"),
        (b"[]", "$"),
        (b"null", "$"),
        (b"{}", "$.events"),
        (b'{"events":{}}', "$.events"),
        (b'{"events":[]}', "$.events"),
        (b'{"events":[7]}', "$.events[0]"),
        (b'{"events":[{}]}', "$.events[0].id"),
        (b'{"events":[{"id":"x","partitions":[],"event":{}}]}', "$.events[0].id"),
        (b'{"events":[{"id":"\xff","partitions":[],"event":{}}]}', "$"),
        (b'{"events":[],"events":[]}', "$"),
        (b'{"client_id":"","events":[]}', "$.client_id"),
        (b'{"client_id":7,"events":[]}', "$.client_id"),
        (b"[" * 100_000, "$"),
        (b'\xef\xbb\xbf{"events":[]}', "$"),
        ('{"events":[]}'.encode("utf-16"), "$"),
    ],
)
async def test_malformed_request_is_refused_with_its_field_and_commits_nothing(
    shared_server: Serving, body: bytes, field: str
) -> None:
    answer = await post(shared_server, body)
    assert answer.refusal == (400, "bad_request")
    assert answer.error["details"]["field"].startswith(field)
    assert await committed_count(shared_server) == 0


@BOTH_STORES
@pytest.mark.rule("CO-30")
async def test_request_above_the_event_or_byte_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, request_events_max=2, frame_bytes_max=2000) as served:
        assert await served.commit(item(1), item(2)) == [1, 2]
        many = await served.submit(item(3), item(4), item(5))
        assert many.refusal == (400, "bad_request")
        assert "1 to 2 events" in many.error["message"]
        large = json.dumps({"events": [item(6)]}).encode()
        for body in (large.ljust(2001), gzip.compress(large.ljust(100_000))):
            named = {"Content-Encoding": "gzip"} if body[:1] != b"{" else {}
            answer = await post(served, body, **named)
            assert answer.refusal == (413, "bad_request")
            assert answer.error["details"] == {"field": "body", "limit": 2000}
        assert (await post(served, large.ljust(2000))).status == 200
        assert await committed_count(served) == 3


@pytest.mark.rule("CO-24", "CO-33")
async def test_body_requires_the_json_content_type(tmp_path: Path) -> None:
    body = json.dumps({"events": [item(1)]}).encode()
    async with serving(tmp_path) as served:
        # Web pages of other origins can send these types without a preflight request.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            answer = await served.request("POST", PATH, data=body, headers={"Content-Type": kind})
            assert answer.refusal == (415, "bad_request")
            assert answer.error["details"] == {"field": "Content-Type"}
        assert await committed_count(served) == 0
        answer = await served.request(
            "POST", PATH, data=body, headers={"Content-Type": "Application/JSON; charset=utf-8"}
        )
        assert answer.status == 200


@pytest.mark.rule("CO-33")
async def test_compressed_body_is_accepted_and_a_corrupt_one_refused(tmp_path: Path) -> None:
    body = json.dumps({"events": [item(1)]}).encode()
    async with serving(tmp_path) as served:
        bad = await post(served, body, **{"Content-Encoding": "gzip"})
        assert bad.refusal == (400, "bad_request")
        assert bad.error["details"] == {"field": "body"}
        for one in (gzip.compress(body)[:-1], gzip.compress(body) + b"x", zlib.compress(body)):
            assert (await post(served, one, **{"Content-Encoding": "gzip"})).refusal == (400, "bad_request")
        other = await post(served, body, **{"Content-Encoding": "br"})
        assert other.refusal == (415, "bad_request")
        assert other.error["details"] == {"field": "Content-Encoding"}
        bare = zlib.compress(body, wbits=-zlib.MAX_WBITS)
        for encoding, one in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("Deflate", bare)):
            assert (await post(served, one, **{"Content-Encoding": encoding})).status == 200


@pytest.mark.rule("CO-30", "CO-33")
@pytest.mark.parametrize("is_known", [False, True])
async def test_compressed_body_is_inflated_up_to_the_limit_and_only_after_authentication(
    tmp_path: Path, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes can expand to any size and would keep the server busy."""
    decompressobj, unpacked = zlib.decompressobj, 0

    class CountingDecompressor:
        """Wraps the `zlib` decompressor, which aiohttp uses too."""

        def __init__(self, *given: Any, **named: Any) -> None:
            self._decompressor = decompressobj(*given, **named)

        def decompress(self, *given: Any, **named: Any) -> bytes:
            nonlocal unpacked
            found = self._decompressor.decompress(*given, **named)
            unpacked += len(found)
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decompressor, name)

    async with serving(tmp_path, tokens=True, frame_bytes_max=2000) as served:
        monkeypatch.setattr(zlib, "decompressobj", CountingDecompressor)
        credential = {"Authorization": f"Bearer {token()}"} if is_known else {}
        packed = gzip.compress(bytes(1_000_000))
        answer = await post(served, packed, **{"Content-Encoding": "gzip", **credential})
        assert answer.refusal == ((413, "bad_request") if is_known else (401, "auth_failed"))
        assert unpacked == (2001 if is_known else 0)


async def test_unknown_paths_and_methods_get_errors_of_the_same_shape(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for path in ("/v1", "/v1/events/", "/v1/event", "/favicon.ico"):
            assert (await served.get(path)).refusal == (404, "unknown_path")
        for method in ("PUT", "DELETE", "PATCH"):
            answer = await served.request(method, PATH)
            assert answer.refusal == (405, "method_not_allowed")
            assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD", "POST"}
        head = await served.request("HEAD", f"{PATH}?partition=a")
        assert (head.status, head.body) == (200, b"")


async def test_unknown_members_of_a_request_are_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        (one,) = (await served.submit({**item(1), "actor": "system:me", "client_id": "x"}, client_id="c")).json[
            "results"
        ]
        assert one["status"] == "committed"
        (event,) = (await served.page("a")).json["events"]
        assert event["client_id"] == "c"
        record = (await served.server.log.read()).records[0]
        assert record.actor == "user:developer"


# --- pages -------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-11")
async def test_page_has_each_event_of_all_partitions_once_in_ascending_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1), item(2, "b"), item(3, "a", "b"), item(4, "c"), item(5, "größe"))
        page = (await served.page("a", "b", "a")).json
        assert numbers(page["events"]) == [1, 2, 3]
        assert page["partitions"] == ["a", "b"]
        assert page["events"][2] == {
            "id": event_id(3),
            "client_id": "developer",
            "actor": "user:developer",
            "partitions": ["a", "b"],
            "committed_id": 3,
            "event": {"type": "counted", "number": 3},
            "status_updated_at": page["events"][2]["status_updated_at"],
        }
        assert (page["has_more"], page["next_since_committed_id"], page["sync_to_committed_id"]) == (False, 5, 5)
        assert page["epoch"] == served.server.log.epoch
        assert numbers((await served.page("a", "b", since=1)).json["events"]) == [2, 3]
        assert numbers((await served.page("gro\u0308ße")).json["events"]) == [5]
        assert (await served.page("a")).headers["Cache-Control"] == "no-store"


@BOTH_STORES
@pytest.mark.rule("EV-11", "CO-30")
async def test_page_size_limit_is_clamped(tmp_path: Path) -> None:
    async with serving(tmp_path, page_events_max=4, page_events_default=3) as served:
        await served.commit(*(item(number) for number in range(1, 7)))
        for limit, expected in ((0, 1), (1, 1), (4, 4), (5, 4), (100_000, 4), (2**53 - 1, 4)):
            page = (await served.page("a", limit=limit)).json
            assert len(page["events"]) == expected
            assert page["has_more"]
        assert len((await served.page("a")).json["events"]) == 3


@BOTH_STORES
@pytest.mark.rule("EV-12")
async def test_paging_stops_at_the_bound_of_the_first_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(*(item(number) for number in range(1, 8)))
        page = (await served.page("a", limit=3)).json
        bound, found, following = page["sync_to_committed_id"], page["events"], 100
        assert bound == 7
        while page["has_more"]:
            # New events arrive faster than the reader reads pages.
            await served.commit(*(item(following + number) for number in range(5)))
            following += 5
            page = (await served.page("a", limit=3, since=page["next_since_committed_id"], to=bound)).json
            assert page["sync_to_committed_id"] == bound
            found += page["events"]
        assert numbers(found) == list(range(1, 8))
        assert page["next_since_committed_id"] == bound
        rest = (await served.page("a", since=bound)).json
        assert numbers(rest["events"]) == list(range(8, 8 + following - 100))


@BOTH_STORES
@pytest.mark.rule("EV-12")
async def test_cursor_advances_without_matches_and_not_beyond_the_log(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        empty = (await served.page("a")).json
        assert (empty["next_since_committed_id"], empty["has_more"]) == (0, False)
        await served.commit(*(item(number, "b") for number in range(1, 5)))
        page = (await served.page("a")).json
        assert (page["events"], page["next_since_committed_id"], page["has_more"]) == ([], 4, False)
        # A bound ahead of the log must not make the reader skip later events.
        ahead = (await served.page("a", to=1000)).json
        assert (ahead["next_since_committed_id"], ahead["sync_to_committed_id"]) == (4, 4)
        behind = (await served.page("a", since=3, to=1)).json
        assert (behind["events"], behind["next_since_committed_id"]) == ([], 3)


@BOTH_STORES
@pytest.mark.rule("CO-40")
async def test_cursor_of_another_history_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1))
        known = {"epoch": served.server.log.epoch, "server_last_committed_id": 1}
        for query in ({"epoch": "another"}, {"epoch": ""}, {"since": 2}, {"since": 2, "to": 5}):
            answer = await served.page("a", **query)
            assert answer.refusal == (409, "history_changed")
            assert answer.error["details"] == known
        assert (await served.page("a", since=1, epoch=known["epoch"])).status == 200


@pytest.mark.rule("EV-9")
async def test_duplicates_of_a_partition_count_once(shared_server: Serving) -> None:
    copies = ["caf%C3%A9", "cafe%CC%81"] * PARTITIONS_MAX
    query = "&".join(f"partition={name}" for name in copies)
    async with shared_server.session.get(f"{shared_server.url}{PATH}?{query}") as response:
        assert (response.status, (await response.json())["partitions"]) == (200, ["caf\u00e9"])


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "partition"),
        ("partition=", "partition"),
        (f"partition={'x' * 257}", "partition"),
        ("partition=%00", "partition"),
        ("partition=%FF", "query"),
        ("&".join(f"partition={number}" for number in range(PARTITIONS_MAX + 1)), "partition"),
        ("&".join(["partition=a"] * 1001), "query"),
        ("partition=a&since=", "since"),
        ("partition=a&since=-1", "since"),
        ("partition=a&since=1.0", "since"),
        ("partition=a&since=%D9%A1", "since"),
        ("partition=a&since=9007199254740992", "since"),
        ("partition=a&since=1&since=1", "since"),
        ("partition=a&since=%2B1", "since"),
        ("partition=a&limit=many", "limit"),
        ("partition=a&to=x", "to"),
        ("partition=a&partitions=b", "partitions"),
    ],
)
async def test_malformed_query_is_refused_with_its_field(shared_server: Serving, query: str, field: str) -> None:
    async with shared_server.session.get(f"{shared_server.url}{PATH}?{query}") as response:
        answer = Answer(response, await response.read())
    assert answer.refusal == (400, "bad_request")
    assert answer.error["details"]["field"].startswith(field)
