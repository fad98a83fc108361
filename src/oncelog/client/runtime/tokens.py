"""A token that is given, or asked for where it is needed."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from oncelog.client.runtime.cancellation import is_being_cancelled
from oncelog.client.runtime.options import is_token
from oncelog.errors import LostError, SettingsError

logger: Final = logging.getLogger("oncelog.client")

Token = str | Callable[[], Awaitable[str | None] | str | None] | None
"""A token, or a function that gives one for each connection or request: the last one may have expired."""


def check_token(token: Token) -> None:
    """Raises SettingsError for what can be none."""
    if not callable(token) and not is_token(token):
        raise SettingsError("token must be a text as tokens are, or a function that gives one")


async def resolve_token(token: Token) -> str | None:
    """The one for now. Raises LostError where the function has none to give: it is asked again the next time."""
    if not callable(token):
        return token
    try:
        result = token()
        found = await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise LostError("there is no token: what it waits for was cancelled") from error
    except Exception as error:
        logger.exception("there is no token")
        raise LostError(f"there is no token: {type(error).__name__}: {error}") from error
    if not is_token(found):
        raise LostError("there is no token: what the function gives is none")
    return found
