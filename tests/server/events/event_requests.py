"""HTTP requests to the Events API."""

from typing import Final

from server.running_server import Answer, Serving

PATH: Final = "/v1/events"
NO_WRITE_ACCESS: Final = "the credential has no write access to some of them; its grants must include them"


async def post(served: Serving, body: bytes, **headers: str) -> Answer:
    """Post a body as JSON."""
    return await served.request("POST", PATH, data=body, headers={"Content-Type": "application/json", **headers})


async def committed_count(served: Serving) -> int:
    """Return the number of events in the log."""
    ready = (await served.get("/readyz")).json
    count: int = ready["last_committed_id"]
    return count
