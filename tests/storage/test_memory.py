"""The store in memory."""

import sys
from threading import Barrier, Thread
from typing import Any

import pytest

from core.item_builders import event, key, transaction
from oncelog.core.proof import encode_record_header, hash_body, hash_leaf, prove, verify
from oncelog.core.values import Committed, Record, Request, Settings, Verdict
from oncelog.storage.memory import MemoryLog, MemoryStore
from oncelog.storage.store import Query


def test_equal_input_gives_equal_hashes() -> None:
    logs = [MemoryLog(draw=bytes), MemoryLog(draw=bytes)]
    for log in logs:
        log.submit([Request((event(1), event(2)))], 5)
        log.submit([Request((event(1), event(3)))], 4)
    assert logs[0].blocks == logs[1].blocks
    assert logs[0].snapshot == logs[1].snapshot
    assert [block.previous for block in logs[0].blocks] == [bytes(32), logs[0].blocks[0].hash]


def test_each_record_has_its_own_salt() -> None:
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


async def test_reads_of_unknown_names_store_nothing() -> None:
    store = MemoryStore()
    await store.open()
    await store.commit([Request((event(1), transaction(1, 1)))])
    orders = (store._index._orders, store._index._blocks)
    before = [len(one) for one in orders]
    for number in range(10):
        name = f"unknown {number}"
        await store.read(Query(stream=name))
        await store.read(Query(partitions=(name,)))
        assert await store.sequence_before(name, 9, 1) == 0
        assert await store.sequence_after(name, 0, 1) == 0
        assert await store.blocks(100 + number, 0, 10, "") == []
        assert await store.erase(100 + number, [1]) == 0
    assert [len(one) for one in orders] == before


class CountingList(list[Record]):
    """Counts accesses to its records."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


async def test_page_reads_only_its_own_records() -> None:
    async def looks_of(query: Query) -> tuple[int, int]:
        store = MemoryStore(Settings(lanes=1))
        await store.open()
        writes = [
            event(number, partitions=("all", "odd") if number % 100 else ("all", "rare")) for number in range(1000)
        ]
        await store.commit([Request((*writes, *[transaction(number, number) for number in range(1, 100)]))])
        counting = store._log.records = CountingList(store._log.records)
        page = await store.read(query)
        return len(page.records), counting.looks

    for query, expected in (
        (Query(limit=5, after=500), 5),
        (Query(limit=5, partitions=("rare",)), 5),
        (Query(limit=500, partitions=("rare",)), 10),
        (Query(limit=5, partitions=("rare", "odd"), after=700), 5),
        (Query(limit=5, stream="org/1", after=50), 5),
        (Query(limit=5, partitions=("nobody",)), 0),
    ):
        found, looks = await looks_of(query)
        assert found == expected
        assert looks <= expected + 1  # one more shows whether another page follows
