"""Reads a gateway of a running server over HTTP, independently of the commands under test."""

import json
from typing import Any
from urllib.request import urlopen

from deadlines import wait_until


def get_json(url: str, path: str) -> Any:
    """Return the answer to a GET request."""
    with urlopen(f"{url}/v1/sync/{path}") as answer:  # noqa: S310
        return json.load(answer)


def newest_sequence(url: str, gateway: str) -> int:
    """Return the sequence of the newest delta, which is also the number of deltas."""
    cursor: int = get_json(url, f"{gateway}/snapshot?limit=1")["cursor"]
    return cursor


def wait_for(url: str, gateway: str, sequence: int) -> None:
    """Poll until the gateway has a delta with this sequence."""
    wait_until(lambda: newest_sequence(url, gateway) >= sequence, lambda: newest_sequence(url, gateway))


def rows_of(url: str, gateway: str, table: str) -> dict[str, dict[str, Any]]:
    """Return all rows of a table, by row id."""
    rows: dict[str, dict[str, Any]] = {}
    after = ""
    while True:
        page = get_json(url, f"{gateway}/rows/{table}?limit=1000" + (f"&after={after}" if after else ""))
        for row in page["rows"]:
            assert row["rowId"] not in rows
            rows[row["rowId"]] = row["columns"]
        after = page["next"]
        if not after:
            return rows
