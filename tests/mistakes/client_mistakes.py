"""Mistakes with the clients."""

from typing import Any

import aiohttp

from deadlines import soon
from mistakes.mistake import SECRET, MistakeTable
from mistakes.workplace import AUDIENCE, EVENT, EVENT_ID, Workplace, last_error, raised
from oncelog.client import Client, ClientLimits
from oncelog.client.chat import ChatClient
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import LedgerClient
from server.auth import auth_material
from server.running_server import SocketClient

MISTAKES = MistakeTable()


def client(workplace: Workplace, url: str | None = None, **options: Any) -> Client:
    """Build an events client for the server in development mode."""
    chosen = {"path": workplace.directory / "client.db", "partitions": ["orders"], **options}
    return Client(workplace.development.url if url is None else url, **chosen)


def token(workplace: Workplace, **claims: Any) -> str:
    """Return a token for the server that requires credentials."""
    made = auth_material.token(**{"aud": AUDIENCE, **claims})
    workplace.secrets.append(made)
    return made


# --- the URL


@MISTAKES.add("url", "'localhost:7171'", remedy="must be http://HOST:PORT")
async def url_without_a_scheme(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, "localhost:7171"))


@MISTAKES.add("url", "'ftp://localhost'", remedy="must be http://HOST:PORT")
async def url_with_another_scheme(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, "ftp://localhost"))


@MISTAKES.add("url", "password", remedy="pass a token separately")
async def url_with_a_password(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, f"http://ann:{SECRET}@localhost:7171"))


@MISTAKES.add("cannot be reached", "http://127.0.0.1:", remedy="is the server running at this URL")
async def server_that_does_not_run(workplace: Workplace) -> str:
    return await last_error(client(workplace, f"http://127.0.0.1:{workplace.closed_port}"))


@MISTAKES.add("http://shop.invalid:7171 cannot be reached", remedy="check the host name")
async def misspelt_host(workplace: Workplace) -> str:
    return await last_error(client(workplace, "http://shop.invalid:7171"))


@MISTAKES.add("no Oncelog server at http://127.0.0.1:", "/api", "404", remedy="check the URL")
async def url_with_a_wrong_path(workplace: Workplace) -> str:
    return await last_error(client(workplace, f"{workplace.development.url}/api"))


@MISTAKES.add("https://127.0.0.1:", "TLS", remedy="use http://")
async def https_for_a_server_without_tls(workplace: Workplace) -> str:
    return await last_error(client(workplace, workplace.development.url.replace("http://", "https://")))


# --- credentials


@MISTAKES.add("authentication failed", remedy="send a valid token or API key")
async def no_token(workplace: Workplace) -> str:
    return await last_error(client(workplace, workplace.secured.url))


@MISTAKES.add("authentication failed", remedy="send a valid token or API key")
async def wrong_token(workplace: Workplace) -> str:
    return await last_error(client(workplace, workplace.secured.url, token=SECRET))


@MISTAKES.add("authentication failed", remedy="the server's log says why")
async def expired_token(workplace: Workplace) -> str:
    expired = token(workplace, exp=auth_material.NOW_S - 3600)
    return await last_error(client(workplace, workplace.secured.url, token=expired))


@MISTAKES.add("authentication failed", remedy="the server's log says why")
async def token_for_another_server(workplace: Workplace) -> str:
    foreign = token(workplace, aud="https://other.example")
    return await last_error(client(workplace, workplace.secured.url, token=foreign))


@MISTAKES.add("forbidden", "partitions", remedy="has no write access")
async def token_without_the_grant(workplace: Workplace) -> str:
    async with client(workplace, workplace.secured.url, token=token(workplace), partitions=[]) as opened:
        pending = await opened.submit(EVENT, ["invoices"])
        return str(await soon(pending.outcome()))


@MISTAKES.add("token", remedy="must be a string of printable ASCII")
async def token_with_the_line_break_of_its_file(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, token=f"{SECRET}\n"))


@MISTAKES.add("token function", "int", remedy="must return a string")
async def token_function_that_returns_no_token(workplace: Workplace) -> str:
    function: Any = lambda: 17  # noqa: E731
    return await last_error(client(workplace, workplace.secured.url, token=function))


# --- the file


@MISTAKES.add("client.db", "another client", remedy="each needs its own file")
async def file_that_is_opened_twice(workplace: Workplace) -> str:
    async with client(workplace):
        return await raised(client(workplace).__aenter__())


@MISTAKES.add("client.db", "till-1", "till-2", remedy="use another file")
async def file_of_another_client(workplace: Workplace) -> str:
    def till(client_id: str) -> DeltasClient:
        path = workplace.directory / "client.db"
        return DeltasClient(workplace.development.url, "shop", path=path, client_id=client_id)

    async with till("till-1"):
        pass
    return await raised(till("till-2").__aenter__())


@MISTAKES.add("client.db", "orders", remedy="use another file, or pass `reset`")
async def file_with_other_partitions(workplace: Workplace) -> str:
    async with client(workplace):
        pass
    return await raised(client(workplace, partitions=["invoices"]).__aenter__())


@MISTAKES.add("notes.txt", "not an SQLite database", remedy="use another file")
async def text_file_as_client_file(workplace: Workplace) -> str:
    return await raised(client(workplace, path=workplace.path("notes.txt")).__aenter__())


@MISTAKES.add("foreign.db", "deltas client", remedy="use a separate file")
async def database_of_another_program_as_client_file(workplace: Workplace) -> str:
    path = workplace.path("foreign.db")
    return await raised(DeltasClient(workplace.development.url, "shop", path=path, client_id="till-1").__aenter__())


@MISTAKES.add("missing", "client.db", "does not exist", remedy="create it first")
async def client_file_in_a_missing_directory(workplace: Workplace) -> str:
    return await raised(client(workplace, path=workplace.directory / "missing" / "client.db").__aenter__())


@MISTAKES.add("path", "None", remedy=":memory:")
async def client_without_a_path(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, path=None))


# --- arguments


@MISTAKES.add("partitions", "'orders'", remedy="must be a list of strings")
async def one_partition_to_follow(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, partitions="orders"))


@MISTAKES.add("limits", remedy="must be ClientLimits")
async def client_limits_in_a_dict(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, limits={"outbox_items_max": 10}))


@MISTAKES.add("pause_ms_min", "0", remedy="must be")
async def client_limit_out_of_range(workplace: Workplace) -> str:
    return await raised(lambda: client(workplace, limits=ClientLimits(pause_ms_min=0)))


@MISTAKES.add("apply", remedy="must not be async")
async def async_apply_function(workplace: Workplace) -> str:
    async def apply(*_: Any) -> None:
        """Apply nothing."""

    return await raised(lambda: client(workplace, apply=apply))


@MISTAKES.add("not open", remedy="async with")
async def client_that_was_never_opened(workplace: Workplace) -> str:
    return await raised(client(workplace).submit(EVENT))


@MISTAKES.add("closed", remedy="create another one with the same file")
async def client_that_was_closed(workplace: Workplace) -> str:
    async with client(workplace) as closed:
        pass
    return await raised(closed.submit(EVENT))


@MISTAKES.add("$.event.type", remedy="is missing")
async def client_event_without_a_type(workplace: Workplace) -> str:
    async with client(workplace) as opened:
        return await raised(opened.submit({"order": 17}))


@MISTAKES.add("$.id", remedy="must be a UUID")
async def client_event_id_that_is_no_uuid(workplace: Workplace) -> str:
    async with client(workplace) as opened:
        return await raised(opened.submit(EVENT, id="order-17"))


@MISTAKES.add("6f8b4c1e-3a52-4d8e-9c1f-0a7d2b5e4f60", "outbox", remedy="use a new id")
async def id_that_is_already_in_the_outbox(workplace: Workplace) -> str:
    async with client(workplace, f"http://127.0.0.1:{workplace.closed_port}") as offline:
        await offline.submit(EVENT, id=EVENT_ID)
        return await raised(offline.submit({**EVENT, "order": 18}, id=EVENT_ID))


@MISTAKES.add("Client(…) needs `async with`", remedy="write `async with Client(…)`")
async def with_instead_of_async_with(workplace: Workplace) -> str:
    def use() -> None:
        opened: Any = client(workplace)
        with opened:
            raise AssertionError

    return await raised(use)


# --- other clients and old protocols


@MISTAKES.add("protocol_version", remedy="must be '1.0'")
async def old_protocol_version(workplace: Workplace) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{workplace.development.url}/v1/events") as connection,
    ):
        socket = SocketClient(connection)
        await connection.send_json({"type": "connect", "protocol_version": "0.9", "payload": {"client_id": "till-1"}})
        answer = await soon(socket.receive())
    return f"{answer['payload']['code']}: {answer['payload']['message']} {answer['payload'].get('details')}"


@MISTAKES.add("gateway", "not 0", remedy="must have 1 to 80 characters")
async def empty_gateway(workplace: Workplace) -> str:
    return await raised(lambda: DeltasClient(workplace.development.url, "", path=":memory:", client_id="till-1"))


@MISTAKES.add("address", "http://127.0.0.1", remedy="must be HOST:PORT")
async def http_url_for_the_ledger(workplace: Workplace) -> str:
    return await raised(
        lambda: LedgerClient(workplace.development.url, path=":memory:", organization="acme", client_id="till-1")
    )


@MISTAKES.add("AUTH_FAILED", remedy="send a valid token")
async def chat_without_a_token(workplace: Workplace) -> str:
    return await last_error(ChatClient(workplace.secured.url, path=":memory:"))
