"""A page in a real Chromium reads a stream with `EventSource` and a ticket."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from browser import Tab
from deadlines import until
from server.running_server import Serving, api_key, item, serving
from server.web_chat.chromium import Chromium

OPEN: Final = """
(async (path, credential) => {
  const response = await fetch(path, { method: "POST", headers: { Authorization: `Bearer ${credential}` } });
  const { ticket } = await response.json();
  window.seen = { ids: [], connected: 0, errors: [] };
  window.stream = new EventSource(`${path}&ticket=${encodeURIComponent(ticket)}`);
  stream.addEventListener("connected", () => { seen.connected += 1; });
  stream.onmessage = (message) => seen.ids.push(message.lastEventId);
  stream.addEventListener("error", (event) => { if (event.data) seen.errors.push(JSON.parse(event.data).code); });
})(%s, %s)
"""
"""Gets a ticket with the credential, and follows the stream with the ticket only."""


async def wait_seen(tab: Tab, **expected: Any) -> None:
    """Wait until the page has seen these values."""
    found: list[Any] = [None]

    async def is_so() -> bool:
        found[0] = await tab.run("({...seen, state: stream.readyState})")
        return all(found[0][name] == value for name, value in expected.items())

    await until(is_so, lambda: (expected, found[0]))


async def open_page(tab: Tab, served: Serving, credential: str) -> None:
    """Open a page of the server, whose content security policy allows requests to the server only."""
    await tab.open(f"{served.url}/docs")
    await tab.run(OPEN % (json.dumps("/v1/events/stream?partition=a"), json.dumps(credential)))


@pytest.mark.rule("EV-16", "CO-23")
async def test_event_source_reconnects_with_its_ticket_until_the_key_is_revoked(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with serving(tmp_path, api_keys=True) as served, chromium.tab() as tab:
        assert served.api_keys is not None
        key = api_key(served, "till", ["a"], ["a"])
        served.credential = key.text
        await open_page(tab, served, key.text)
        await served.commit(item(1), item(2))
        await wait_seen(tab, ids=["1", "2"], connected=1, state=1)
        streams = served.server.apis.events.streams
        for count in (2, 3):
            streams.close_all()
            await served.commit(item(2 * count - 1), item(2 * count))  # while the page reconnects
            ids = [str(number) for number in range(1, 2 * count + 1)]
            await wait_seen(tab, ids=ids, connected=count, state=1)
        served.api_keys.revoke(key.key.id)
        served.server.reload()
        # The browser reconnects once, is refused, and gives up.
        await wait_seen(tab, errors=["auth_failed"], connected=3, state=2)
        assert not len(streams)
