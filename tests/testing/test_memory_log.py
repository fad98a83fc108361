"""The in-memory log, which is based on dictionaries."""

import sys
from threading import Barrier, Thread

import pytest

from core.item_builders import event, key
from oncelog.core.proof import encode_record_header, hash_body, hash_leaf, prove, verify
from oncelog.core.values import Committed, Request, Settings, Verdict
from oncelog.testing.memory_log import MemoryLog


def test_equal_input_gives_equal_hashes() -> None:
    logs = [MemoryLog(draw=bytes), MemoryLog(draw=bytes)]
    for log in logs:
        log.submit([Request((event(1), event(2)))], 5)
        log.submit([Request((event(1), event(3)))], 4)
    assert logs[0].blocks == logs[1].blocks
    assert logs[0].snapshot == logs[1].snapshot
    assert [block.previous for block in logs[0].blocks] == [bytes(32), logs[0].blocks[0].hash]


def test_each_record_has_a_different_salt() -> None:
    log = MemoryLog(Settings(lanes=4))
    log.submit([Request((event(1), event(2)))], 5)
    assert len(set(log.salts)) == 2
    assert log.snapshot.settings.lanes == 4
    assert log.snapshot.keys["events", "", "", key(1)].receipt.position == 1
    leaves = [
        hash_leaf(encode_record_header(record), hash_body(salt, record.body))
        for record, salt in zip(log.records, log.salts, strict=True)
    ]
    for index, proof in enumerate([prove(leaves, index) for index in range(len(leaves))]):
        assert verify(log.records[index], log.salts[index], proof, log.blocks[0])
        assert not verify(log.records[index], log.salts[1 - index], proof, log.blocks[0])


@pytest.mark.rule("CO-14")
def test_threads_that_submit_the_same_writes_commit_each_once() -> None:
    log = MemoryLog()
    together = Barrier(8)
    answers: list[Verdict] = []

    def submit_all() -> None:
        together.wait()
        for number in range(200):
            answers.extend(log.submit([Request((event(number),))], 5)[0])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=submit_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert [record.position for record in log.records] == list(range(1, 201))
    assert sum(isinstance(answer, Committed) for answer in answers) == 200
