"""Translate errors of libraries and lower layers into other exceptions, and shorten texts in messages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

_CHARACTERS_SHOWN: Final = 160
"""Characters of a text in a message, half from each end. A key, or the path of a nested value, can be much longer."""


def shorten_middle(text: str) -> str:
    """Return a text for a message, without the middle of a long one."""
    if len(text) <= _CHARACTERS_SHOWN:
        return text
    half = _CHARACTERS_SHOWN // 2
    return f"{text[:half]}…{text[-half:]}"


def raise_translated(translated: BaseException, error: BaseException) -> NoReturn:
    """Raise an error's translation, or the error itself if it has none."""
    if translated is error:
        raise error
    raise translated from error


@contextmanager
def translate_raised(
    errors: type[Exception] | tuple[type[Exception], ...], translate: Callable[[Any], BaseException]
) -> Iterator[None]:
    """Translate the errors of these types that the block raises."""
    try:
        yield
    except errors as error:
        raise_translated(translate(error), error)
