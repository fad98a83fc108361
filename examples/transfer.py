"""Rows and a stored result in one transaction: a transfer between accounts that is killed at every statement.

Run it with `.venv/bin/python examples/transfer.py`. Each run recreates transfer.db.

Each round requests a new transfer. In the first round the process is killed before its first statement, in the next
round before its second, and so on, until a round survives. After each kill the transfer is requested again, as a client
that received no answer would do. At the end the balances show that every transfer happened once.
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
    """Move money once for each key, and return the remaining balance.

    The process kills itself before statement number `die_before`, counting Oncelog's statements and its own.
    """
    connection = sqlite3.connect(FILE)
    log = oncelog.share(connection)
    statements = 0

    def count_statement(_: str) -> None:
        nonlocal statements
        statements += 1
        if statements == die_before:
            os.kill(os.getpid(), signal.SIGKILL)

    @oncelog.once(log, key=lambda key, _: key, name="transfer")
    def move(key: str, cents: int) -> int:
        connection.execute("UPDATE accounts SET cents = cents - ? WHERE name = 'ada'", (cents,))
        connection.execute("UPDATE accounts SET cents = cents + ? WHERE name = 'bob'", (cents,))
        connection.execute("INSERT INTO transfers VALUES (?, ?)", (key, cents))
        (balance,) = connection.execute("SELECT cents FROM accounts WHERE name = 'ada'").fetchone()
        return int(balance)

    connection.set_trace_callback(count_statement)
    try:
        return move(key, cents)
    finally:
        connection.close()


def create_tables() -> None:
    """Create a log, and the application's tables in the same file."""
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
    """Kill a transfer at each of its statements, and check the balances."""
    create_tables()
    processes = multiprocessing.get_context("fork")
    kills = 0
    while True:
        key, statement = f"transfer-{kills + 1}", kills + 1
        first = processes.Process(target=transfer, args=(key, 1, statement))
        first.start()
        first.join()
        if first.exitcode == 0:
            break
        assert first.exitcode == -signal.SIGKILL, first.exitcode
        kills += 1
        assert transfer(key, 1) == CENTS - kills
        assert transfer(key, 1) == CENTS - kills
    transfers = kills + 1
    connection = sqlite3.connect(FILE)
    accounts = dict(connection.execute("SELECT name, cents FROM accounts").fetchall())
    keys = [key for (key,) in connection.execute("SELECT key FROM transfers ORDER BY rowid")]
    connection.close()
    assert accounts == {"ada": CENTS - transfers, "bob": transfers}, accounts
    assert keys == [f"transfer-{number + 1}" for number in range(transfers)], keys
    print(f"killed before each of its {kills} statements, and requested again each time:")
    print(f"  {transfers} transfers of 1 cent; ada has {accounts['ada']} and bob {accounts['bob']}: no cent is missing")


if __name__ == "__main__":
    main()
