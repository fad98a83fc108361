"""Reading the input of commands."""

import asyncio
import gc
import os

from deadlines import wait_until
from oncelog.cli import line_input
from oncelog.cli.line_input import InputItem, read_batches


async def read_all(data: bytes) -> list[bytes]:
    """Return the lines that `read_batches` yields for the data."""
    reading, writing = os.pipe()
    sending = asyncio.get_running_loop().run_in_executor(None, _write_and_close, writing, data)
    try:
        batches = read_batches(reading, lambda line, _: [InputItem(line)], 1000, content="line")
        return [item.body async for batch in batches for item in batch]
    finally:
        await sending
        os.close(reading)


def _write_and_close(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(data)


async def test_input_larger_than_the_read_ahead_arrives_whole_and_in_order() -> None:
    lines = [b"%07d" % number for number in range(400_000)]
    assert len(lines) * 8 > line_input.CHUNKS_MAX * line_input.READ_BYTES
    assert await read_all(b"\n".join(lines)) == lines


def test_input_that_arrives_after_the_command_has_ended_causes_no_warning() -> None:
    loop = asyncio.new_event_loop()
    reading, writing = os.pipe()

    async def start() -> None:
        line_input._start_reader(reading)

    loop.run_until_complete(start())
    os.write(writing, b"late\n")
    wait_until(lambda: loop._ready)  # type: ignore[attr-defined]  # the reader has read it, and the loop has not run
    loop.close()
    os.close(writing)
    gc.collect()  # a coroutine that was never awaited would warn, and warnings are errors
    os.close(reading)
