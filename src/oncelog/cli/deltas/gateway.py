"""Requests to a gateway, each of which is retried until it is answered."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from msgspec import Raw

from oncelog.cli.line_input import InputItem
from oncelog.cli.remote import Retrier, check_text, decode_results, translate_decode_errors
from oncelog.cli.server_options import Remote
from oncelog.client.deltas.codec import GatewayRefusedError, PushResult
from oncelog.client.deltas.transport import DeltasTransport
from oncelog.client.deltas.values import DeltasLimits
from oncelog.client.runtime.values import LIMIT_MAX
from oncelog.core.deltas import encode_push, find_gateway_fault
from oncelog.error_codes import RATE_LIMITED, TOO_LARGE
from oncelog.errors import OncelogError

RATE_DIVIDE_S: Final = 2.0
"""A push that a rate limit delays for longer than this is divided, because the server accepts smaller pushes sooner."""
_LIMITS: Final = DeltasLimits(message_bytes_max=2**31, answer_timeout_ms=LIMIT_MAX)
"""Effectively unlimited: the server limits its pages, and --timeout limits a request and its retries."""
T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="GATEWAY", help="Name of the gateway.", show_default=False)]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to retry each request.")]


class PushItem(InputItem, frozen=True):
    """A delta to push."""

    is_stamped: bool = False
    """Whether this command generated the delta's id."""


def find_refused_item(items: Sequence[PushItem], error: GatewayRefusedError) -> PushItem | None:
    """Return the delta that the gateway refuses, or None if it refuses the whole request."""
    return None if error.index is None or not 0 <= error.index < len(items) else items[error.index]


class PushTooLargeError(OncelogError):
    """The server accepts the push only in smaller parts."""


class Gateway(AbstractAsyncContextManager["Gateway"]):
    """A gateway on a server. `async with` closes its connections on exit."""

    def __init__(self, name: str, timeout_s: float, remote: Remote) -> None:
        """`name` is the GATEWAY argument of a command. Raises OncelogError if it is malformed."""
        self.remote = remote
        fault = find_gateway_fault(check_text(name, "GATEWAY"))
        if fault is not None:
            raise OncelogError(f"GATEWAY {fault}")
        self.name = name
        self.transport = DeltasTransport(remote.url, name, token=remote.token, limits=_LIMITS, headers=None, tls=None)
        self.retrier = Retrier(remote, timeout_s)

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()

    async def request(self, kind: type[T], path: str, body: bytes | None = None, **parameters: Any) -> T:
        """Send a POST request if there is a body, otherwise a GET request, and return the decoded answer.

        Raises GaveUpError or GatewayRefusedError.
        """
        query = {name: str(value) for name, value in parameters.items() if value is not None}
        answer = await self.retrier.run(lambda: self.transport.call(path, query, bytes, body))
        with translate_decode_errors(self.remote):
            return msgspec.json.decode(answer, type=kind)

    async def push(self, items: Sequence[PushItem], *, can_divide: bool = False) -> list[tuple[Raw, PushResult]]:
        """Push deltas, with retries until they are answered. Return each result as received and decoded.

        Raises the errors of `request` or, with `can_divide`, PushTooLargeError if the push exceeds the server's limits.
        """
        body, loop = encode_push([item.body for item in items]), asyncio.get_running_loop()
        limited_s: float | None = None

        async def push_once() -> bytes:
            nonlocal limited_s
            sent_s = loop.time()
            try:
                return await self.transport.call("push", {}, bytes, body)
            except GatewayRefusedError as error:
                is_too_much = error.code == TOO_LARGE
                if error.code == RATE_LIMITED:
                    # Measure from the first refusal to this attempt, so that slow answers do not count.
                    held_back_s = 0.0 if limited_s is None else sent_s - limited_s
                    is_too_much = max(held_back_s, error.retry_after_ms / 1000) > RATE_DIVIDE_S
                    limited_s = loop.time() if limited_s is None else limited_s
                if can_divide and is_too_much and len(items) > 1:
                    raise PushTooLargeError(str(error)) from error
                raise

        return decode_results(self.remote, await self.retrier.run(push_once), PushResult, len(items), "deltas")
