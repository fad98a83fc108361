"""The four invariants of the seed on a store that the door has filled: they hold, and a store where one does not is
found out by `oncelog verify`. test_chat_failures.py has them on recorded histories."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from databases import BOTH_STORES, is_postgres, log_at, query
from doors.chat.chat_doors import message_uuid, opened
from doors.serving import run
from oncelog.cli import app
from oncelog.core.chat import message_body, message_fingerprint
from oncelog.core.policy import BUILT_IN, CHAT
from oncelog.core.values import Record, Settings
from oncelog.stores.verifying.findings import ContradictionError
from oncelog.stores.verifying.identities import judge
from oncelog.stores.verifying.source import Rules

_SAME_KEY = "UPDATE oncelog_records SET key = (SELECT key FROM oncelog_records WHERE scope = 'chat/a' AND sequence = 1)"
WEEK_MS = 7 * 24 * 3600 * 1000


def changed(path: Path, sqlite: str, postgres: str) -> None:
    """Does something to the store that no log does."""
    if is_postgres():
        query(log_at(path), postgres)
        return
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(sqlite)
        connection.commit()


async def fill(directory: Path) -> None:
    async with opened(directory) as door:
        for chat in ("a", "b"):
            await door.create(chat, "ann", "bob")
            ann, bob = await door.device("ann"), await door.device("bob")
            for number in range(1, 6):
                await ann.sent(chat, number)
                await bob.sent(chat, number)  # a duplicate, and told so
            await bob.acknowledge(chat, 3)
            await door.watermark(chat, "bob", 3)
            await door.set_member(chat, "ann", "eve")
            await door.set_member(chat, "ann", "eve", present=False)
        await door.create("empty", "ann")


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
        (  # sync_completeness: what is read by sequence
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
            "has changed at revision",
        ),
    ],
)
def test_a_store_in_which_one_does_not_hold_is_found_out(
    tmp_path: Path, sqlite: str, postgres: str, words: str
) -> None:
    run(fill(tmp_path))
    store = log_at(tmp_path / "events.db")
    whole = CliRunner().invoke(app, ["verify", store])
    assert whole.exit_code == 0, whole.output
    changed(tmp_path / "events.db", sqlite, postgres)
    found = CliRunner().invoke(app, ["verify", store])
    assert found.exit_code == 1
    assert words in found.output


def _message(position: int, number: int, log_time_ms: int) -> Record:
    body = message_body("x", "text/plain")
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
def test_an_id_is_stored_twice_only_when_it_was_forgotten() -> None:
    rules = Rules(Settings(), {policy.name: policy for policy in BUILT_IN})
    first = _message(1, 1, 1000)
    judge([first, _message(2, 2, 1000), _message(3, 1, 1000 + WEEK_MS)], rules, lambda *_: 0)
    with pytest.raises(ContradictionError, match="stores an identity of chat 'chat/a' again"):
        judge([first, _message(2, 1, 999 + WEEK_MS)], rules, lambda *_: 0)


@BOTH_STORES
@pytest.mark.rule("CH-13", "CH-9")
def test_what_an_older_log_has_of_members_is_taken_along(tmp_path: Path) -> None:
    """A log from before: its members are in no table of changes, and their empty streams in none of streams."""

    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.create("old", "ann", "bob")
        await asyncio.to_thread(_as_before, tmp_path / "events.db")
        async with opened(tmp_path) as door:
            taken = await door.http("POST", "/v1/chats", "eve", {"chat_id": "old"})
            assert taken.status == 403
            ann, bob = await door.device("ann"), await door.device("bob")
            await ann.sent("old", 1)
            assert (await bob.take(type="message"))["sequence"] == 1
            assert (await door.http("GET", "/v1/chats", "bob")).json["chats"][0]["chat_id"] == "old"

    run(main())
    verified = CliRunner().invoke(app, ["verify", log_at(tmp_path / "events.db")])
    assert verified.exit_code == 0, verified.output


def _as_before(path: Path) -> None:
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
            "DROP TABLE oncelog_key_runs",  # which is empty
            "CREATE TABLE oncelog_keys (segment INTEGER, hash INTEGER, place INTEGER)",
        ]
    for statement in statements:
        changed(path, statement, statement)
