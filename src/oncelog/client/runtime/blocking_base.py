"""Base of the blocking clients."""

from oncelog.blocking_base import AsyncResource, BlockingResource
from oncelog.client.runtime.client import build_closed_error


class BlockingBaseClient(BlockingResource):
    """A client whose event loop runs in a separate thread."""

    def __init__(self, client: AsyncResource, name: str) -> None:
        """`name` is the kind of client in errors and names of threads: "chat"."""
        super().__init__(client, f"oncelog-{name}-loop")
        self._name = name

    def _build_closed_error(self) -> Exception:
        return build_closed_error(self._name)
