"""`oncelog deltas` with gateways that drop the tombstones of deleted rows (DE-13)."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cli.deltas.test_deltas_command import change, deltas, push
from cli.scripted_server import answer, scripted
from cli.server_process import serving
from databases import BOTH_STORES


@BOTH_STORES
@pytest.mark.rule("DE-13")
def test_compaction_drops_deleted_rows_and_notifies_readers(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        push(served.url, "g", 0, 1, 2)
        status, _, errors = deltas("push", served.url, "g", "--client-id", "c", given=change("r0", "DELETE") + "\n")
        assert (status, errors) == (0, [])
        assert deltas("compact", served.url, "g", "--keep", "0")[1] == [
            "4 deltas compacted; deltas up to 4 no longer have bodies"
        ]
        assert deltas("compact", served.url, "g", "--keep", "0", "--tombstone-age-days", "0")[1] == [
            "0 deltas compacted; deltas up to 4 no longer have bodies",
            "1 deleted rows dropped",
        ]
        for options in ([], ["--since", "1"], ["--since", "1", "--follow"]):
            status, lines, [error] = deltas("pull", served.url, "g", *options)
            assert (status, lines) == (1, [])
            assert "have been compacted" in error
        status, lines, _ = deltas("snapshot", served.url, "g")
        assert (status, [json.loads(line)["rowId"] for line in lines[:-1]]) == (0, ["r1", "r2"])


@pytest.mark.rule("DE-13")
def test_compaction_reads_all_rows_and_names_the_consumer_that_blocks_it() -> None:
    held = {"consumer": "mail", "cursor": 3, "lag": 4}

    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        following, by = ("page 2", held) if attempt == 1 else ("", None)
        reply = {"compacted": 0, "upto": 7, "hasMore": False, "droppedRows": 2, "next": following, "heldBy": by}
        answer(handler, 200, reply)

    with scripted(handle) as (url, received):
        status, lines, _ = deltas("compact", url, "g", "--keep", "0", "--tombstone-age-days", "1.5")
    get_json = {"keep": 0, "tombstoneAgeMs": 129_600_000}
    assert (status, received) == (0, [get_json, {**get_json, "page": "page 2"}])
    assert lines[1:] == [
        "4 deleted rows dropped",
        "other deleted rows are kept until the consumer mail, which is 4 deltas behind, has read them",
    ]


@pytest.mark.rule("DE-13")
def test_snapshot_command_requests_a_retry_if_rows_are_dropped_meanwhile() -> None:
    def handle(handler: BaseHTTPRequestHandler, attempt: int) -> None:
        if attempt == 1:
            answer(handler, 200, {"rows": [{"rowId": "r"}], "cursor": 3, "next": "page 2", "epoch": "e"})
        else:
            answer(handler, 409, {"error": "page: …", "code": "HISTORY_CHANGED", "snapshot": True})

    with scripted(handle) as (url, _):
        status, lines, [error] = deltas("snapshot", url, "g")
    assert (status, lines) == (2, ['{"rowId": "r"}'])
    assert error == "oncelog: deleted rows were dropped during the snapshot: run the same command again"
