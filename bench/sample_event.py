"""The event that most benchmarks submit.

The module does not import Oncelog, so that benchmarks can load it together with the source of another version.
"""

from typing import Any, Final

META: Final = {"clientId": "tablet-07", "createdAt": "2025-06-14T09:31:07.482Z", "schema": 2}
TASK: Final = {
    "taskId": "0197f3c2-8d4e-7b1a-9c55-3e2f60a1b7d4",
    "title": "Order new filters for the pump room",
    "done": False,
    "priority": 3,
    "tags": ["maintenance", "pumps"],
    "estimateHours": 1.75,
    "assignee": None,
}
EVENT: Final[dict[str, Any]] = {"type": "task.created", "payload": TASK, "meta": META}
