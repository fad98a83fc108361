"""Base of the blocking clients."""

from typing import Any

from oncelog.blocking_base import BlockingResource
from oncelog.client.runtime.blocking import BlockingStatusSource
from oncelog.client.runtime.client import BaseClient, build_closed_error


class BlockingBaseClient(BlockingResource, BlockingStatusSource):
    """A client whose event loop runs in a separate thread."""

    def __init__(self, client: BaseClient[Any, Any], name: str) -> None:
        """`name` is the kind of client in errors and thread names, such as "chat"."""
        BlockingStatusSource.__init__(self, client, None)
        super().__init__(client, f"oncelog-{name}-loop")
        self._name = name

    def close(self) -> None:
        """Stop all tasks and close the file. Pending writes remain in it and are sent when the client is reopened.

        Does nothing in a forked process, or if the client is already closed.
        """
        super().close()

    def _build_closed_error(self) -> Exception:
        return build_closed_error(self._name)
