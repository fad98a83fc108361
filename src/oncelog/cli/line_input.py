"""Lines on standard input or in a file, as commands take them: each as soon as it has come, with its number."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

from oncelog.errors import OncelogError

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
READ_BYTES: Final = 64 * 1024
T = TypeVar("T")


def open_file(path: str) -> BinaryIO:
    """Open a file for reading. Raises OncelogError."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise OncelogError(f"{path} cannot be read: {error.strerror}") from error


class LineParser(Generic[T]):
    """The input in lines, up to its end or a line that is wrong. Those before it are good, and are sent."""

    def __init__(self, parse: Callable[[bytes, int], T]) -> None:
        self._parse = parse
        self._rest = b""
        self._line = 0
        self.items: deque[T] = deque()
        self.error: OncelogError | None = None

    def feed(self, chunk: bytes) -> None:
        """Some bytes; none are the end."""
        *texts, self._rest = (self._rest + chunk).split(b"\n") if chunk else (self._rest, b"")
        if len(self._rest) > LINE_BYTES_MAX:
            texts.append(self._rest)
        try:
            for text in texts:
                self._line += 1
                if text.strip():
                    self.items.append(self._parse(text.strip(), self._line))
        except OncelogError as error:
            self.error = error


class InputReader:
    """Reads a file descriptor in a thread that nobody has to wait for: an interrupted command ends at once."""

    def __init__(self, descriptor: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=16)
        os.set_blocking(descriptor, True)  # a pipe that does not wait would look like one that has ended
        threading.Thread(target=self._read_loop, args=(descriptor,), daemon=True).start()

    @property
    def has_chunk(self) -> bool:
        """Whether something has come already."""
        return not self._chunks.empty()

    async def read_chunk(self) -> bytes:
        """What comes next; nothing at the end."""
        return await self._chunks.get()

    def _read_loop(self, descriptor: int) -> None:
        chunk = b"first"
        while chunk:
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except OSError:
                chunk = b""
            with suppress(RuntimeError):  # the command has ended
                asyncio.run_coroutine_threadsafe(self._chunks.put(chunk), self._loop).result()
