"""Four processes write one lane at full speed; a follower receives every position once, in order."""

import time
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from crash.observing import say
from crash.processes import started
from databases import query
from gateways import lane_worker

WRITERS = 4
RECORDS = 24_000
SOAK_RECORDS = 400_000


def line_from(process: Any) -> str:
    return str(process.stdout.readline().decode().strip())


@pytest.mark.rule("CO-12", "CO-13")
def test_follower_of_lane_with_several_writers_receives_every_record_once(
    database: str, tmp_path: Path, is_soak: bool
) -> None:
    records = SOAK_RECORDS if is_soak else RECORDS
    path = tmp_path / "positions"
    with ExitStack() as stack:
        kinds = [["write", f"writer{number}", str(records // WRITERS)] for number in range(WRITERS)]
        kinds.append(["follow", "reader", str(records), str(path)])
        found = [stack.enter_context(started(lane_worker.__file__, database, *kind)) for kind in kinds]
        assert [line_from(process) for process in found] == ["ready"] * len(found)
        began = time.perf_counter()
        for process in found:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        *writers, reader = found
        assert [line_from(process) for process in writers] == ["end"] * WRITERS
        assert line_from(reader) == "end"
        say(f"{records} records in {time.perf_counter() - began:.1f} s")
    assert array("Q", path.read_bytes()) == array("Q", range(1, records + 1))
    assert query(database, "SELECT position FROM oncelog_lanes WHERE lane = 0") == [(records,)]
    assert query(database, "SELECT count(DISTINCT key) FROM oncelog_records WHERE lane = 0") == [(records,)]
