"""Deltas clients for tests, with short pauses."""

from pathlib import Path
from typing import Any, Final

from oncelog.client.deltas import DeltasClient, DeltasLimits

HERE: Final = Path(__file__).parent
SHORT: Final = {
    "pause_ms_min": 1, "pause_ms_max": 20, "refused_pause_ms_min": 1, "refused_pause_ms_max": 20,
    "retry_after_ms_max": 20,
}  # fmt: skip
LIMITS: Final = DeltasLimits(**SHORT)
UNREACHABLE_URL: Final = "http://127.0.0.1:9"
"""No server listens on this port."""
GATEWAY: Final = "shop"


def client_of(url: str, path: Path | str = ":memory:", client_id: str = "till-1", **options: Any) -> DeltasClient:
    """Return a client with short pauses."""
    return DeltasClient(url, GATEWAY, path=path, client_id=client_id, **{"limits": LIMITS, **options})


async def rows_of(client: DeltasClient, *tables: str) -> dict[tuple[str, str], Any]:
    """Return all rows of the given tables (default: `products`)."""
    return {
        (table, row.row_id): row.columns for table in tables or ("products",) async for row in client.each_row(table)
    }
