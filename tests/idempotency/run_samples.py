"""Sample fields for tests of runs."""

from typing import Any, Final

FIELDS: Final[dict[str, Any]] = {
    "plan_id": "plan-7",
    "campaign_id": 12,
    "event_type": "tool.execute",
    "tool_name": "dice",
    "ruleset_version": "v1",
    "args": {"sides": 20},
}
