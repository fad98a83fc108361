"""Script: use every client library against a server and print the answers as JSON.

    use_clients.py URL GRPC_ADDRESS DIRECTORY NAME

Clients with the same NAME share their files in DIRECTORY, so that a later run continues their work.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oncelog.client import BlockingClient
from oncelog.client.chat import BlockingChatClient
from oncelog.client.deltas import BlockingDeltasClient
from oncelog.client.ledger import BlockingLedgerClient, set_entity

TIMEOUT_S = 120


def use_clients(url: str, address: str, directory: Path, name: str) -> dict[str, Any]:
    """Write once with each client and read the writes of all clients."""
    said: dict[str, Any] = {"version": version("oncelog")}
    with BlockingClient(url, store=directory / f"{name}-events", client_id=name, partitions=["p"]) as events:
        committed: Any = events.submit({"type": "tick", "by": name}, partitions=["p"]).outcome(TIMEOUT_S)
        said["committed_id"] = committed.committed_id
        said["events"] = _events_up_to(events, committed.committed_id)
    with BlockingChatClient(url, path=directory / f"{name}-chat", token=name) as chat:
        if name == "first":
            chat.create("tea", members=["user:second"])
        sent: Any = chat.send("tea", f"by {name}").sent(TIMEOUT_S)
        said["sequence"], said["message_id"] = sent.sequence, sent.message_id
        said["messages"] = [one.content for one in chat.history("tea")]
    with BlockingLedgerClient(
        address, path=directory / f"{name}-ledger", organization="acme", client_id=name
    ) as ledger:
        written: Any = ledger.write(set_entity(f"by:{name}", b"1"), timeout_s=TIMEOUT_S)
        said["tx_id"], said["client_sequence"], said["height"] = written.tx_id, written.sequence, written.height
        said["entities"] = [entity.key for entity in ledger.list_entities()]
    with BlockingDeltasClient(url, "shop", path=directory / f"{name}-deltas", client_id=name) as deltas:
        deltas.put("products", name, {"price": 1})
        deltas.synced(TIMEOUT_S)
        said["rows"] = [row.row_id for row in deltas.each_row("products")]
    return said


def _events_up_to(client: BlockingClient, committed_id: int) -> list[str]:
    found = []
    for event in client.events():
        found.append((event.event or {})["by"])
        if event.committed_id >= committed_id:
            break
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(use_clients(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])))
