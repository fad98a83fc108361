"""Four processes write one lane at full speed, and a follower receives every position once and in order."""

import time
from array import array
from contextlib import ExitStack
from pathlib import Path

import pytest

from crash.store_history import say
from databases import query
from scripts import read_line, start_script, write_line
from servers import lane_worker

WRITERS = 4
RECORDS = 24_000
SOAK_RECORDS = 1_000_000


@pytest.mark.rule("CO-12", "CO-13")
def test_follower_of_lane_with_several_writers_receives_every_record_once(
    database: str, tmp_path: Path, is_soak: bool
) -> None:
    records = SOAK_RECORDS if is_soak else RECORDS
    path = tmp_path / "positions"
    with ExitStack() as stack:
        kinds = [["write", f"writer{number}", str(records // WRITERS)] for number in range(WRITERS)]
        kinds.append(["follow", "reader", str(records), str(path)])
        found = [stack.enter_context(start_script(lane_worker.__file__, database, *kind)) for kind in kinds]
        assert [read_line(process) for process in found] == ["ready"] * len(found)
        began = time.perf_counter()
        for process in found:
            write_line(process)
        *writers, reader = found
        assert [read_line(process) for process in writers] == ["end"] * WRITERS
        assert read_line(reader) == "end"
        say(f"{records} records in {time.perf_counter() - began:.1f} s")
    assert array("Q", path.read_bytes()) == array("Q", range(1, records + 1))
    assert query(database, "SELECT position FROM oncelog_lanes WHERE lane = 0") == [(records,)]
    assert query(database, "SELECT count(DISTINCT key) FROM oncelog_records WHERE lane = 0") == [(records,)]
