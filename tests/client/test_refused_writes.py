"""Permanent errors of a real server, with every client library.

A refused write gets its error alone. The writes before and behind it commit, also after a restart of the client.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from msgspec import Struct

from client import clients
from client.chat import chat_clients
from client.deltas import deltas_clients
from client.ledger import ledgers
from databases import BOTH_STORES, log_at
from doors.rejecting_store import MARK, reject_marked_bodies
from doors.serving import Serving, serving
from oncelog.client import Client, Committed
from oncelog.client.chat import ChatClient, Refused, Sent
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import LedgerClient, Written, set_entity
from oncelog.core.operations import Operation, SetEntity
from oncelog.errors import ServerRefusedError
from waiting import soon

CHAT: Final = "tea"
LARGE: Final = "x" * 500
"""The id of a row has at most 512 characters."""


class Refusal(Struct, frozen=True):
    """A permanent error of the server."""

    text: str
    """The write that gets it."""
    message: str
    """Text that all errors of the clients have in common, in lower case."""
    settings: dict[str, Any] = {}


REFUSALS: Final = {
    "unstorable": Refusal(MARK, "sending it again does not help"),
    "too large": Refusal(LARGE, "large", {"frame_bytes_max": len(LARGE)}),
}

Refusals = dict[str, str]
"""The texts of refused writes, with the messages of their errors."""


class Library(Protocol):
    """One client library, for writes that are texts."""

    def client_of(self, served: Serving | None, path: Path) -> AbstractAsyncContextManager[Any]:
        """Return a client of the server, or of no server."""

    async def store(self, client: Any, texts: Sequence[str]) -> None:
        """Put writes into the outbox of a client that is not connected."""

    async def settle(self, client: Any) -> Refusals:
        """Wait until no write is pending, and return the refused ones."""

    async def write(self, client: Any, text: str) -> str:
        """Write, and return the message of the error or an empty text."""

    async def read(self, client: Any) -> list[str]:
        """Return the committed texts."""


class EventsLibrary:
    def client_of(self, served: Serving | None, path: Path) -> Client:
        return clients.client_of(clients.NOWHERE if served is None else served.url, path)

    async def store(self, client: Client, texts: Sequence[str]) -> None:
        for text in texts:
            await client.submit({"type": text})

    async def settle(self, client: Client) -> Refusals:
        await clients.settled(client)
        return {one.event["type"]: self._message_of(one.outcome) for one in await client.rejected()}

    async def write(self, client: Client, text: str) -> str:
        return self._message_of(await clients.outcome(client, {"type": text}))

    async def read(self, client: Client) -> list[str]:
        await clients.settled(client)
        events = client.events()
        return [
            ((await soon(anext(events))).event or {})["type"]
            for _ in range(client.status().server_last_committed_id or 0)
        ]

    def _message_of(self, outcome: Any) -> str:
        return "" if isinstance(outcome, Committed) else f"{outcome.reason}: {outcome.errors}"


class ChatLibrary:
    def client_of(self, served: Serving | None, path: Path) -> ChatClient:
        return chat_clients.client_of(chat_clients.NOWHERE if served is None else served.url, path=path)

    async def store(self, client: ChatClient, texts: Sequence[str]) -> None:
        for text in texts:
            await client.send(CHAT, text)

    async def settle(self, client: ChatClient) -> Refusals:
        await soon(client.until_settled())
        return {one.content: self._message_of(one.outcome) for one in client.refused()}

    async def write(self, client: ChatClient, text: str) -> str:
        return self._message_of(await soon((await client.send(CHAT, text)).sent()))

    async def read(self, client: ChatClient) -> list[str]:
        return [one.content or "" for one in await client.history(CHAT)]

    def _message_of(self, outcome: Any) -> str:
        if isinstance(outcome, Sent):
            return ""
        assert isinstance(outcome, Refused)
        return f"{outcome.code}: {outcome.message}"


class DeltasLibrary:
    def client_of(self, served: Serving | None, path: Path) -> DeltasClient:
        return deltas_clients.client_of(deltas_clients.NOWHERE if served is None else served.url, path)

    async def store(self, client: DeltasClient, texts: Sequence[str]) -> None:
        for text in texts:
            await client.put("products", text, {"name": text})

    async def settle(self, client: DeltasClient) -> Refusals:
        """A refused delta holds back those behind it until the application discards it."""
        refusals = {}
        while client.status().pending:
            status = await soon(client.until_status(lambda status: not status.pending or status.refusal is not None))
            if status.refusal is not None:
                refusals[status.refusal.row_id] = f"{status.refusal.code}: {status.refusal.message}"
                await client.discard(status.refusal.delta_id)
        await soon(client.synced())
        return refusals

    async def write(self, client: DeltasClient, text: str) -> str:
        await self.store(client, [text])
        return (await self.settle(client)).get(text, "")

    async def read(self, client: DeltasClient) -> list[str]:
        await soon(client.synced())
        return [row_id for _, row_id in await deltas_clients.rows_of(client)]


class LedgerLibrary:
    def client_of(self, served: Serving | None, path: Path) -> LedgerClient:
        return ledgers.ledger_of(ledgers.NOWHERE if served is None else ledgers.address_of(served), path)

    async def store(self, client: LedgerClient, texts: Sequence[str]) -> None:
        for text in texts:
            with pytest.raises(TimeoutError):
                await client.write(set_entity(text, b"1"), timeout_s=0.01)

    async def settle(self, client: LedgerClient) -> Refusals:
        refused = [one for one in await soon(client.recovered()) if not isinstance(one.outcome, Written)]
        return {self._text_of(one.operations[0]): str(one.outcome) for one in refused}

    async def write(self, client: LedgerClient, text: str) -> str:
        try:
            ledgers.written(await soon(client.write(set_entity(text, b"1"))))
        except ServerRefusedError as error:
            return str(error)
        return ""

    async def read(self, client: LedgerClient) -> list[str]:
        return await ledgers.keys_of(client)

    def _text_of(self, operation: Operation) -> str:
        assert isinstance(operation, SetEntity)
        return operation.key


LIBRARIES: Final[dict[str, Library]] = {
    "events": EventsLibrary(),
    "chat": ChatLibrary(),
    "deltas": DeltasLibrary(),
    "ledger": LedgerLibrary(),
}


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-34")
@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("name", LIBRARIES)
async def test_permanently_refused_write_gets_its_error_alone_and_blocks_no_other(
    tmp_path: Path, name: str, kind: str
) -> None:
    library, refusal, path = LIBRARIES[name], REFUSALS[kind], tmp_path / "client.db"
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with serving(tmp_path, **refusal.settings) as served:
        if name == "chat":
            async with chat_clients.client_of(served.url) as ann:
                await ann.create(CHAT)
        async with library.client_of(None, path) as client:
            await library.store(client, ["a", "b", refusal.text, "c", "d"])
        async with library.client_of(served, path) as client:
            refused = await library.settle(client)
            assert list(refused) == [refusal.text]
            assert refusal.message in refused[refusal.text].lower()
            assert await library.write(client, "e") == ""
            assert refusal.message in (await library.write(client, refusal.text)).lower()
            together = await asyncio.gather(*(library.write(client, text) for text in ("f", "g")))
            assert together == ["", ""]
        async with library.client_of(served, path) as client:
            await library.settle(client)
            assert await library.write(client, "h") == ""
            assert sorted(await library.read(client)) == sorted("abcdefgh")
