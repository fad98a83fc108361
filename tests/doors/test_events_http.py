"""The events door over HTTP: submit, and read pages. Real sockets, a real file."""

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from databases import BOTH_STORES
from doors import material
from doors.material import token
from doors.serving import WAIT_S, Answer, Serving, ShiftedClock, api_key, event_id, item, numbers, run, serving, soon
from oncelog.core.limits import PARTITIONS_MAX
from oncelog.errors import StoreUnavailableError
from oncelog.stores.moving import move
from oncelog.testing.clock import ManualClock

PATH: Final = "/v1/events"
JSON: Final = {"Content-Type": "application/json"}


async def posted(served: Serving, body: bytes, **headers: str) -> Answer:
    return await served.request("POST", PATH, data=body, headers={**JSON, **headers})


async def written(served: Serving) -> int:
    """How many events there are in all."""
    ready = (await served.get("/readyz")).json
    count: int = ready["last_committed_id"]
    return count


# --- submit ----------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-4", "EV-5", "EV-8")
def test_an_event_is_committed_once_and_a_conflict_is_told(tmp_path: Path) -> None:
    async def main() -> None:
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
            assert await written(served) == 2

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-3", "EV-4")
def test_numbers_and_answers_survive_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            first = await served.submit(item(1))
        async with serving(tmp_path) as served:
            assert (await served.submit(item(1))).body == first.body
            assert await served.commit(item(2)) == [2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-9")
def test_an_id_is_echoed_as_it_was_sent_and_its_case_does_not_matter(tmp_path: Path) -> None:
    small = str(UUID(int=0xABCDEF << 100))

    async def main() -> None:
        async with serving(tmp_path) as served:
            for text in (small.upper(), small):
                (result,) = (await served.submit({**item(1), "id": text})).json["results"]
                assert (result["id"], result["committed_id"]) == (text, 1)
            both = await served.submit({**item(1), "id": small}, {**item(1), "id": small.upper()})
            assert both.refusal == (400, "bad_request")

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-7")
def test_an_id_twice_in_a_request_refuses_all_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            answer = await served.submit(item(1), item(2), item(1))
            assert answer.refusal == (400, "bad_request")
            assert answer.error["details"] == {"field": "$.events[2].id"}
            assert await written(served) == 0

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-8", "EV-9", "CO-33")
def test_a_bad_event_does_not_stop_the_good_ones(tmp_path: Path) -> None:
    bad: Sequence[dict[str, Any]] = (
        {**item(2), "event": {}},
        {**item(3), "event": {"type": ""}},
        {**item(4), "event": ["no object"]},
        {**item(5), "partitions": []},
        {**item(6), "partitions": ["a", 1]},
        {**item(7), "partitions": ["x" * 257]},
        {**item(8), "partitions": [str(number) for number in range(PARTITIONS_MAX + 1)]},
        {**item(9), "event": {"type": "counted", "number": 2**53}},
    )

    async def main() -> None:
        async with serving(tmp_path) as served:
            results = (await served.submit(item(1), *bad, item(10))).json["results"]
            assert [one["status"] for one in results] == ["committed", *["rejected"] * len(bad), "committed"]
            for one in results[1:-1]:
                assert one["reason"] == "validation_failed"
                assert one["errors"][0]["field"].split(".")[0].split("[")[0] in ("event", "partitions")
            assert numbers([results[0], results[-1]]) == [1, 2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-19", "CO-18")
def test_an_expected_number_that_is_stale_is_refused_with_the_current_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            first = item(1, expected_committed_id=0)
            assert await served.commit(first) == [1]
            (stale,) = (await served.submit(item(2, expected_committed_id=0))).json["results"]
            assert stale["status"] == "rejected"
            assert stale["errors"][0]["field"] == "expected_committed_id"
            assert stale["errors"][0]["current_committed_id"] == 1
            assert await served.commit(item(3, expected_committed_id=1), first) == [2, 1]

    run(main())


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
def test_what_is_no_request_is_told_where_and_nothing_is_written(tmp_path: Path, body: bytes, field: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            answer = await posted(served, body)
            assert answer.refusal == (400, "bad_request")
            assert answer.error["details"]["field"].startswith(field)
            assert await written(served) == 0

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-30")
def test_a_request_may_have_so_many_events_and_so_many_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, request_events_max=2, frame_bytes_max=2000) as served:
            assert await served.commit(item(1), item(2)) == [1, 2]
            many = await served.submit(item(3), item(4), item(5))
            assert many.refusal == (400, "bad_request")
            assert "1 to 2 events" in many.error["message"]
            large = json.dumps({"events": [item(6)]}).encode()
            for body in (large.ljust(2001), gzip.compress(large.ljust(100_000))):
                named = {"Content-Encoding": "gzip"} if body[:1] != b"{" else {}
                answer = await posted(served, body, **named)
                assert answer.refusal == (413, "bad_request")
                assert answer.error["details"] == {"field": "body", "limit": 2000}
            assert (await posted(served, large.ljust(2000))).status == 200
            assert await written(served) == 3

    run(main())


@pytest.mark.rule("CO-24", "CO-33")
def test_a_body_must_be_said_to_be_json(tmp_path: Path) -> None:
    body = json.dumps({"events": [item(1)]}).encode()

    async def main() -> None:
        async with serving(tmp_path) as served:
            # A page of another origin can send these without asking its browser.
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
                answer = await served.request("POST", PATH, data=body, headers={"Content-Type": kind})
                assert answer.refusal == (415, "bad_request")
                assert answer.error["details"] == {"field": "Content-Type"}
            assert await written(served) == 0
            answer = await served.request(
                "POST", PATH, data=body, headers={"Content-Type": "Application/JSON; charset=utf-8"}
            )
            assert answer.status == 200

    run(main())


@pytest.mark.rule("CO-33")
def test_a_body_may_be_compressed_but_not_claim_to_be(tmp_path: Path) -> None:
    body = json.dumps({"events": [item(1)]}).encode()

    async def main() -> None:
        async with serving(tmp_path) as served:
            bad = await posted(served, body, **{"Content-Encoding": "gzip"})
            assert bad.refusal == (400, "bad_request")
            assert bad.error["details"] == {"field": "body"}
            for one in (gzip.compress(body)[:-1], gzip.compress(body) + b"x", zlib.compress(body)):
                assert (await posted(served, one, **{"Content-Encoding": "gzip"})).refusal == (400, "bad_request")
            other = await posted(served, body, **{"Content-Encoding": "br"})
            assert other.refusal == (415, "bad_request")
            assert other.error["details"] == {"field": "Content-Encoding"}
            bare = zlib.compress(body, wbits=-zlib.MAX_WBITS)
            for encoding, one in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("Deflate", bare)):
                assert (await posted(served, one, **{"Content-Encoding": encoding})).status == 200

    run(main())


@pytest.mark.rule("CO-30", "CO-33")
@pytest.mark.parametrize("is_known", [False, True])
def test_what_was_packed_is_unpacked_as_far_as_its_limit_and_only_for_whom_we_know(
    tmp_path: Path, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes can be made to become any number: who unpacks them has no time for others."""
    made, unpacked = zlib.decompressobj, 0

    class Counted:
        """As `zlib` has it, of which aiohttp makes its own too."""

        def __init__(self, *given: Any, **named: Any) -> None:
            self._unpacking = made(*given, **named)

        def decompress(self, *given: Any, **named: Any) -> bytes:
            nonlocal unpacked
            found = self._unpacking.decompress(*given, **named)
            unpacked += len(found)
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._unpacking, name)

    async def main() -> None:
        async with serving(tmp_path, tokens=True, frame_bytes_max=2000) as served:
            monkeypatch.setattr(zlib, "decompressobj", Counted)
            credential = {"Authorization": f"Bearer {token()}"} if is_known else {}
            packed = gzip.compress(bytes(1_000_000))
            answer = await posted(served, packed, **{"Content-Encoding": "gzip", **credential})
            assert answer.refusal == ((413, "bad_request") if is_known else (401, "auth_failed"))
            assert unpacked == (2001 if is_known else 0)

    run(main())


def test_unknown_paths_and_methods_get_errors_of_the_same_form(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            for path in ("/v1", "/v1/events/", "/v1/event", "/favicon.ico"):
                assert (await served.get(path)).refusal == (404, "bad_request")
            for method in ("PUT", "DELETE", "PATCH"):
                answer = await served.request(method, PATH)
                assert answer.refusal == (405, "bad_request")
                assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD", "POST"}
            head = await served.request("HEAD", f"{PATH}?partition=a")
            assert (head.status, head.body) == (200, b"")

    run(main())


def test_what_is_unknown_in_a_request_is_ignored(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            (one,) = (await served.submit({**item(1), "actor": "system:me", "client_id": "x"}, client_id="c")).json[
                "results"
            ]
            assert one["status"] == "committed"
            (event,) = (await served.page("a")).json["events"]
            assert event["client_id"] == "c"
            record = (await served.server.log.read()).records[0]
            assert record.actor == "user:developer"

    run(main())


# --- pages -----------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-11")
def test_a_page_has_what_touches_any_partition_ascending_each_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.commit(item(1), item(2, "b"), item(3, "a", "b"), item(4, "c"), item(5, "größe"))
            page = (await served.page("a", "b", "a")).json
            assert numbers(page["events"]) == [1, 2, 3]
            assert page["partitions"] == ["a", "b"]
            assert page["events"][2] == {
                "id": event_id(3),
                "client_id": "developer",
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

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-11", "CO-30")
def test_the_size_of_a_page_is_clamped(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, page_events_max=4, page_events_default=3) as served:
            await served.commit(*(item(number) for number in range(1, 7)))
            for limit, expected in ((0, 1), (1, 1), (4, 4), (5, 4), (100_000, 4), (2**53 - 1, 4)):
                page = (await served.page("a", limit=limit)).json
                assert len(page["events"]) == expected
                assert page["has_more"]
            assert len((await served.page("a")).json["events"]) == 3

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-12")
def test_paging_ends_at_the_bound_that_was_taken_at_its_first_page(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.commit(*(item(number) for number in range(1, 8)))
            page = (await served.page("a", limit=3)).json
            bound, found, following = page["sync_to_committed_id"], page["events"], 100
            assert bound == 7
            while page["has_more"]:
                await served.commit(*(item(following + number) for number in range(5)))  # faster than it is read
                following += 5
                page = (await served.page("a", limit=3, since=page["next_since_committed_id"], to=bound)).json
                assert page["sync_to_committed_id"] == bound
                found += page["events"]
            assert numbers(found) == list(range(1, 8))
            assert page["next_since_committed_id"] == bound
            rest = (await served.page("a", since=bound)).json
            assert numbers(rest["events"]) == list(range(8, 8 + following - 100))

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-12")
def test_a_cursor_moves_though_nothing_matched_and_never_beyond_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            empty = (await served.page("a")).json
            assert (empty["next_since_committed_id"], empty["has_more"]) == (0, False)
            await served.commit(*(item(number, "b") for number in range(1, 5)))
            page = (await served.page("a")).json
            assert (page["events"], page["next_since_committed_id"], page["has_more"]) == ([], 4, False)
            # A bound that has not come yet must not make the reader miss what does.
            ahead = (await served.page("a", to=1000)).json
            assert (ahead["next_since_committed_id"], ahead["sync_to_committed_id"]) == (4, 4)
            behind = (await served.page("a", since=3, to=1)).json
            assert (behind["events"], behind["next_since_committed_id"]) == ([], 3)

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-40")
def test_a_cursor_of_another_history_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.commit(item(1))
            known = {"epoch": served.server.log.epoch, "server_last_committed_id": 1}
            for query in ({"epoch": "another"}, {"epoch": ""}, {"since": 2}, {"since": 2, "to": 5}):
                answer = await served.page("a", **query)
                assert answer.refusal == (409, "history_changed")
                assert answer.error["details"] == known
            assert (await served.page("a", since=1, epoch=known["epoch"])).status == 200

    run(main())


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
def test_a_query_that_is_none_is_told_where(tmp_path: Path, query: str, field: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            async with served.session.get(f"{served.url}{PATH}?{query}") as response:
                answer = Answer(response, await response.read())
            assert answer.refusal == (400, "bad_request")
            assert answer.error["details"]["field"].startswith(field)

    run(main())


# --- who -------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-21")
def test_whatever_is_wrong_with_a_credential_the_answer_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True, api_keys=True) as served:
            key = api_key(served, "billing", ["a"])
            good = token()
            credentials = ["x", token(exp=1), token(key=material.key_of("HS256", 1)), good[:-4] + "AAAA", "olk_x_y"]
            headers = [{"Authorization": f"Bearer {one}"} for one in credentials]
            headers += [{}, {"Authorization": f"Basic {good}"}, {"Authorization": good}, {"Authorization": "Bearer"}]
            requests = [("GET", f"{PATH}?partition=orders/1"), ("POST", PATH), ("GET", f"{PATH}/stream?partition=a")]
            answers = [await served.request(method, path, headers=one) for method, path in requests for one in headers]
            assert {(one.status, one.body, one.headers["WWW-Authenticate"]) for one in answers} == {
                (401, answers[0].body, "Bearer")
            }
            assert answers[0].error == {"code": "auth_failed", "message": "authentication failed", "details": {}}
            assert (await served.page("orders/1", headers={"Authorization": f"bearer  {good}"})).status == 200
            assert (await served.page("a", credential=key.text)).status == 200
            assert served.server.counts.auth_failures == len(answers)

    run(main())


@pytest.mark.rule("CO-21")
def test_a_token_as_long_as_we_allow_comes_through(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True) as served:
            long = token(grants={"read": [f"orders/{number:040}" for number in range(200)], "write": []})
            assert 12_000 < len(long) < 16_384
            assert (await served.page(f"orders/{7:040}", credential=long)).status == 200

    run(main())


@pytest.mark.rule("CO-20", "CO-22", "EV-1")
def test_a_token_of_another_client_is_as_wrong_as_a_wrong_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True) as served:
            served.credential = token(client_id="laptop")
            answer = await served.submit(item(1, "orders/1"), client_id="phone")
            bad = await served.submit(item(1, "orders/1"), credential="bad")
            assert answer.refusal == (401, "auth_failed")
            assert answer.body == bad.body
            assert (await served.submit(item(1, "orders/1"), client_id="laptop")).status == 200
            assert (await served.submit(item(2, "orders/1"))).status == 200
            assert (await served.submit(item(3, "orders/1"), credential=token())).status == 200
            events = (await served.page("orders/1")).json["events"]
            assert [event["client_id"] for event in events] == ["laptop", "laptop", "ada"]
            records = (await served.server.log.read()).records
            assert {record.actor for record in records} == {"user:ada"}

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-22", "EV-10")
def test_who_may_not_write_learns_nothing_of_what_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True) as served:
            owner = token(grants={"read": ["*"], "write": ["*"]})
            await served.submit(item(1, "secret"), credential=owner)
            served.credential = token()  # may read orders/*, and write orders/1
            told = set()
            for number, partitions in ((1, ["secret"]), (2, ["secret"]), (1, ["nothing"]), (1, ["orders/1", "secret"])):
                one = {**item(number), "partitions": partitions}
                results = (await served.submit(one, item(100 + number, "orders/1"))).json["results"]
                assert results[1]["status"] == "committed"
                told.add(json.dumps({**results[0], "id": ""}))
            (only,) = told
            assert json.loads(only) == {
                "id": "",
                "status": "rejected",
                "reason": "forbidden",
                "errors": [{"field": "partitions", "message": "not all of them may be written"}],
            }
            bodies = {(await served.submit(item(number, "secret"))).body.replace(b"2", b"1") for number in (1, 2)}
            assert len(bodies) == 1
            # Also one whose right was taken away, for what they have written themselves.
            await served.submit(item(5, "orders/1"))
            less = token(grants={"read": [], "write": []})
            (late,) = (await served.submit(item(5, "orders/1"), credential=less)).json["results"]
            assert late["reason"] == "forbidden"

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-11", "CO-22")
def test_what_may_not_be_read_is_refused_alike_whether_it_is_there_or_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True) as served:
            await served.submit(item(1, "secret"), credential=token(grants={"write": ["*"]}))
            served.credential = token()
            asked: list[tuple[str, ...]] = [("secret",), ("nothing",), ("orders/1", "secret"), ("orders/1", "nothing")]
            answers = [await served.page(*one) for one in asked]
            answers += [await served.page("secret", since=1000, epoch="x"), await served.page("nothing", since=1000)]
            assert {one.body for one in answers} == {answers[0].body}
            assert answers[0].refusal == (403, "forbidden")
            assert (await served.page("orders/2")).status == 200

    run(main())


@pytest.mark.rule("CO-21", "CO-30")
def test_who_guesses_does_not_get_many_tries(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=True, auth_failures_per_minute_max=3) as served:
            for _ in range(3):
                assert (await served.page("orders/1")).refusal == (401, "auth_failed")
            for credential in (None, token()):  # a good one too: which of them is good must not be found out
                answer = await served.page("orders/1", credential=credential)
                assert answer.refusal == (429, "rate_limited")
                assert answer.error["details"] == {"retry_after_ms": 20_000}
                assert answer.headers["Retry-After"] == "20"
            assert isinstance(served.clock, ManualClock)
            served.clock.advance(20_000)
            assert (await served.page("orders/1", credential=token())).status == 200

    run(main())


@pytest.mark.rule("CO-21")
@pytest.mark.parametrize("is_trusted", [True, False])
def test_an_address_is_believed_from_trusted_proxies_only(tmp_path: Path, is_trusted: bool) -> None:
    async def main() -> None:
        proxies = ("127.0.0.0/8",) if is_trusted else ("10.0.0.0/8",)
        async with serving(tmp_path, tokens=True, trusted_proxies=proxies, auth_failures_per_minute_max=2) as served:
            statuses = [
                (await served.page("a", headers={"X-Forwarded-For": f"1.2.3.4, 192.0.2.{number}"})).status
                for number in (1, 1, 1, 2)
            ]
            assert statuses == ([401, 401, 429, 401] if is_trusted else [401, 401, 429, 429])

    run(main())


# --- browsers --------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-24")
def test_pages_of_other_origins_are_refused_unless_configured(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, origins=("https://app.example.org",)) as served:
            paths = ("/", "/metrics", f"{PATH}?partition=a", f"{PATH}/stream?partition=a", "/nowhere")
            for origin in (
                "https://evil.example",
                "null",
                "",
                "https://app.example.org.evil",
                "http://app.example.org",
            ):
                for path in paths:
                    answer = await served.get(path, headers={"Origin": origin})
                    assert answer.refusal == (403, "forbidden")
                    assert answer.error["details"] == {"field": "Origin"}
                assert (await served.submit(item(1), headers={"Origin": origin})).refusal == (403, "forbidden")
            for origin in ("https://app.example.org", "HTTPS://APP.example.org:443", served.url):
                assert (await served.page("a", headers={"Origin": origin})).status == 200
            assert await written(served) == 0

    run(main())


@pytest.mark.rule("CO-24")
def test_a_trusted_proxy_says_by_which_scheme_it_was_called(tmp_path: Path) -> None:
    async def main(proxies: tuple[str, ...]) -> int:
        async with serving(tmp_path, trusted_proxies=proxies) as served:
            origin = served.url.replace("http:", "https:")
            return (await served.page("a", headers={"Origin": origin, "X-Forwarded-Proto": "https"})).status

    assert run(main(("127.0.0.1",))) == 200
    assert run(main(())) == 403


@pytest.mark.rule("CO-21", "CO-24")
def test_in_development_mode_the_name_must_be_of_this_machine(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            for host in ("evil.example", "evil.example:7171", "127.0.0.1.evil.example", ""):
                answer = await served.page("a", headers={"Host": host})
                assert answer.refusal == (403, "forbidden")
                assert answer.error["details"] == {"field": "Host"}
            for host in ("localhost", "LOCALHOST:1", "app.localhost", "127.9.9.9:80", "[::1]:7171"):
                assert (await served.page("a", headers={"Host": host})).status == 200
        async with serving(tmp_path, tokens=True) as served:
            answer = await served.page("orders/1", credential=token(), headers={"Host": "log.example.org"})
            assert answer.status == 200

    run(main())


# --- busy ------------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("CO-32", "CO-15")
def test_when_the_queue_is_full_new_events_are_told_to_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path, queue_items_max=2) as served:
            first = await served.submit(item(1))
            gate = served.hold_commits(monkeypatch)
            waiting = [asyncio.ensure_future(served.submit(item(2)))]
            await soon(gate.reached.wait())
            waiting += [asyncio.ensure_future(served.submit(item(number))) for number in range(3, 10)]
            done, held = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            busy = done.pop().result()
            assert busy.refusal == (503, "server_busy")
            assert busy.error["details"]["retry_after_ms"] > 0
            assert int(busy.headers["Retry-After"]) >= 1
            # What is known is answered all the same, and pages are read.
            assert (await served.submit(item(1))).body == first.body
            assert (await served.page("a")).status == 200
            gate.open()
            assert 200 in {(await soon(one)).status for one in held}
            assert (await served.submit(item(5))).status == 200

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-15")
def test_new_events_of_an_actor_have_a_rate_and_retries_have_none(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as served:
            first = await served.submit(item(1), item(2))
            late = await served.submit(item(3))
            assert late.refusal == (429, "rate_limited")
            assert late.headers["Retry-After"] == "1"
            assert (await served.submit(item(1), item(2))).body == first.body
            clock.advance(late.error["details"]["retry_after_ms"])
            assert (await served.submit(item(3))).status == 200

    run(main())


@pytest.mark.rule("EV-16")
def test_a_page_has_what_another_server_has_acknowledged(tmp_path: Path) -> None:
    """Though the one that is asked has not heard of it: nobody wakes it, and it does not look by itself for an hour."""

    async def main() -> None:
        async with serving(tmp_path, poll_ms=3_600_000) as one, serving(tmp_path, poll_ms=3_600_000) as two:
            assert await one.commit(item(1), item(2)) == [1, 2]
            assert two.server.hub.position == 0
            assert [event["committed_id"] for event in (await two.page("a")).json["events"]] == [1, 2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-15")
def test_the_rate_holds_over_all_servers_of_a_log_and_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as one:
            assert (await one.submit(item(1))).status == 200
            async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as two:
                assert await two.commit(item(2)) == [2]
                assert (await one.submit(item(3))).refusal == (429, "rate_limited")
                assert (await two.submit(item(1), item(2), item(3))).refusal == (429, "rate_limited")
                assert await one.commit(item(2)) == [2]
        async with serving(tmp_path, clock=clock, new_events_per_second_max=2) as again:
            late = await again.submit(item(3))
            assert (late.refusal, late.error["details"]) == ((429, "rate_limited"), {"retry_after_ms": 500})
            clock.advance(500)
            assert await again.commit(item(3)) == [3]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-30")
def test_what_is_taken_of_a_request_beyond_the_rate_is_counted_and_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, clock=ManualClock(), new_events_per_second_max=2) as served:
            assert (await served.submit(item(1), item(2), item(3))).refusal == (429, "rate_limited")
            assert served.server.counts.events_committed == 2
            assert await served.commit(item(1), item(2)) == [1, 2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-17", "CO-16")
def test_while_the_clock_is_in_doubt_there_are_no_new_events(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ShiftedClock()
        async with serving(tmp_path, clock=clock) as served:
            first = await served.submit(item(1))
            clock.ahead_ms = 3_600_000
            answer = await served.submit(item(2))
            assert answer.refusal == (503, "server_busy")
            assert "clock" in answer.error["message"]
            assert (await served.submit(item(1))).body == first.body

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-16")
def test_what_the_store_could_not_do_is_neither_success_nor_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            store: Any = served.server.log._store

            async def broken(*_: object, **__: object) -> None:
                raise RuntimeError("of the store, not to be told")

            with monkeypatch.context() as patched:
                patched.setattr(store, "commit", broken)
                answer = await served.submit(item(1))
            assert answer.refusal == (500, "server_error")
            assert b"of the store" not in answer.body
            assert await served.commit(item(1)) == [1]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-16")
def test_a_page_that_cannot_be_read_is_to_be_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no outcome that could be in doubt, and no id to send it under."""

    async def main() -> None:
        async with serving(tmp_path) as served:
            assert await served.commit(item(1)) == [1]
            store: Any = served.server.log._store

            async def broken(*_: object, **__: object) -> None:
                raise StoreUnavailableError("of the store, not to be told")

            with monkeypatch.context() as patched:
                patched.setattr(store, "read_brief", broken)
                answer = await served.page("a")
            assert answer.refusal == (500, "server_error")
            assert answer.error["message"] == "the log cannot be read for now; ask again"
            assert answer.error["details"]["retry_after_ms"] > 0
            assert numbers((await served.page("a")).json["events"]) == [1]

    run(main())


@pytest.mark.rule("CO-12")
def test_a_server_whose_log_was_moved_says_so_and_writes_nothing(tmp_path: Path, database: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            assert await served.commit(item(1)) == [1]
            await asyncio.to_thread(move, str(tmp_path / "events.db"), database, lambda _: None)
            answer = await served.submit(item(2))
            assert answer.refusal == (500, "server_error")
            assert answer.error["message"] == "the log has been moved; nothing was written here"
            assert numbers((await served.page("a")).json["events"]) == [1]
        async with serving(tmp_path, store=database) as served:
            assert await served.commit(item(2)) == [2]

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-33")
def test_a_client_that_goes_in_the_middle_of_a_request_disturbs_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            port = int(served.url.rpartition(":")[2])
            begun = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            for data in (
                begun,
                begun + b"Content-Length: 99\r\n\r\n{",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody who speaks TLS
                b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", port)) as raw:
                    raw.sendall(data)
            assert await served.commit(item(1)) == [1]

    run(main())
