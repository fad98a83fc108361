"""Each typical mistake of a user gives an error that names the fault, its place and the remedy."""

import re
from pathlib import Path

import pytest

from mistakes import (
    client_mistakes,
    command_mistakes,
    log_mistakes,
    server_mistakes,
    setting_mistakes,
    storage_mistakes,
    work_mistakes,
)
from mistakes.mistake import Mistake
from mistakes.workplace import Workplace

TABLES = {
    "log": log_mistakes.MISTAKES,
    "work": work_mistakes.MISTAKES,
    "client": client_mistakes.MISTAKES,
    "command": command_mistakes.MISTAKES,
    "settings": setting_mistakes.MISTAKES,
    "server": server_mistakes.MISTAKES,
    "storage": storage_mistakes.MISTAKES,
}
PAGE = Path(__file__).parents[2] / "docs/guides/mistakes.md"
ON_PAGE = {
    "log: with instead of async with": "oncelog.open(…) needs …",
    "log: log that was never opened": "the log is not open; …",
    "log: log of another event loop": "the log was opened in another thread or event loop: …",
    "log: datetime in an event": "$.event.at: a value of type datetime has no JSON form; …",
    "log: one partition instead of a list": "$.partitions: must be a list (array) of strings, not str",
    "log: unwrapped refusal": "identity_reused: …",
    "log: cursor of another log": "the cursor belongs to epoch …",
    "work: key used for different work": "the key '…' of '…' was already used with different arguments …",
    "work: argument that cannot identify the call": "$.till: … list it in ignore=…",
    "client: server that does not run": "… cannot be reached: Connection refused (is the server running at this URL?)",
    "client: https for a server without tls": "… cannot be used: the server does not use TLS at this port: use http://",
    "client: url with a wrong path": "… no Oncelog server at …: check the URL",
    "client: wrong token": "… authentication failed: …",
    "client: token without the grant": "… the credential has no write access to some of them; …",
    "client: file that is opened twice": "another client has … open; each needs its own file",
    "client: file with other partitions": "… was created for the partitions …",
    "settings: misspelt setting": "…: unknown setting '…'; did you mean …?",
    "settings: no way to authenticate": "no caller could authenticate: …",
    "command: port taken": "cannot listen on …: Address already in use; …",
    "settings: readable secret": "… other users may read or change it (its mode is 0644). …",
    "log: database of another program": "… is an SQLite database, but not a log. …",
    "log: log of a newer version": "… was created by a newer Oncelog …",
    "log: other lanes than the log has": "… was created with … which cannot change, and cannot be opened with …",
    "storage: full disk": "… database or disk is full [SQLITE_FULL]; free space…",
    "storage: wrong database password": (
        "… password authentication failed … (check the user and the password in the address)"
    ),
    "database: missing database": (
        '… database "…" does not exist (create it with CREATE DATABASE, or correct the address)'
    ),
}
"""Messages in docs/guides/mistakes.md, by mistake."""
CASES = [
    pytest.param(area, mistake, id=f"{area}: {mistake.name}") for area, table in TABLES.items() for mistake in table
]


@pytest.mark.parametrize(("area", "mistake"), CASES)
async def test_error_message_says_what_to_do(area: str, mistake: Mistake, workplace: Workplace) -> None:
    await check_message(area, mistake, workplace)


@pytest.mark.parametrize("mistake", storage_mistakes.DATABASE_MISTAKES, ids=lambda mistake: mistake.name)
async def test_database_error_says_what_to_do(mistake: Mistake, workplace: Workplace, database: str) -> None:
    await check_message("database", mistake, workplace)


async def check_message(area: str, mistake: Mistake, workplace: Workplace) -> None:
    """Make a mistake and check its message, also with the page."""
    message = await mistake.make(workplace)
    mistake.check(message, workplace.secrets)
    on_page = ON_PAGE.get(f"{area}: {mistake.name}", "…")
    pattern = ".*".join(re.escape(part) for part in on_page.split("…"))
    assert re.search(pattern, " ".join(message.split()), re.DOTALL)


def test_page_lists_messages_of_these_mistakes() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(ON_PAGE.values())


def test_list_has_at_least_eighty_different_mistakes() -> None:
    names = [case.id for case in CASES]
    assert len(names) == len(set(names)) >= 80
