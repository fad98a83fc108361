"""Script: put rows with the deltas client, wait until it has caught up, and print its rows as JSON.

sync_rows.py URL FILE ROW_ID...
"""

import json
import sys

from oncelog.client.deltas import BlockingDeltasClient

TIMEOUT_S = 120


def sync_rows(url: str, file: str, row_ids: list[str]) -> list[str]:
    """Put the rows and return the ids of all rows."""
    with BlockingDeltasClient(url, "shop", path=file, client_id="ann") as client:
        for row_id in row_ids:
            client.put("products", row_id, {"price": 1})
        client.synced(TIMEOUT_S)
        return [row.row_id for row in client.each_row("products")]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(sync_rows(sys.argv[1], sys.argv[2], sys.argv[3:])))
