"""Synchronous calls to a store, on a clock that the tests control."""

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
"""Creates an unopened store. Without settings, the store uses the settings of its log."""


class StoreDriver:
    """A store with a separate event loop, so that tests need neither `async` nor a plugin."""

    def __init__(self, make_store: MakeStore, settings: Settings, is_durable: bool) -> None:
        self.clock = ManualClock()
        self._make_store = make_store
        self._is_durable = is_durable
        self._runner = asyncio.Runner()
        self.store = make_store(self.clock, settings)
        self.run(self.store.open())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call to the store and return its result."""
        return self._runner.run(call)

    def close(self) -> None:
        """Close the store and the event loop."""
        self.run(self.store.close())
        self._runner.close()

    def reopen(self, settings: Settings | None = None) -> None:
        """Close the store and open it again. A store that is not durable is left open."""
        if self._is_durable:
            self.run(self.store.close())
            self.store = self._make_store(self.clock, settings)
            self.run(self.store.open())

    def catch_reopen_error(self, settings: Settings) -> BaseException | None:
        """Return the error raised by opening the store with different settings, or None.

        Afterwards, the store is open as before.
        """
        self.run(self.store.close())
        other = self._make_store(self.clock, settings)
        error = self.catch_error(other.open())
        if error is None:
            self.run(other.close())
        self.store = self._make_store(self.clock, None)
        self.run(self.store.open())
        return error

    def commit_batch(self, *requests: Request, validate: Validate | None = None) -> BatchResult:
        """Commit requests as one batch."""
        return self.run(self.store.commit(requests, validate))

    def commit_items(
        self,
        *items: Item,
        mode: Mode = Mode.EACH,
        validate: Validate | None = None,
        is_admitted_whole: bool = False,
    ) -> list[Verdict]:
        """Commit items as one request."""
        return self.commit_batch(Request(items, mode, is_admitted_whole), validate=validate).verdicts[0]

    def __call__(self, item: Item) -> Verdict:
        """Commit one item."""
        return self.commit_items(item)[0]

    def read_page(self, **query: Any) -> Page:
        """Read one page."""
        return self.run(self.store.read(Query(**query)))

    def read_all(self, **query: Any) -> list[Record]:
        """Read all pages."""
        page = self.read_page(**query)
        records = list(page.records)
        while page.has_more:
            page = self.read_page(**{**query, "after": page.next})
            records += page.records
        return records

    def heads(self) -> dict[int, LaneHead]:
        """Return the heads of all lanes."""
        return dict(self.run(self.store.heads()))

    def catch_error(self, call: Coroutine[Any, Any, Any]) -> BaseException | None:
        """Return the error that a call raises, or None."""
        try:
            self.run(call)
        except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
            return error
        return None


class Contract:
    """Base class for the parts of the contract; opens the stores."""

    is_durable: ClassVar[bool] = True
    """Whether the content of a store survives closing it."""

    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:
        """Create an unopened store. A repeated call with the same path must return the same log.

        Without `settings`, the log's own settings apply.
        """
        raise NotImplementedError

    @contextmanager
    def open_store(self, tmp_path: Path, settings: Settings | None = None) -> Iterator[StoreDriver]:
        """Open a store for one test."""

        def make(clock: ManualClock, its_settings: Settings | None) -> Store:
            return self.make_store(tmp_path, clock, its_settings, make_salt_source())

        log = StoreDriver(make, settings or Settings(), self.is_durable)
        try:
            yield log
        finally:
            log.close()


def make_salt_source() -> Draw:
    """Return a source of salts that differ between records but are the same in every run."""
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += size
        return b"".join((drawn + place).to_bytes(8, "big") for place in range(0, size, 8))[:size]

    return draw


def list_positions(records: Sequence[Record]) -> list[int]:
    """Return the positions of records in their lane."""
    return [record.position for record in records]
