"""Client files and API key files of every format version can be opened."""

import json
from pathlib import Path
from typing import Final

import pytest

from cli.server_process import oncelog
from compatibility.formats import name_versions, unpack
from compatibility.test_log_formats import MISSING
from oncelog.client import BlockingClient
from oncelog.client.chat import BlockingChatClient
from oncelog.client.chat.store import SCHEMA as CHAT
from oncelog.client.deltas import BlockingDeltasClient
from oncelog.client.deltas.store import SCHEMA as DELTAS
from oncelog.client.events.store import SCHEMA as EVENTS
from oncelog.client.ledger.store import SCHEMA as LEDGER
from oncelog.client.ledger.store import LedgerStore
from oncelog.core.operations import SetEntity
from oncelog.server.auth.api_keys import FILE_VERSION_WITH_EXPIRY

UNREACHABLE: Final = "http://127.0.0.1:9"
CLIENTS: Final = {"events": EVENTS, "chat": CHAT, "deltas": DELTAS, "ledger": LEDGER}
FILES_OF: Final = {kind: name_versions(f"client-{kind}") for kind in CLIENTS}
API_KEYS: Final = name_versions("api-keys")


def test_files_of_every_version_exist() -> None:
    for kind, schema in CLIENTS.items():
        assert set(FILES_OF[kind]) == set(range(1, schema.version + 1)), MISSING
    assert set(API_KEYS) == set(range(1, FILE_VERSION_WITH_EXPIRY + 1))


@pytest.mark.parametrize("version", FILES_OF["events"])
def test_events_client_continues_a_file_of_every_version(version: int, tmp_path: Path) -> None:
    file = unpack(FILES_OF["events"][version], tmp_path / "client.db")
    with BlockingClient(UNREACHABLE, path=file, client_id="till", partitions=["orders"]) as client:
        assert [pending.event for pending in client.pending()] == [{"order": 2, "type": "order.placed"}]


@pytest.mark.parametrize("version", FILES_OF["chat"])
def test_chat_client_continues_a_file_of_every_version(version: int, tmp_path: Path) -> None:
    file = unpack(FILES_OF["chat"][version], tmp_path / "client.db")
    with BlockingChatClient(UNREACHABLE, path=file, token="ann") as client:  # noqa: S106
        assert [pending.content for pending in client.pending()] == ["second"]
        assert [line.content for line in client.lines("tea")] == ["first", "second"]


@pytest.mark.parametrize("version", FILES_OF["deltas"])
def test_deltas_client_continues_a_file_of_every_version(version: int, tmp_path: Path) -> None:
    file = unpack(FILES_OF["deltas"][version], tmp_path / "client.db")
    with BlockingDeltasClient(UNREACHABLE, "shop", path=file, client_id="till") as client:
        assert {row.row_id: row.columns for row in client.each_row("products")} == {
            "coffee": {"price": 2},
            "tea": {"price": 1},
        }
        assert [json.loads(pending.body)["rowId"] for pending in client.pending()] == ["coffee"]


@pytest.mark.parametrize("version", FILES_OF["ledger"])
def test_ledger_client_continues_a_file_of_every_version(version: int, tmp_path: Path) -> None:
    store = LedgerStore(unpack(FILES_OF["ledger"][version], tmp_path / "client.db"))
    try:
        assert store.open("till") == [("acme", "")]
        scope = store.load_scope("acme", "")
        assert [(write.sequence, write.operations) for write in scope.pending] == [(2, (SetEntity("invoice/2", b"2"),))]
    finally:
        store.close()


@pytest.mark.parametrize("version", API_KEYS)
def test_api_keys_of_every_version_are_read(version: int, tmp_path: Path) -> None:
    listed = oncelog("apikey", "list", str(unpack(API_KEYS[version], tmp_path / "keys.json")), "--json")
    assert listed.returncode == 0, listed.stderr
    assert "Till in the shop" in listed.stdout
