"""Validation of client arguments. Each SettingsError names the invalid argument."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from oncelog.client.runtime import logger
from oncelog.client.runtime.client import is_being_cancelled
from oncelog.client.runtime.values import BaseLimits
from oncelog.core.canonical import INTEGER_MAX, is_storable
from oncelog.core.identity import normal_partitions
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.errors import CanonicalError, LostError, SettingsError

Limits = TypeVar("Limits", bound=BaseLimits)

Token = str | Callable[[], Awaitable[str | None] | str | None] | None
"""A token, or a function that the client calls for each connection or request, because tokens expire."""


def check_partitions(partitions: Iterable[str]) -> tuple[str, ...]:
    """Validate the partitions that a client follows and return them in normal form."""
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
        raise SettingsError(f"partitions must be a list of strings, not {partitions!r}")
    try:
        normal = normal_partitions(list(partitions))
    except CanonicalError as error:
        raise SettingsError(f"partitions: {error.reason}") from error
    if len(normal) > PARTITIONS_MAX:
        raise SettingsError(f"partitions must have at most {PARTITIONS_MAX} different names, not {len(normal)}")
    if any(not 1 <= len(name) <= PARTITION_CHARACTERS_MAX or "\0" in name for name in normal):
        raise SettingsError(f"partitions must each have 1 to {PARTITION_CHARACTERS_MAX} characters, and no U+0000")
    return normal


def check_client_id(client_id: str | None, name: str = "client_id") -> str | None:
    """Validate a client or device id and return it. None means that the store creates one. Raises SettingsError."""
    if client_id is None:
        return None
    if not isinstance(client_id, str) or not 1 <= len(client_id) <= NAME_CHARACTERS_MAX or not is_storable(client_id):
        raise SettingsError(f"{name} must be a string of 1 to {NAME_CHARACTERS_MAX} characters without U+0000")
    return client_id


def check_path(path: object) -> str:
    """Validate the path of a client's file, or ":memory:", and return it as text."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or not is_storable(text):
        raise SettingsError(f'path must be the path of a file, or ":memory:", not {path!r}')
    return text


def check_limits(limits: Limits | None, kind: type[Limits]) -> Limits:
    """Validate the limits and return them, or return the defaults for None."""
    checked = kind() if limits is None else limits
    if not isinstance(checked, kind):
        raise SettingsError(f"limits must be {kind.__name__}, not {limits!r}")
    return checked


def is_token(token: object) -> bool:
    """Whether a value can be a token. Error messages never contain the value."""
    return token is None or (isinstance(token, str) and token.isascii() and (token.isprintable() or not token))


def check_function(function: Callable[..., object] | None, name: str, *, may_be_async: bool) -> None:
    """Raise SettingsError for a value that is not callable, or for an async function where none is allowed."""
    if function is None and not may_be_async:
        return  # optional
    if not callable(function):
        raise SettingsError(f"{name} must be a function, not {function!r}")
    called = getattr(function, "__call__", None)  # noqa: B004 - for callable objects
    if not may_be_async and (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)):
        raise SettingsError(f"{name} must not be async, because the client does not await it")


def check_number(number: int, name: str) -> None:
    """Raise SettingsError unless the value is 0 or can be the number of an event or message."""
    if type(number) is not int or not 0 <= number <= INTEGER_MAX:
        raise SettingsError(f"{name} must be a whole number from 0 to {INTEGER_MAX}, not {number!r}")


def check_token(token: Token) -> None:
    """Raise SettingsError for a value that cannot be a token."""
    if not callable(token) and not is_token(token):
        raise SettingsError("token must be a string of printable ASCII characters, or a function that returns one")


async def resolve_token(token: Token) -> str | None:
    """Return the current token. Raises LostError if the function fails; the next attempt calls it again."""
    if not callable(token):
        return token
    try:
        result = token()
        found = await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise LostError("the token function failed: its await was cancelled") from error
    except Exception as error:
        logger.exception("the token function failed")
        raise LostError(f"the token function failed: {type(error).__name__}: {error}") from error
    if not is_token(found):
        shown = "a string with other characters" if isinstance(found, str) else type(found).__name__
        raise LostError(f"the token function must return a string of printable ASCII characters or None, not {shown}")
    return found
