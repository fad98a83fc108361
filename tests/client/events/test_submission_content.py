"""Content of pending submissions, for user interfaces that show it before the commit."""

from pathlib import Path
from typing import Final

from oncelog.client import BlockingClient, Client

UNREACHABLE_URL: Final = "http://127.0.0.1:9"
EVENT: Final = {"type": "todo.added", "text": "milk", "count": [1.5, None]}


async def test_pending_submission_has_its_event_and_partitions_after_a_restart(tmp_path: Path) -> None:
    store = tmp_path / "ann.db"
    async with Client(UNREACHABLE_URL, path=store, partitions=["list/1"]) as client:
        pending = await client.submit(EVENT, ["list/2", "list/1"])
        assert (pending.event, pending.partitions) == (EVENT, ("list/1", "list/2"))
        pending.event.clear()  # the property returns a copy
        assert pending.event == EVENT
    async with Client(UNREACHABLE_URL, path=store, partitions=["list/1"]) as client:
        (again,) = client.pending()
        assert (again.id, again.event, again.partitions) == (pending.id, EVENT, ("list/1", "list/2"))
    with BlockingClient(UNREACHABLE_URL, path=store, partitions=["list/1"]) as blocking:
        (one,) = blocking.pending()
        assert (one.event, one.partitions) == (EVENT, ("list/1", "list/2"))
