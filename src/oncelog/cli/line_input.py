"""Read lines from standard input or a file, and batch their items into requests."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from msgspec import Struct

from oncelog.errors import OncelogError

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
READ_BYTES: Final = 64 * 1024
CHUNKS_MAX: Final = 16
"""Chunks that are read ahead, together 1 MiB."""
REQUEST_BYTES_MAX: Final = 1024 * 1024
"""Larger requests are divided, because servers accept 4 MiB by default. A single write is never divided."""


class InputItem(Struct, frozen=True):
    """A write to send."""

    body: bytes
    """JSON, as sent."""
    location: str = ""
    """Location in the input, such as `line 3`. Empty for a write from the command line."""
    key: bytes | None = None
    """Identity that must not occur twice in a request, or None if the server accepts repetitions."""


Item = TypeVar("Item", bound=InputItem)


async def read_batches(
    descriptor: int,
    parse: Callable[[bytes, int], Iterable[Item]],
    items_max: int,
    finish: Callable[[], Iterable[Item]] = tuple,
    *,
    content: str,
) -> AsyncIterator[list[Item]]:
    """Yield the items of lines in batches as they arrive. `parse` is called with each line and its number.

    At the end of the input, `finish` returns the items that `parse` has held back.

    A batch is yielded before it is full if no further input is available, because a user may be typing. Items before a
    malformed line are yielded before its error is raised. `content` is the content of a line, such as "event". Raises
    OncelogError if the input contains none.
    """
    chunks, free_slots = _start_reader(descriptor)
    items: list[Item] = []
    error: OncelogError | None = None
    rest, number, chunk = b"", 0, b"first"
    is_empty = True
    while chunk and error is None:
        chunk = await chunks.get()
        free_slots.release()
        *lines, rest = (rest + chunk).split(b"\n") if chunk else (rest, b"")
        if len(rest) > LINE_BYTES_MAX:
            lines.append(rest)
        try:
            for line in map(bytes.strip, lines):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise OncelogError(f"line {number}: is longer than {LINE_BYTES_MAX} bytes")  # noqa: TRY301
                items += parse(line, number) if line else ()
            items += () if chunk else finish()
        except OncelogError as found:
            error = found
        is_empty = is_empty and not items
        if len(items) >= items_max or chunks.empty() or error is not None:
            for batch in split_batches(items, items_max):
                yield batch
            items = []
    if error is not None:
        raise error
    if is_empty:
        raise OncelogError(f"the input contains no {content}; nothing was sent")


def _start_reader(descriptor: int) -> tuple[asyncio.Queue[bytes], threading.Semaphore]:
    """Read a file descriptor in a daemon thread, so that an interrupted command exits at once. b"" marks the end.

    The caller releases the semaphore for each chunk that it takes. Otherwise a fast input would fill the memory.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    free_slots = threading.Semaphore(CHUNKS_MAX)

    def read_all() -> None:
        chunk = b"first"
        with suppress(RuntimeError):  # the loop is closed: the command has ended
            while chunk:
                try:
                    chunk = os.read(descriptor, READ_BYTES)
                except OSError:
                    chunk = b""
                free_slots.acquire()
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    threading.Thread(target=read_all, daemon=True).start()
    return chunks, free_slots


def split_batches(items: Iterable[Item], items_max: int) -> Iterator[list[Item]]:
    """Divide items into batches, in order. No batch contains a key twice (EV-7)."""
    batch: list[Item] = []
    keys: set[bytes | None] = set()
    size = 0
    for item in items:
        is_full = len(batch) == items_max or size + len(item.body) > REQUEST_BYTES_MAX
        if batch and (is_full or (item.key is not None and item.key in keys)):
            yield batch
            batch, keys, size = [], set(), 0
        batch.append(item)
        keys.add(item.key)
        size += len(item.body)
    if batch:
        yield batch
