"""The log in memory."""

from core.writes import event, key
from oncelog.core.proof import prove, verify
from oncelog.core.values import Request, Settings
from oncelog.stores.memory import MemoryLog


def test_logs_that_are_fed_alike_are_alike_to_the_last_hash() -> None:
    logs = [MemoryLog(draw=bytes), MemoryLog(draw=bytes)]
    for log in logs:
        log.submit([Request((event(1), event(2)))], 5)
        log.submit([Request((event(1), event(3)))], 4)
    assert logs[0].blocks == logs[1].blocks
    assert logs[0].snapshot == logs[1].snapshot
    assert [block.previous for block in logs[0].blocks] == [bytes(32), logs[0].blocks[0].hash]


def test_salts_are_drawn_for_each_record() -> None:
    log = MemoryLog(Settings(lanes=4))
    log.submit([Request((event(1), event(2)))], 5)
    assert len(set(log.salts)) == 2
    assert log.snapshot.settings.lanes == 4
    assert log.snapshot.keys["events", "", "", key(1)].receipt.position == 1
    leaves_proof = prove([bytes(32)], 0)
    assert not verify(log.records[0], log.salts[0], leaves_proof, log.blocks[0])
