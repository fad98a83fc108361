"""Lists that the server returns in pages."""

import pytest

from oncelog.client.runtime.pages import iterate_pages
from oncelog.errors import ProtocolError


async def list_pages(following: dict[str | None, str | None]) -> list[str | None]:
    """Return the tokens that are requested if each page names the token of the next one."""

    async def fetch(token: str | None) -> str | None:
        requested.append(token)
        return following[token]

    requested: list[str | None] = []
    pages = [page async for page in iterate_pages(fetch, lambda page: page, "/list")]
    assert len(pages) == len(requested)
    return requested


async def test_pages_are_requested_up_to_the_last_one() -> None:
    assert await list_pages({None: None}) == [None]
    assert await list_pages({None: "1", "1": "2", "2": None}) == [None, "1", "2"]


async def test_repeated_page_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=r"^the server repeats a page of the list at /list$"):
        await list_pages({None: "1", "1": "1"})
