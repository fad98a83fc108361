"""`oncelog verify` finds violations of the specification's four invariants in a log that a server has filled.

test_chat_failures.py checks the invariants on recorded histories.
"""

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from databases import BOTH_STORES, is_postgres, log_at, query
from oncelog.core.chat import encode_message, message_fingerprint
from oncelog.core.policy import BUILT_IN_POLICIES, CHAT
from oncelog.core.values import Record, Settings
from oncelog.storage.verify.findings import InconsistencyError
from oncelog.storage.verify.indexes import check_uniqueness
from oncelog.storage.verify.source import LogState
from server.chat.chat_servers import message_uuid, run_server
from server.cli_commands import oncelog
from storage.older_schema import WITHOUT_ROLES, downgrade_to_schema_4

_SAME_KEY = "UPDATE oncelog_records SET key = (SELECT key FROM oncelog_records WHERE scope = 'chat/a' AND sequence = 1)"
WEEK_MS = 7 * 24 * 3600 * 1000


def execute(path: Path, statement: str) -> None:
    """Execute a statement in the log's database."""
    if is_postgres():
        query(log_at(path), statement)
        return
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


async def fill(directory: Path) -> None:
    async with run_server(directory) as server:
        for chat in ("a", "b"):
            await server.create(chat, "ann", "bob")
            ann, bob = await server.connect("ann"), await server.connect("bob")
            for number in range(1, 6):
                await ann.send_committed(chat, number)
                await bob.send_committed(chat, number)  # a duplicate
            await bob.acknowledge(chat, 3)
            await server.wait_for_watermark(chat, "bob", 3)
            await server.set_member(chat, "ann", "eve")
            await server.set_member(chat, "ann", "eve", present=False)
        await server.create("empty", "ann")


class FilledStores(dict[str, Path]):
    """Directories of logs that a server has filled, by store. The first test that needs a log fills it."""

    def __init__(self, paths: pytest.TempPathFactory) -> None:
        super().__init__()
        self._paths = paths

    async def get_filled(self, store_kind: str) -> Path:
        if store_kind not in self:
            directory = self._paths.mktemp("filled")
            await fill(directory)
            verified = await oncelog("verify", log_at(directory / "events.db"))
            assert verified.exit_code == 0, verified.output
            self[store_kind] = directory
        return self[store_kind]


@pytest.fixture(scope="session")
def filled_stores(tmp_path_factory: pytest.TempPathFactory) -> FilledStores:
    return FilledStores(tmp_path_factory)


@contextmanager
def restore_afterwards(path: Path, table: str) -> Iterator[None]:
    """Restore the table's rows at the end of the block."""
    execute(path, f"CREATE TABLE kept AS SELECT * FROM {table}")  # noqa: S608
    try:
        yield
    finally:
        for statement in (f"DELETE FROM {table}", f"INSERT INTO {table} SELECT * FROM kept", "DROP TABLE kept"):  # noqa: S608
            execute(path, statement)


@BOTH_STORES
@pytest.mark.rule("CH-13")
@pytest.mark.parametrize(
    ("sqlite", "postgres", "words"),
    [
        (  # delivery_state_consistency
            "UPDATE oncelog_acknowledged SET sequence = 6 WHERE scope = 'chat/a'",
            "UPDATE oncelog_acknowledged SET sequence = 6 WHERE scope = 'chat/a'",
            "'user:bob' has acknowledged 6 of 'chat/a', which ends at 5",
        ),
        (  # sync_completeness: the index by sequence
            "DELETE FROM oncelog_stream_records WHERE scope = 'chat/a' AND sequence = 5",
            "UPDATE oncelog_streams SET sequence = 4 WHERE scope = 'chat/a'",
            "chat/a",
        ),
        (  # sequence_monotonic
            "UPDATE oncelog_records SET sequence = 9 WHERE scope = 'chat/a' AND sequence = 2",
            "UPDATE oncelog_records SET sequence = 9 WHERE scope = 'chat/a' AND sequence = 2",
            "",
        ),
        (  # idempotency_guarantee
            f"{_SAME_KEY} WHERE scope = 'chat/a' AND sequence = 2",
            f"{_SAME_KEY} WHERE scope = 'chat/a' AND sequence = 2",
            "",
        ),
        (
            "DELETE FROM oncelog_streams WHERE scope = 'chat/empty'",
            "DELETE FROM oncelog_streams WHERE scope = 'chat/empty'",
            "'user:ann' is or was a member of 'chat/empty', which is not in the table of streams",
        ),
        (
            "UPDATE oncelog_member_changes SET revision = revision + 1000",
            "UPDATE oncelog_member_changes SET revision = revision + 1000",
            "changed at revision",
        ),
    ],
)
async def test_verify_command_finds_a_violated_invariant(
    filled_stores: FilledStores, store_kind: str, sqlite: str, postgres: str, words: str
) -> None:
    path = await filled_stores.get_filled(store_kind) / "events.db"
    statement = postgres if is_postgres() else sqlite
    table = re.findall(r"oncelog_\w+", statement)[0]
    with restore_afterwards(path, table):
        execute(path, statement)
        found = await oncelog("verify", log_at(path))
    assert found.exit_code == 1
    assert words in found.output


def _message(position: int, number: int, log_time_ms: int) -> Record:
    body = encode_message("x", "text/plain")
    return Record(
        1,
        position,
        position,
        log_time_ms,
        position,
        CHAT.name,
        "chat/a",
        bytes.fromhex(message_uuid(number).replace("-", "")),
        message_fingerprint("user:ann", body),
        "user:ann",
        "",
        0,
        (),
        body,
    )


@pytest.mark.rule("CH-13", "CH-5")
def test_id_may_be_stored_again_only_after_it_has_expired() -> None:
    rules = LogState(Settings(), {policy.name: policy for policy in BUILT_IN_POLICIES})
    first = _message(1, 1, 1000)
    check_uniqueness([first, _message(2, 2, 1000), _message(3, 1, 1000 + WEEK_MS)], rules, lambda *_: 0)
    with pytest.raises(InconsistencyError, match="repeats an identity of chat 'chat/a'"):
        check_uniqueness([first, _message(2, 1, 999 + WEEK_MS)], rules, lambda *_: 0)


@BOTH_STORES
@pytest.mark.rule("CH-13", "CH-9")
async def test_members_of_an_older_schema_version_are_migrated(tmp_path: Path) -> None:
    """The older schema has no table of member changes and no rows for empty streams."""
    async with run_server(tmp_path) as server:
        await server.create("old", "ann", "bob")
    await asyncio.to_thread(_downgrade, tmp_path / "events.db")
    async with run_server(tmp_path) as server:
        taken = await server.http("POST", "/v1/chats", "eve", {"chat_id": "old"})
        assert taken.status == 403
        ann, bob = await server.connect("ann"), await server.connect("bob")
        await ann.send_committed("old", 1)
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 1
        assert (await server.http("GET", "/v1/chats", "bob")).json["chats"][0]["chat_id"] == "old"
    verified = await oncelog("verify", log_at(tmp_path / "events.db"))
    assert verified.exit_code == 0, verified.output


def _downgrade(path: Path) -> None:
    if is_postgres():
        downgrade_to_schema_4(log_at(path))
    statements = [
        "DROP TABLE oncelog_usage",
        "ALTER TABLE oncelog_state DROP COLUMN tenants",
        "DROP TABLE oncelog_member_changes",
        "DROP INDEX oncelog_members_member",
        "DELETE FROM oncelog_streams",
        f"UPDATE oncelog_log SET schema_version = {2 if is_postgres() else 4}",  # noqa: S608
    ]
    if not is_postgres():
        statements += [
            *WITHOUT_ROLES,
            "DROP TABLE oncelog_floors",
            "ALTER TABLE oncelog_state DROP COLUMN leaps",
            "DROP TABLE oncelog_horizons",
            "DROP TABLE oncelog_key_runs",  # empty in this log
            "CREATE TABLE oncelog_keys (segment INTEGER, hash INTEGER, place INTEGER)",
        ]
    for statement in statements:
        execute(path, statement)
