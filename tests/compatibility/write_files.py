"""Write a file in the current version of each format, unless it exists.

PYTHONPATH=tests python -m compatibility.write_files
"""

import asyncio
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from cli.sample_log import make_log
from cli.server_process import serving
from compatibility.formats import FILES, pack, schema_of, shorten_dump
from deadlines import WAIT_S
from oncelog.client import BlockingClient
from oncelog.client.chat import BlockingChatClient
from oncelog.client.chat.store import SCHEMA as CHAT
from oncelog.client.deltas import BlockingDeltasClient
from oncelog.client.deltas.store import SCHEMA as DELTAS
from oncelog.client.events.store import SCHEMA as EVENTS
from oncelog.client.ledger import BlockingLedgerClient, set_entity
from oncelog.client.ledger.store import SCHEMA as LEDGER
from oncelog.storage.postgres.statements import SCHEMA_VERSION as POSTGRES_VERSION
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION as SQLITE_VERSION
from oncelog.testing.postgres import create_schema, postgres_server
from oncelog.testing.programs import find_postgres

ROUNDS = 2


def write_sqlite_log(directory: Path, target: Path) -> None:
    make_log(directory / "log.db", rounds=ROUNDS)
    pack((directory / "log.db").read_bytes(), target)


def write_postgres_log(directory: Path, target: Path) -> None:
    (directory / "postgres").mkdir()
    with postgres_server(directory / "postgres") as server:
        address = asyncio.run(create_schema(server.address))
        make_log(address, rounds=ROUNDS)
        schema = schema_of(address)
        options = ("--no-owner", "--no-privileges", "--inserts", "--rows-per-insert=100", f"--schema={schema}")
        command = [str(find_postgres() / "bin/pg_dump"), *options, server.address]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    pack(shorten_dump(dump, schema).encode(), target)


def write_client_files(directory: Path, targets: dict[str, Path]) -> None:
    """Write one file for each client, with an acknowledged write and a write that the server has not answered."""
    files = {kind: directory / f"{kind}.db" for kind in targets}
    with (
        serving(directory, grpc=True) as server,
        BlockingClient(server.url, path=files["events"], client_id="till", partitions=["orders"]) as events,
        BlockingChatClient(server.url, path=files["chat"], token="ann") as chat,  # noqa: S106
        BlockingDeltasClient(server.url, "shop", path=files["deltas"], client_id="till") as deltas,
        BlockingLedgerClient(server.rpc_address, path=files["ledger"], organization="acme", client_id="till") as ledger,
    ):
        committed = events.submit({"type": "order.placed", "order": 1}, partitions=["orders"])
        committed.outcome(WAIT_S)
        chat.create("tea", members=["user:bob"])
        chat.send("tea", "first").outcome(WAIT_S)
        deltas.put("products", "tea", {"price": 1})
        deltas.synced(WAIT_S)
        ledger.write(set_entity("invoice/1", b"1"), timeout_s=WAIT_S)
        server.kill()
        events.submit({"type": "order.placed", "order": 2}, partitions=["orders"])
        chat.send("tea", "second")
        deltas.put("products", "coffee", {"price": 2})
        with suppress(TimeoutError):
            ledger.write(set_entity("invoice/2", b"2"), timeout_s=1)
    for kind, target in targets.items():
        if not target.exists():
            pack(files[kind].read_bytes(), target)


def main() -> None:
    sqlite_log = FILES / f"log-sqlite-{SQLITE_VERSION:02}.db.xz"
    postgres_log = FILES / f"log-postgres-{POSTGRES_VERSION:02}.sql.xz"
    schemas = {"events": EVENTS, "chat": CHAT, "deltas": DELTAS, "ledger": LEDGER}
    clients = {kind: FILES / f"client-{kind}-{schema.version:02}.db.xz" for kind, schema in schemas.items()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if not sqlite_log.exists():
            write_sqlite_log(directory, sqlite_log)
        if not postgres_log.exists():
            write_postgres_log(directory, postgres_log)
        (directory / "clients").mkdir()
        write_client_files(directory / "clients", clients)


if __name__ == "__main__":
    main()
