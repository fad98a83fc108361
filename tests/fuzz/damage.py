"""Damage a log file according to an input, then verify, open, read and write it.

An input is a program of 8-byte steps: one byte for the kind of damage, four for the offset, three for the value. Any
sequence of bytes is a program, so mutations of the corpus are valid.
"""

import asyncio
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Final
from uuid import UUID

import oncelog
from oncelog.core.chat import chat_scope, encode_message, message
from oncelog.core.values import OpenStream
from oncelog.errors import OncelogError
from oncelog.storage.verify.findings import Inconsistency
from oncelog.storage.verify.verification import verify_log

STEP_BYTES: Final = 8
STEPS_MAX: Final = 16
PAGE_BYTES: Final = 4096
RECORDS: Final = 40


@cache
def sample_log() -> bytes:
    """Return the bytes of a log file with events and a chat."""
    directory = Path(tempfile.mkdtemp(prefix="oncelog-fuzz-"))
    try:
        path = directory / "sample.db"
        asyncio.run(_write(path))
        return path.read_bytes()
    finally:
        shutil.rmtree(directory)


async def _write(path: Path) -> None:
    async with oncelog.open(path, settings=oncelog.Settings(lanes=2)) as log:
        for number in range(RECORDS):
            await log.submit(_event(number))
        await log.submit(OpenStream(chat_scope("tea"), "user:ada"))
        for number in range(5):
            body = encode_message("hello", "text/plain")
            await log.submit(message(chat_scope("tea"), UUID(int=number, version=4).bytes, body, sender="user:ada"))


def _event(number: int) -> oncelog.Submission:
    return oncelog.event(UUID(int=number + 1), {"type": "sample", "number": number}, ["a", f"b/{number % 3}"])


def apply_damage(file: bytes, program: bytes) -> bytes:
    """Return the file as changed by the steps of the program."""
    changed = bytearray(file)
    for start in range(0, min(len(program), STEPS_MAX * STEP_BYTES), STEP_BYTES):
        step = program[start : start + STEP_BYTES].ljust(STEP_BYTES, b"\x00")
        place, value = int.from_bytes(step[1:5], "little") % max(1, len(changed)), step[5:]
        match step[0] % 6:
            case 0:
                changed[place : place + 1] = value[:1]
            case 1:
                changed[place : place + 3] = value
            case 2:
                page = place - place % PAGE_BYTES
                changed[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
            case 3:
                page, other = place - place % PAGE_BYTES, int.from_bytes(value, "little") * PAGE_BYTES % len(changed)
                changed[page : page + PAGE_BYTES] = changed[other : other + PAGE_BYTES]
            case 4:
                changed[place : place + value[0] + 1] = value[1:2] * (value[0] + 1)
            case _:
                del changed[max(1, place) :]
    return bytes(changed)


def read_damaged_log(program: bytes) -> None:
    """Read a damaged log. Any exception other than OncelogError is a fault."""
    with tempfile.TemporaryDirectory(prefix="oncelog-fuzz-") as directory:
        path = Path(directory) / "damaged.db"
        path.write_bytes(apply_damage(sample_log(), program))
        path.chmod(0o600)
        try:
            findings = list(verify_log(path))
            is_whole = not isinstance(findings[-1], Inconsistency)
        except OncelogError:
            is_whole = False
        asyncio.run(_use(path, is_whole=is_whole))


async def _use(path: Path, *, is_whole: bool) -> None:
    async with oncelog.open(path) as log:
        records = (await log.read(limit=RECORDS)).records
        assert len(records) == RECORDS or not is_whole
        try:
            verdict = await log.submit(_event(7))
            await log.submit(_event(RECORDS))
        except TypeError:  # the committer reports the error of a damaged row to the caller whose write needs the row
            assert not is_whole
        else:
            assert isinstance(verdict, oncelog.Replayed) or not is_whole
