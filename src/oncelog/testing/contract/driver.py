"""A store as plain calls, on a clock that is moved by hand."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from oncelog.core.plan import Validate
from oncelog.core.values import Item, LaneHead, Mode, Record, Request, Settings, Verdict
from oncelog.storage.clock import Clock
from oncelog.storage.store import BatchResult, Draw, Page, Query, Store
from oncelog.testing.clock import ManualClock

T = TypeVar("T")

MakeStore = Callable[[ManualClock, Settings | None], Store]
"""Gives a store that is not yet open. Without settings it is opened with those that its log was made with."""


class StoreDriver:
    """A store with an event loop of its own, so that tests need neither `async` nor a plugin."""

    def __init__(self, make_store: MakeStore, settings: Settings, is_durable: bool) -> None:
        self.clock = ManualClock()
        self._make_store = make_store
        self._is_durable = is_durable
        self._runner = asyncio.Runner()
        self.store = make_store(self.clock, settings)
        self.run(self.store.open())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call of the store to its end."""
        return self._runner.run(call)

    def close(self) -> None:
        """Closes store and loop."""
        self.run(self.store.close())
        self._runner.close()

    def reopen(self, settings: Settings | None = None) -> None:
        """Closes the store and opens it anew. One that is not durable is used on."""
        if self._is_durable:
            self.run(self.store.close())
            self.store = self._make_store(self.clock, settings)
            self.run(self.store.open())

    def catch_reopen_error(self, settings: Settings) -> BaseException | None:
        """What opening the store with other settings raises; None if it does not. It is open afterwards as before."""
        self.run(self.store.close())
        other = self._make_store(self.clock, settings)
        error = self.catch_error(other.open())
        if error is None:
            self.run(other.close())
        self.store = self._make_store(self.clock, None)
        self.run(self.store.open())
        return error

    def commit_batch(self, *requests: Request, validate: Validate | None = None) -> BatchResult:
        """Commits requests as one batch."""
        return self.run(self.store.commit(requests, validate))

    def commit_items(
        self,
        *items: Item,
        mode: Mode = Mode.EACH,
        validate: Validate | None = None,
        is_admitted_whole: bool = False,
    ) -> list[Verdict]:
        """Commits items of one request."""
        return self.commit_batch(Request(items, mode, is_admitted_whole), validate=validate).verdicts[0]

    def __call__(self, item: Item) -> Verdict:
        """Commits one item."""
        return self.commit_items(item)[0]

    def read_page(self, **query: Any) -> Page:
        """Reads one page."""
        return self.run(self.store.read(Query(**query)))

    def read_all(self, **query: Any) -> list[Record]:
        """Reads from page to page to the end."""
        page = self.read_page(**query)
        records = list(page.records)
        while page.has_more:
            page = self.read_page(**{**query, "after": page.next})
            records += page.records
        return records

    def heads(self) -> dict[int, LaneHead]:
        """The heads of all lanes."""
        return dict(self.run(self.store.heads()))

    def catch_error(self, call: Coroutine[Any, Any, Any]) -> BaseException | None:
        """What a call raises; None if it does not."""
        try:
            self.run(call)
        except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
            return error
        return None


class Contract:
    """What the parts of the contract have in common: how a store is made."""

    is_durable: ClassVar[bool] = True
    """Whether a store that is closed and made again has what was in it."""

    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:
        """A store that is not yet open. Called again with the same path it must give the same log.

        None for settings means those that the log was made with.
        """
        raise NotImplementedError

    @contextmanager
    def open_store(self, tmp_path: Path, settings: Settings | None = None) -> Iterator[StoreDriver]:
        """A store for one test."""

        def make(clock: ManualClock, its_settings: Settings | None) -> Store:
            return self.make_store(tmp_path, clock, its_settings, make_salt_source())

        log = StoreDriver(make, settings or Settings(), self.is_durable)
        try:
            yield log
        finally:
            log.close()


def make_salt_source() -> Draw:
    """Salts that differ from record to record and are the same in every run."""
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += size
        return b"".join((drawn + place).to_bytes(8, "big") for place in range(0, size, 8))[:size]

    return draw


def list_positions(records: Sequence[Record]) -> list[int]:
    """Where the records stand in their lane."""
    return [record.position for record in records]
