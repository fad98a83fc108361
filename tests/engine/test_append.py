"""`Log.append` submits an event with keyword arguments."""

from pathlib import Path
from uuid import UUID, uuid4

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from oncelog import CanonicalError, Committed, Reason, Refused, RefusedError, Replayed

TICK = {"type": "tick", "n": 1}


@BOTH_STORES
async def test_repeated_append_with_the_same_id_is_a_retry(tmp_path: Path) -> None:
    key = uuid4()
    async with oncelog.open(log_at(tmp_path / "app.db")) as log:
        first = await log.append(TICK, id=key, partitions=["p"])
        again = await log.append({"n": 1, "type": "tick"}, id=str(key).upper(), partitions=["p"])
        assert isinstance(first, Committed)
        assert isinstance(again, Replayed)
        assert first.unwrap() == again.unwrap()
        assert await log.submit(oncelog.event(key, TICK, ["p"])) == again
        other = await log.append({"type": "tick", "n": 2}, id=key, partitions=["p"])
        assert isinstance(other, Refused)
        with pytest.raises(RefusedError) as raised:
            other.unwrap()
        assert raised.value.reason is Reason.IDENTITY_REUSED


async def test_append_without_an_id_is_a_new_event_each_time() -> None:
    async with oncelog.open(":memory:") as log:
        receipts = [(await log.append(TICK, partitions=["p"])).unwrap() for _ in range(3)]
        assert [receipt.position for receipt in receipts] == [1, 2, 3]
        page = await log.read(partition="p")
        assert len({record.key for record in page.records}) == 3
        assert {UUID(bytes=record.key).version for record in page.records} == {4}


async def test_append_passes_on_all_fields() -> None:
    async with oncelog.open(":memory:") as log:
        await log.append(TICK, partitions=["q", "p"], actor="user:ann", client="c", scope="s", expected_position=0)
        [record] = (await log.read()).records
        assert (record.actor, record.client, record.scope) == ("user:ann", "c", "s")
        assert record.partitions == ("p", "q")
        refused = await log.append(TICK, partitions=["p"], expected_position=0)
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.UNEXPECTED_POSITION


async def test_malformed_event_raises_its_path() -> None:
    async with oncelog.open(":memory:") as log:
        with pytest.raises(CanonicalError, match=r"^\$\.event\.type: "):
            await log.append({"n": 1}, partitions=["p"])
        with pytest.raises(CanonicalError, match=r"^\$\.partitions: "):
            await log.append(TICK, partitions=[])


def test_blocking_log_has_append() -> None:
    with oncelog.open_blocking(":memory:") as log:
        assert log.append(TICK, partitions=["p"]).unwrap().position == 1
