"""All client libraries behind one interface, for tests that run with each library."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from client.chat import chat_clients
from client.deltas import deltas_clients
from client.events import event_clients
from client.ledger import ledgers
from deadlines import soon, until
from oncelog.client import Client, Committed, ConnectionState
from oncelog.client.chat import ChatClient, Refused, Sent
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import ForgottenError, LedgerClient, Written, set_entity
from oncelog.core.operations import Operation, SetEntity
from oncelog.errors import ServerRefusedError
from server.running_server import Serving

CHAT: Final = "tea"

Refusals = dict[str, str]
"""Error messages of refused writes, keyed by the written string."""


class Library(Protocol):
    """A client library whose writes are strings."""

    requests: tuple[str, str]
    """API and transport labels of its requests in the server's metrics."""
    tenant: str
    """Tenant to which its writes belong."""

    async def prepare(self, served: Serving) -> None:
        """Create the objects on the server that the writes require."""

    def client_of(self, served: Serving | None, path: Path) -> AbstractAsyncContextManager[Any]:
        """Return a client for the server, or for an unreachable server if None is given."""

    async def store(self, client: Any, texts: Sequence[str]) -> None:
        """Put writes into the outbox of a client that is not connected."""

    async def settle(self, client: Any) -> Refusals:
        """Wait until no write is pending, and return the refused writes."""

    async def write(self, client: Any, text: str) -> str:
        """Write a string. Return the error message, or an empty string on success."""

    async def accept_history(self, client: Any) -> None:
        """Accept the history of a server that was restored from a backup."""

    async def read(self, served: Serving, client: Any, /) -> list[str]:
        """Return the committed strings."""


class EventsLibrary:
    requests = ("events", "websocket")
    tenant = "a"

    async def prepare(self, served: Serving) -> None:
        pass

    def client_of(self, served: Serving | None, path: Path) -> Client:
        client = event_clients.client_of(event_clients.UNREACHABLE_URL if served is None else served.url, path)
        client.on_event(lambda _: None, name="reader")  # without a reader the client ignores history changes
        return client

    async def store(self, client: Client, texts: Sequence[str]) -> None:
        for text in texts:
            await client.submit({"type": text})

    async def settle(self, client: Client) -> Refusals:
        await event_clients.wait_until_settled(client)
        return {one.event["type"]: self._message_of(one.outcome) for one in await client.refused()}

    async def write(self, client: Client, text: str) -> str:
        outcome = await event_clients.outcome(client, {"type": text})
        if isinstance(outcome, Committed):
            await soon(client.reached(outcome.committed_id))
        return self._message_of(outcome)

    async def accept_history(self, client: Client) -> None:
        await until(lambda: client.status().state is ConnectionState.HISTORY_CHANGED)
        await client.start_over()

    async def read(self, served: Serving, client: Client) -> list[str]:
        await event_clients.wait_until_settled(client)
        return [one["event"]["type"] for one in (await served.page("a")).json["events"]]

    def _message_of(self, outcome: Any) -> str:
        return "" if isinstance(outcome, Committed) else f"{outcome.reason}: {outcome.errors}"


class ChatLibrary:
    requests = ("chat", "websocket")
    tenant = f"chat/{CHAT}"

    async def prepare(self, served: Serving) -> None:
        async with chat_clients.client_of(served.url) as ann:
            await ann.create(CHAT)

    def client_of(self, served: Serving | None, path: Path) -> ChatClient:
        return chat_clients.client_of(chat_clients.UNREACHABLE_URL if served is None else served.url, path=path)

    async def store(self, client: ChatClient, texts: Sequence[str]) -> None:
        for text in texts:
            await client.send(CHAT, text)

    async def settle(self, client: ChatClient) -> Refusals:
        await soon(client.until_settled())
        return {one.content: self._message_of(one.outcome) for one in client.refused()}

    async def write(self, client: ChatClient, text: str) -> str:
        return self._message_of(await soon((await client.send(CHAT, text)).outcome()))

    async def accept_history(self, client: ChatClient) -> None:
        pass

    async def read(self, _: Serving, client: ChatClient) -> list[str]:
        return [one.content or "" for one in await client.history(CHAT)]

    def _message_of(self, outcome: Any) -> str:
        if isinstance(outcome, Sent):
            return ""
        assert isinstance(outcome, Refused)
        return f"{outcome.code}: {outcome.message}"


class DeltasLibrary:
    requests = ("deltas", "http")
    tenant = "deltas/shop"

    async def prepare(self, served: Serving) -> None:
        pass

    def client_of(self, served: Serving | None, path: Path) -> DeltasClient:
        return deltas_clients.client_of(deltas_clients.UNREACHABLE_URL if served is None else served.url, path)

    async def store(self, client: DeltasClient, texts: Sequence[str]) -> None:
        for text in texts:
            await client.put("products", text, {"name": text})

    async def settle(self, client: DeltasClient) -> Refusals:
        """Discard refused deltas, which block all later ones."""
        refusals = {}
        while client.status().pending:
            status = await soon(client.until_status(lambda status: not status.pending or status.refusal is not None))
            if status.refusal is not None:
                refusals[status.refusal.row_id] = f"{status.refusal.code}: {status.refusal.message}"
                await client.withdraw(status.refusal.delta_id)
        await soon(client.synced())
        return refusals

    async def write(self, client: DeltasClient, text: str) -> str:
        await self.store(client, [text])
        return (await self.settle(client)).get(text, "")

    async def accept_history(self, client: DeltasClient) -> None:
        pass

    async def read(self, _: Serving, client: DeltasClient) -> list[str]:
        await soon(client.synced())
        return [row_id for _, row_id in await deltas_clients.rows_of(client)]


class LedgerLibrary:
    requests = ("ledger", "grpc")
    tenant = "ledger/acme"

    async def prepare(self, served: Serving) -> None:
        pass

    def client_of(self, served: Serving | None, path: Path) -> LedgerClient:
        return ledgers.ledger_of(ledgers.UNREACHABLE_ADDRESS if served is None else ledgers.address_of(served), path)

    async def store(self, client: LedgerClient, texts: Sequence[str]) -> None:
        for text in texts:
            with pytest.raises(TimeoutError):
                await client.write(set_entity(text, b"1"), timeout_s=0.01)

    async def settle(self, client: LedgerClient) -> Refusals:
        refused = [one for one in await soon(client.recovered()) if not isinstance(one.outcome, Written)]
        return {self._text_of(one.operations[0]): str(one.outcome) for one in refused}

    async def write(self, client: LedgerClient, text: str) -> str:
        try:
            ledgers.expect_written(await soon(client.write(set_entity(text, b"1"))))
        except ServerRefusedError as error:
            return str(error)
        return ""

    async def accept_history(self, client: LedgerClient) -> None:
        with pytest.raises(ForgottenError):
            await soon(client.recovered())
        await client.resume(resend=True)

    async def read(self, _: Serving, client: LedgerClient) -> list[str]:
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
