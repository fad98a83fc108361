"""A gateway of a real server, looked at without the commands that are tested."""

import json
from typing import Any
from urllib.request import urlopen


def asked(url: str, path: str) -> Any:
    with urlopen(f"{url}/v1/sync/{path}") as answer:  # noqa: S310
        return json.load(answer)


def newest(url: str, gateway: str) -> int:
    """The sequence of its newest delta, which is how many there are."""
    cursor: int = asked(url, f"{gateway}/snapshot?limit=1")["cursor"]
    return cursor


def wait_for(url: str, gateway: str, sequence: int) -> None:
    while newest(url, gateway) < sequence:
        pass


def rows_of(url: str, gateway: str, table: str) -> dict[str, dict[str, Any]]:
    """All rows of a table."""
    rows: dict[str, dict[str, Any]] = {}
    after = ""
    while True:
        page = asked(url, f"{gateway}/rows/{table}?limit=1000" + (f"&after={after}" if after else ""))
        for row in page["rows"]:
            assert row["rowId"] not in rows
            rows[row["rowId"]] = row["columns"]
        after = page["next"]
        if not after:
            return rows
