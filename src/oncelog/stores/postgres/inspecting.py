"""Looking at a log in a database, for the command line."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.stores.about import About
from oncelog.stores.address import shown
from oncelog.stores.clock import ClockMark, SystemClock
from oncelog.stores.key_hash import hashes_of
from oncelog.stores.leaps import NO_OPERATOR, LaneGaps, Operator, Renewed
from oncelog.stores.postgres import reading, tenants
from oncelog.stores.postgres.connecting import Timeouts
from oncelog.stores.postgres.database import demand_database, look
from oncelog.stores.postgres.looking import Looking, in_our_words, looking_at, session_at
from oncelog.stores.postgres.standing import standing_of
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.store import PostgresStore
from oncelog.stores.postgres.timing import ShownClock
from oncelog.stores.postgres.verifying import verify_database
from oncelog.stores.protocol import Consumer, Standing
from oncelog.stores.verifying.findings import DEFAULT_OPTIONS, ExportedHead, Finding, Options
from oncelog.stores.viewing import SCAN_PAGE_RECORDS, TimeSeen

_NAMES_PAGE_ROWS: Final = 5_000
_RENEWING: Final = Timeouts(lane_ms=60_000)
"""A leap writes a row for each stream, in one transaction."""


class DatabaseView:
    """See `View` for what each method promises."""

    def __init__(self, session: Looking, about: About) -> None:
        self._session = session
        self.about = about

    def heads(self) -> dict[int, LaneHead]:
        """As `View` says."""
        return self._session.call(reading.heads)

    def gaps(self) -> dict[int, LaneGaps]:
        """As `View` says."""
        return self._session.call(reading.gaps)

    def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `View` says."""
        return self._session.call(reading.internal_records, after, limit)

    def count_audit(self) -> int:
        """As `View` says."""
        return self._session.call(reading.count_audit)

    def policies(self) -> list[tuple[str, str]]:
        """As `View` says."""
        return [(name, declaration) for name, declaration in self._session.rows(SQL["policies"])]

    def consumers(self) -> list[Consumer]:
        """As `View` says."""
        return self._session.call(reading.consumers)

    def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `View` says."""
        return self._session.call(tenants.usage)

    def erasures(self) -> int:
        """As `View` says."""
        return int(self._only("erasures"))

    def standing(self, identity: KeyIdentity) -> Standing:
        """As `View` says."""
        return self._session.call(standing_of, identity, self.about)

    def known(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `View` says."""
        hashes = hashes_of(self.about.index_secret, identities)
        rows = self._session.rows(SQL["keys"], list(hashes.values()))
        stored = {
            (policy, scope, client if number else "", key) for *_, number, policy, scope, client, key, _, _ in rows
        }
        return [one for one in identities if one in stored]

    def streams(self) -> Iterator[str]:
        """As `View` says."""
        return (scope for (scope,) in self._session.rows(SQL["scopes"], page_rows=_NAMES_PAGE_ROWS))

    def clients(self) -> Iterator[tuple[str, str, str]]:
        """As `View` says."""
        rows = self._session.rows(SQL["client_names"], page_rows=_NAMES_PAGE_ROWS)
        return ((policy, scope, client) for policy, scope, client in rows)

    def leased(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """As `View` says."""
        rows = self._session.rows(SQL["leases_of_key"], key.hex(), limit)
        return [(policy, scope, client, key) for policy, scope, client in rows]

    def record_estimate(self) -> int:
        """As `View` says. It is the estimate of PostgreSQL's planner."""
        return int(self._only("record_estimate"))

    def scan(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """As `View` says. By rows, not by positions: there may be long gaps between those."""
        for lane, head in self.heads().items():
            position = 0
            while position < head.position:
                row = self._session.first(SQL["page_end"], lane, position, SCAN_PAGE_RECORDS)
                last, count = row or (None, 0)
                if last is None:
                    break
                rows = self._session.rows(SQL["records_of_keys"], lane, position, last, list(keys))
                yield count, [(policy, scope, client, key) for policy, scope, client, key in rows]
                position = last

    def record_at(self, lane: int, position: int) -> Record | None:
        """As `View` says."""
        row = self._session.first(SQL["records_at"], lane, [position])
        return None if row is None else reading.record_of(row)

    def block_at(self, lane: int, height: int) -> Block | None:
        """As `View` says."""
        row = self._session.first(SQL["block"], lane, height)
        return None if row is None else Block(*row)

    def time(self) -> TimeSeen:
        """As `View` says. A gateway's mark says something only on the machine that it runs on."""
        system = SystemClock()
        row = self._session.first(SQL["look_at_state"], system.boot())
        database_ms, _, _, elapsed_ms, time_ms = row or (0, 0, 0, None, None)
        mark = ClockMark() if elapsed_ms is None else ClockMark(system.boot(), elapsed_ms, time_ms)
        blindness = "no gateway on this machine has noted the time since it was started"
        newest_ms = self._only("newest_time")
        return TimeSeen(ShownClock(database_ms, system), "database's clock", mark, newest_ms, blindness)

    def sizes(self) -> dict[str, Any]:
        """As `View` says."""
        sizes = dict(self._session.rows(SQL["sizes"]))
        return {"server": self._only_of("SHOW server_version"), "bytes": sum(sizes.values()), "tables": sizes}

    def _only(self, statement: str) -> Any:
        return self._only_of(SQL[statement])

    def _only_of(self, statement: str) -> Any:
        row = self._session.first(statement)
        return None if row is None else row[0]


class DatabaseInspector:
    """See `Inspector` for what each method promises."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def looking(self) -> Iterator[DatabaseView]:
        """As `Inspector` says."""
        with looking_at(self._address) as (session, about):
            yield DatabaseView(session, about)

    def verify(self, head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """As `Inspector` says."""
        return verify_database(self._address, head, options)

    def confirm_clock(self) -> None:
        """As `Inspector` says. All gateways believe it."""
        with looking_at(self._address) as (session, _):  # a store would make a log where there is none
            session.call(demand_database, shown(self._address))

        async def confirmed() -> None:
            store = PostgresStore(self._address)
            await store.open()
            try:
                await store.confirm_clock()
            finally:
                await store.close()

        with in_our_words(shown(self._address)):
            asyncio.run(confirmed())

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> Renewed:
        """As `Inspector` says. Open servers notice it with their next commit or look, and must be started again."""
        with session_at(self._address) as session:  # a store would create a missing log, and migrates an older one
            session.call(demand_database, shown(self._address))
            session.call(look, shown(self._address))

        async def renewed() -> Renewed:
            store = PostgresStore(self._address, timeouts=_RENEWING)
            await store.open()
            try:
                return await store.renew(above, operator)
            finally:
                await store.close()

        with in_our_words(shown(self._address)):
            return asyncio.run(renewed())


def inspector_of(address: str) -> DatabaseInspector:
    """For a database. Raises SettingsError for an address that cannot be read."""
    shown(address)
    return DatabaseInspector(address)
