"""Base class of the blocking deltas client, which refuses calls from within edit functions."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from oncelog.client.runtime.blocking_base import BlockingBaseClient
from oncelog.client.runtime.client import BaseClient
from oncelog.errors import ClientError
from oncelog.portal import Portal

G = TypeVar("G")
T = TypeVar("T")


class BlockingDeltasBase(BlockingBaseClient):
    """Base class of `BlockingDeltasClient`."""

    def __init__(self, client: BaseClient[Any, Any], name: str) -> None:
        super().__init__(client, name)
        self._thread_state = threading.local()

    @property
    def _portal(self) -> Portal:
        if getattr(self._thread_state, "is_editing", False):
            raise ClientError("an edit function must not use the client: the call would deadlock")
        return super()._portal

    def _forbid_reentry(self, function: Callable[[G], T]) -> Callable[[G], T]:
        """Wrap a function so that it cannot call this client while it runs, because such a call would deadlock."""

        def call_marked(given: G) -> T:
            self._thread_state.is_editing = True
            try:
                return function(given)
            finally:
                self._thread_state.is_editing = False

        return call_marked
