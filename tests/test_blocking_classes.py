"""The generator of the blocking classes works, and the generated modules are up to date."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.blocking import source
from tools.blocking.generator import generate
from tools.blocking.source import GenerationError
from tools.blocking.table import MODULES, Module, Translation, Twin

SHELF = '''
from collections.abc import AsyncIterator, Sequence

LIMIT = 7

class Book:
    async def wait_returned(self) -> None:
        """Wait until the book is back."""

class Base:
    async def close(self) -> None:
        """Close the shelf. A reader who calls it
        waits for nothing."""

class Shelf(Base):
    @property
    def size(self) -> int:
        """Number of books."""
        return 0

    async def lend(self, title: str, *, days: int = LIMIT) -> Book:
        """Lend a book to the
        caller."""

    def lent(self) -> list[Book]:
        """Books that are lent."""

    def clear(self, *titles: str) -> None:
        """Remove books."""

    async def each(self) -> AsyncIterator[Sequence[Book]]:
        """All books."""
        yield []

    def count(self) -> int:
        """Number of books now."""
'''
BLOCKING_SHELF = '''
class BlockingBook(BlockingObject):
    """A book."""

    def __init__(self, book: Book, portal: Portal) -> None:
        super().__init__(portal)
        self._book = book

    def wait_returned(self, timeout_s: float | None = None) -> None:
        """Like `Book.wait_returned`.

        Wait until the book is back.

        Raises TimeoutError if it takes longer than `timeout_s`.
        """
        self._portal.call_with_timeout(timeout_s, self._book.wait_returned)


class BlockingShelf(BlockingResource):
    """A shelf."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self._shelf = shelf

    @property
    def size(self) -> int:
        """Like `Shelf.size`.

        Number of books.
        """
        return self._shelf.size

    def lend(self, title: str, *, days: int = LIMIT) -> BlockingBook:
        """Like `Shelf.lend`.

        Lend a book.
        """
        portal = self._portal
        return BlockingBook(portal.call(self._shelf.lend, title, days=days), portal)

    def lent(self) -> list[BlockingBook]:
        """Like `Shelf.lent`.

        Books that are lent.
        """
        portal = self._portal
        return [BlockingBook(book, portal) for book in portal.run(self._shelf.lent)]

    def clear(self, *titles: str) -> None:
        """Like `Shelf.clear`.

        Remove books.
        """
        self._portal.run(self._shelf.clear, *titles)

    def each(self) -> Iterator[Sequence[Book]]:
        """Like `Shelf.each`.

        All books.
        """
        return self._iterate(self._shelf.each())

    def count(self) -> int:
        """Like `Shelf.count`.

        Number of books now.
        """
        return self._shelf.count()

    def close(self) -> None:
        """Like `Shelf.close`.

        Close the shelf.
        """
        super().close()
'''


@pytest.fixture
def shelf_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Twin:
    """A twin of an async class in a temporary source directory."""
    (tmp_path / "shelf.py").write_text(SHELF)
    monkeypatch.setattr(source, "SOURCE", tmp_path)
    return Twin(
        source="shelf:Shelf",
        docstring="A shelf.",
        base="oncelog.blocking_base:BlockingResource",
        holds="shelf",
        is_resource=True,
        immediate=frozenset({"count"}),
        texts={"lend": (" to the caller", ""), "close": (" A reader who calls it …", "")},
    )


def generate_shelf(twin: Twin) -> str:
    book = Twin(
        source="shelf:Book",
        docstring="A book.",
        base="oncelog.blocking_base:BlockingObject",
        holds="book",
        timeouts=frozenset({"wait_returned"}),
    )
    return generate(Module(name="blocking_shelf", docstring="Shelves.\n", twins=(book, twin)))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_generated_module_is_up_to_date(module: Module) -> None:
    assert module.path.read_text(encoding="utf-8") == generate(module), "run `make blocking`"


def test_blocking_class_has_the_methods_of_the_async_class(shelf_twin: Twin) -> None:
    generated = generate_shelf(shelf_twin)
    assert BLOCKING_SHELF in generated
    assert "from shelf import LIMIT, Book, Shelf" in generated
    assert "AsyncIterator" not in generated


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"omits": frozenset({"sell"})}, r"has no \['sell'\]"),
        ({"immediate": frozenset({"count", "tally"})}, r"has no \['tally'\]"),
        ({"texts": {"lend": ("to a friend", "")}}, "docstring of shelf:Shelf.lend has no 'to a friend'"),
        ({"arguments": {"lend": ("name", "wrap")}}, "lend has no parameter name"),
        ({"source": "shelf:Rack"}, "no class shelf:Rack"),
    ],
)
def test_table_entry_that_matches_nothing_is_an_error(shelf_twin: Twin, entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(GenerationError, match=reason):
        generate_shelf(replace(shelf_twin, **entry))


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ("    def sell(self, **prices: int) -> None: ...", "takes any keyword"),
        ("    @classmethod\n    def build(cls) -> None: ...", "has decorators"),
        ("    kinds = ('a', 'b')", "neither a method nor a deprecated name"),
    ],
)
def test_member_that_cannot_be_translated_is_an_error(
    shelf_twin: Twin, tmp_path: Path, member: str, reason: str
) -> None:
    (tmp_path / "shelf.py").write_text(f"{SHELF}\n{member}\n")
    with pytest.raises(GenerationError, match=reason):
        generate_shelf(shelf_twin)


OVERLOADED = '''
    @overload
    async def find(self, book: str) -> Book: ...

    @overload
    async def find(self, book: int) -> None: ...

    async def find(self, book: str | int) -> Book | None:
        """Find a book.

            async for one in shelf.each():
                await shelf.find(one)

        Books have one title.
        """
'''
BLOCKING_OVERLOADED = '''
    @overload
    def find(self, book: str) -> Book: ...

    @overload
    def find(self, book: int) -> None: ...

    def find(self, book: str | int) -> Book | None:
        """Like `Shelf.find`.

        Find a book.

            for one in shelf.each():
                shelf.find(one)

        Books have one title.
        """
        return self._portal.call(self._shelf.find, book)
'''


def test_overloads_and_examples_are_translated(shelf_twin: Twin, tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(f"{SHELF}\n{OVERLOADED}\n")
    generated = generate_shelf(shelf_twin)
    assert BLOCKING_OVERLOADED in generated
    assert "from typing import overload" in generated


READER = '''
from contextlib import AbstractAsyncContextManager

class AsyncBook: ...

def read_async(book: AsyncBook):
    """Read the book."""

    async def read(guard: AbstractAsyncContextManager[None]) -> str:
        async with guard, book.open() as page:
            return (await page.text()).strip()

    return read
'''
BLOCKING_READER = '''
from contextlib import AbstractContextManager

from books import Book


def read_blocking(book: Book):
    """Read the book."""

    def read(guard: AbstractContextManager[None]) -> str:
        with guard, book.open() as page:
            return page.text().strip()

    return read
'''
READER_NAMES = {
    "read_async": "read_blocking",
    "AsyncBook": "books:Book",
    "AbstractAsyncContextManager": "contextlib:AbstractContextManager",
}


def generate_reader(names: dict[str, str]) -> str:
    translation = Translation(source="reader:read_async", names=names)
    return generate(Module(name="blocking_reader", docstring="Readers.\n", translations=(translation,)))


def test_translated_function_has_the_steps_of_the_async_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reader.py").write_text(READER)
    monkeypatch.setattr(source, "SOURCE", tmp_path)
    assert generate_reader(READER_NAMES).endswith(BLOCKING_READER)
    with pytest.raises(GenerationError, match=r"has no \['Shelf'\]"):
        generate_reader({**READER_NAMES, "Shelf": "books:Shelf"})


LIBRARY = '''
class Library:
    """Books. Each call is awaited."""

    @overload
    async def count(self) -> Awaitable[int]: ...

    async def count(self) -> int:
        """Count the books."""
        return await self.book.count_pages()
'''
BLOCKING_LIBRARY = '''
class BlockingLibrary:
    """Books. Each call blocks."""

    def count(self) -> int:
        """Count the books."""
        return self.book.count_pages()
'''


def generate_library(texts: dict[str, str]) -> str:
    translation = Translation(source="library:Library", names={"Library": "BlockingLibrary"}, texts=texts)
    return generate(Module(name="blocking_library", docstring="A library.\n", translations=(translation,)))


def test_translated_class_has_the_steps_of_the_async_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    monkeypatch.setattr(source, "SOURCE", tmp_path)
    assert generate_library({"is awaited": "blocks"}).endswith(BLOCKING_LIBRARY)
    with pytest.raises(GenerationError, match=r"has no \['is lent'\]"):
        generate_library({"is lent": ""})
