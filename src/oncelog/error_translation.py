"""Translate errors of libraries and lower layers into other exceptions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


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
