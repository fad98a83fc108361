"""Lists that the server returns in pages."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from oncelog.errors import ProtocolError

Page = TypeVar("Page")


async def iterate_pages(
    fetch: Callable[[str | None], Awaitable[Page]], get_next: Callable[[Page], str | None], path: str
) -> AsyncGenerator[Page, None]:
    """Yield all pages of the list at a path.

    `fetch` gets the token of a page, or None for the first one. `get_next` returns the token of the page after a page,
    or None after the last one. Raises ProtocolError if the server repeats a page, and the errors of `fetch`.
    """
    token: str | None = None
    while True:
        page = await fetch(token)
        yield page
        following = get_next(page)
        if following is None:
            return
        check_next_page(token, following, path)
        token = following


def check_next_page(token: str | None, following: str, path: str) -> None:
    """Raise ProtocolError if the token of the next page is that of the current one: the requests would never end."""
    if following == token:
        raise ProtocolError(f"the server repeats a page of the list at {path}")
