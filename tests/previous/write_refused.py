"""Script: write with every client library to a server whose store rejects some writes, and print JSON outcomes.

    write_refused.py URL GRPC_ADDRESS DIRECTORY TEXT...

Each text is one write. The outcome of a client is the list of refused texts.
"""

import json
import sys
from pathlib import Path

from oncelog.client import BlockingClient, Committed
from oncelog.client.chat import BlockingChatClient, Sent
from oncelog.client.deltas import BlockingDeltasClient, DeltaRefusedError
from oncelog.client.ledger import BlockingLedgerClient, set_entity
from oncelog.errors import ServerRefusedError

TIMEOUT_S = 120
USER = "ann"


def write_refused(url: str, address: str, directory: Path, texts: list[str]) -> dict[str, list[str]]:
    """Write all texts with each client and return the refused texts."""
    refused: dict[str, list[str]] = {"events": [], "chat": [], "deltas": [], "ledger": []}
    with BlockingClient(url, store=directory / "events", client_id="c", partitions=["p"]) as events:
        submitted = [(text, events.submit({"type": text}, partitions=["p"])) for text in texts]
        refused["events"] += [text for text, one in submitted if not isinstance(one.outcome(TIMEOUT_S), Committed)]
    with BlockingChatClient(url, path=directory / "chat", token=USER) as chat:
        chat.create("tea")
        sent = [(text, chat.send("tea", text)) for text in texts]
        refused["chat"] += [text for text, one in sent if not isinstance(one.sent(TIMEOUT_S), Sent)]
    with BlockingDeltasClient(url, "shop", path=directory / "deltas", client_id="c") as deltas:
        deltas.transact(lambda edits: [edits.put("products", text, {"name": text}) for text in texts])
        while True:
            try:
                deltas.synced(TIMEOUT_S)
                break
            except DeltaRefusedError as error:
                refused["deltas"].append(error.refusal.row_id)
                deltas.discard(error.refusal.delta_id)
    with BlockingLedgerClient(address, path=directory / "ledger", organization="acme", client_id="c") as ledger:
        for text in texts:
            try:
                ledger.write(set_entity(text, b"1"), timeout_s=TIMEOUT_S)
            except ServerRefusedError:
                refused["ledger"].append(text)
    return refused


if __name__ == "__main__":
    sys.stdout.write(json.dumps(write_refused(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])))
