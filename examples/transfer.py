"""Rows and memory in one transaction: a transfer between accounts that is killed at every statement, one by one.

Run it with `.venv/bin/python examples/transfer.py`. It leaves transfer.db behind, made anew by every run.

Each round asks for a new transfer. Its process is killed right before its first statement, in the next round before its
second, and so on, until it survives; after each death the transfer is asked for again, as a client would do that got no
answer. In the end every transfer happened once: the money says so.
"""

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import oncelog

FILE = Path("transfer.db")
CENTS = 10_000


def transfer(key: str, cents: int, die_before: int = 0) -> int:
    """Moves money, once for a key, and gives what is left. Dies before its n-th statement, our own ones included."""
    connection = sqlite3.connect(FILE)
    log = oncelog.share(connection)
    statements = 0

    def count(_: str) -> None:
        nonlocal statements
        statements += 1
        if statements == die_before:
            os.kill(os.getpid(), signal.SIGKILL)

    @oncelog.once(log, key=lambda key, _: key, name="transfer")
    def move(key: str, cents: int) -> int:
        connection.execute("UPDATE accounts SET cents = cents - ? WHERE name = 'ada'", (cents,))
        connection.execute("UPDATE accounts SET cents = cents + ? WHERE name = 'bob'", (cents,))
        connection.execute("INSERT INTO transfers VALUES (?, ?)", (key, cents))
        (left,) = connection.execute("SELECT cents FROM accounts WHERE name = 'ada'").fetchone()
        return int(left)

    connection.set_trace_callback(count)
    try:
        return move(key, cents)
    finally:
        connection.close()


def make() -> None:
    """A log, and our own tables in its file."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm")):
        name.unlink(missing_ok=True)
    with oncelog.open_blocking(FILE):
        pass
    connection = sqlite3.connect(FILE)
    connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL CHECK (cents >= 0))")
    connection.execute("CREATE TABLE transfers (key TEXT, cents INTEGER)")
    connection.execute("INSERT INTO accounts VALUES ('ada', ?), ('bob', 0)", (CENTS,))
    connection.commit()
    connection.close()


def main() -> None:
    """Tells the story."""
    make()
    processes = multiprocessing.get_context("fork")
    deaths = 0
    while True:
        key, statement = f"transfer-{deaths + 1}", deaths + 1
        first = processes.Process(target=transfer, args=(key, 1, statement))
        first.start()
        first.join()
        if first.exitcode == 0:
            break
        assert first.exitcode == -signal.SIGKILL, first.exitcode
        deaths += 1
        assert transfer(key, 1) == CENTS - deaths
        assert transfer(key, 1) == CENTS - deaths
    transfers = deaths + 1
    connection = sqlite3.connect(FILE)
    accounts = dict(connection.execute("SELECT name, cents FROM accounts").fetchall())
    keys = [key for (key,) in connection.execute("SELECT key FROM transfers ORDER BY rowid")]
    connection.close()
    assert accounts == {"ada": CENTS - transfers, "bob": transfers}, accounts
    assert keys == [f"transfer-{number + 1}" for number in range(transfers)], keys
    print(f"killed before each of its {deaths} statements, and asked for again each time:")
    print(
        f"  {transfers} transfers of 1 cent; ada has {accounts['ada']} and bob {accounts['bob']}: none lost or doubled"
    )


if __name__ == "__main__":
    main()
