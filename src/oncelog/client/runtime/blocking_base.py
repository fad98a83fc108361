"""Base class of the blocking clients."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec

from oncelog.blocking_base import BlockingResource
from oncelog.client.runtime.blocking import BlockingStatusSource
from oncelog.client.runtime.client import BaseClient, build_closed_error

P = ParamSpec("P")


def takes_parameters_of(
    client: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a constructor the parameters and docstring of an async client's constructor."""

    def adapt(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        original = getattr(client, "__init__")  # noqa: B009 - mypy takes `client` for an instance
        return update_wrapper(constructor, original, assigned=("__doc__", "__annotations__"))

    return adapt


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
