"""What a log knows besides records: clients, members, leases, consumers, policies, and the tables themselves."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any, Final

import msgspec

from oncelog.core.policy import Policy
from oncelog.core.values import Record
from oncelog.statements import statements_of
from oncelog.stores.side_state import TABLES, Table, lane_of_scope
from oncelog.stores.sqlite.findings import ContradictionError, Progress
from oncelog.stores.sqlite.reading import consumers, heads
from oncelog.stores.sqlite.statements import SQL, migrations
from oncelog.stores.sqlite.verifying_chain import Rules
from oncelog.stores.sqlite.verifying_index import REPORT_ROWS, in_order

_CLIENT_KEY: Final = 4
"""Lane, policy, scope and client are the key of a client's entry."""


def check_structure(connection: Any) -> None:
    """SQLite's own check of the file. There is no index beside the tables, so the quick one sees all."""
    found = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found is None or found[0] != "ok":
        raise ContradictionError("SQLite finds the file damaged: " + " ".join(str(found and found[0]).split()))


def check_schema(connection: Any) -> None:
    """Our tables are the ones that the migrations make."""
    wanted = _schema_of_migrations()
    found = dict(connection.execute(SQL["schema"]))
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ContradictionError(f"the table {name} is not as Oncelog makes it")


@cache
def _schema_of_migrations() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:")) as made:
        for _, script in migrations():
            for statement in statements_of(script):
                made.execute(statement)
        return dict(made.execute(SQL["schema"]))


def declared(connection: Any) -> dict[str, Policy]:
    """The policies, by name."""
    policies = {}
    for name, declaration in connection.execute(SQL["policies"]):
        try:
            policy = msgspec.json.decode(declaration, type=Policy)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ContradictionError(f"the declaration of the policy {name!r} cannot be read: {error}") from error
        if policy.name != name:
            raise ContradictionError(f"the policy {name!r} is declared with the name {policy.name!r}")
        policies[name] = policy
    return policies


class ClientBooks:
    """Where each client stands after its newest record. There may be many, so they are kept in a file of their own."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._evictions_ms: dict[int, int] = {}
        self._kept = sqlite3.connect("", isolation_level=None)  # SQLite deletes it when it is closed
        self._kept.execute("PRAGMA journal_mode = OFF")
        self._kept.execute(
            "CREATE TABLE clients (lane, policy, scope, client, sequence, last_seen_ms, last_key, last_fingerprint, "
            "PRIMARY KEY (lane, policy, scope, client)) WITHOUT ROWID"
        )
        self._kept.execute("BEGIN")

    def close(self) -> None:
        """Lets the file go."""
        self._kept.close()

    def take(self, record: Record) -> None:
        """As `Books` says. A client's numbers go up by one, and from 1 again once it has been forgotten."""
        if record.client_sequence:
            identity = (record.lane, record.policy, record.scope, record.client)
            row = self._kept.execute(
                "SELECT sequence, last_seen_ms FROM clients WHERE lane = ? AND policy = ? AND scope = ? AND client = ?",
                identity,
            ).fetchone()
            last = row[0] if row is not None and self._remembers(record.policy, record.lane, row[1]) else 0
            if record.client_sequence != last + 1:
                raise ContradictionError(
                    f"client {record.client!r} of {record.scope!r} has sequence {record.client_sequence} after {last}",
                    record.lane,
                    record.position,
                )
            entry = (record.client_sequence, record.log_time_ms, record.key, record.fingerprint)
            self._kept.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*identity, *entry))
        if record.position % self._rules.settings.eviction_interval == 0:
            self._evictions_ms[record.lane] = record.log_time_ms

    def check(self, connection: Any) -> None:
        """The entries that the log keeps, against those of the records: both in one order, side by side."""
        kept = iter(self._kept.execute("SELECT * FROM clients ORDER BY lane, policy, scope, client"))
        wanted = next(kept, None)
        for row in in_order(connection, "all_clients", _CLIENT_KEY, "the table of clients"):
            while wanted is not None and wanted[:_CLIENT_KEY] < row[:_CLIENT_KEY]:
                self._check_absent(wanted)
                wanted = next(kept, None)
            if wanted is None or wanted[:_CLIENT_KEY] != row[:_CLIENT_KEY]:
                raise ContradictionError(f"client {row[3]!r} of {row[2]!r} has an entry, but no record", row[0])
            if wanted != row:
                raise ContradictionError(
                    f"the entry of client {row[3]!r} of {row[2]!r} (sequence {row[4]}) is not that of its newest "
                    f"record (sequence {wanted[4]})",
                    row[0],
                )
            wanted = next(kept, None)
        while wanted is not None:
            self._check_absent(wanted)
            wanted = next(kept, None)

    def _check_absent(self, entry: tuple[Any, ...]) -> None:
        lane, policy, scope, client, sequence, last_seen_ms, *_ = entry
        if self._remembers(policy, lane, last_seen_ms):
            raise ContradictionError(f"client {client!r} of {scope!r} has no entry, though it got to {sequence}", lane)

    def _remembers(self, policy: str, lane: int, since_ms: int) -> bool:
        # Clients are never forgotten by age alone (Policy says so), so the log time has no part in it.
        eviction_time_ms = self._evictions_ms.get(lane, 0)
        return self._rules.policies[policy].retention.remembers(since_ms, since_ms, eviction_time_ms)


def check_side_state(connection: Any, rules: Rules) -> Iterator[Progress]:
    """Everything else can be read, is in its lane, and is not beyond its stream or lane."""
    lanes = heads(connection).keys()
    for table in TABLES:
        yield from _check_table(connection, table, rules, lanes)
    beyond = connection.execute(SQL["acknowledged_beyond"]).fetchone()
    if beyond is not None:
        lane, scope, member, sequence, newest = beyond
        raise ContradictionError(f"{member!r} has acknowledged {sequence} of {scope!r}, which ends at {newest}", lane)
    beyond = connection.execute(SQL["lease_beyond"]).fetchone()
    if beyond is not None:
        lane, policy, scope, key_hex, fence, newest = beyond
        raise ContradictionError(
            f"the lease of {policy!r} {scope!r} {key_hex!r} has fence {fence}, and the lane gave out {newest} at most",
            lane,
        )
    for consumer in consumers(connection, rules.settings.lanes):
        if consumer.cursor < 0 or consumer.lag < 0:
            order = f"the stream {consumer.scope!r}" if consumer.scope else "lane 0"
            raise ContradictionError(
                f"the consumer {consumer.name!r} is at {consumer.cursor}, and {order} ends at "
                f"{consumer.cursor + consumer.lag}"
            )


def _check_table(connection: Any, table: Table, rules: Rules, lanes: Any) -> Iterator[Progress]:
    columns = ", ".join(("lane", *table.keys, *table.values))
    statement = f"SELECT {columns} FROM oncelog_{table.name} ORDER BY lane, {', '.join(table.keys)}"  # noqa: S608
    before: tuple[Any, ...] | None = None
    width = 1 + len(table.keys)
    for count, row in enumerate(connection.execute(statement), 1):
        where = f"the table oncelog_{table.name}"
        if before is not None and row[:width] <= before:
            raise ContradictionError(f"{where} is out of order at {row[:width]!r}")
        before = row[:width]
        try:
            key = table.key_of(row[1:width])
            table.value_of(row[width:])
        except (msgspec.MsgspecError, ValueError) as error:
            raise ContradictionError(f"{where} cannot be read at {row[:width]!r}: {error}", row[0]) from error
        if row[0] not in lanes or lane_of_scope(table.scope(key), rules.settings.lanes) != row[0]:
            raise ContradictionError(f"{where} has {row[:width]!r} in a lane where it does not belong", row[0])
        if count % REPORT_ROWS == 0:
            yield Progress(table.name, count)
