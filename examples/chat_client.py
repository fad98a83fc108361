"""Clients of a chat: Ann writes offline, is killed, and comes back; Bob gets every message once, in order.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/chat_client.py`, with
another address than http://127.0.0.1:7171 as an argument. Their files are in a temporary directory, and each
run has a chat of its own.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

from oncelog.client.chat import ChatClient

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7171"
NOWHERE = "http://127.0.0.1:9"


def client(name: str, files: Path, url: str = URL) -> ChatClient:
    """Somebody, with all that he knows in a file of his own. In development mode a name is a token."""
    return ChatClient(url, path=files / f"{name}.db", token=name)


async def write_and_die(chat: str, files: Path) -> None:
    """Writes without a network, and does not live to send it."""
    async with client("ann", files, NOWHERE) as ann:
        await ann.send(chat, "Is there tea?")
        await ann.send(chat, "I bring cake.")
        os.kill(os.getpid(), signal.SIGKILL)


def killed(chat: str, files: Path) -> None:
    """The process of Ann."""
    asyncio.run(write_and_die(chat, files))


async def begin(chat: str, files: Path) -> None:
    """Bob makes the chat."""
    async with client("bob", files) as bob:
        await bob.create(chat, members=["user:ann"])
        await (await bob.send(chat, "Tea at five.")).outcome()


async def go_on(chat: str, files: Path) -> None:
    """Ann again, from her file, and Bob."""
    async with client("ann", files) as ann, client("bob", files) as bob:
        print(f"the file has {len(ann.pending())} messages that no server knows of")
        messages = bob.messages(chat)
        for _ in range(3):
            message = await anext(messages)
            print(f"{message.sequence}: {message.sender_id} says {message.content!r}")
        last = await ann.send(chat, "See you!")
        print(f"{(await anext(messages)).content!r} has arrived")
        bob.received(chat, 4)
        await last.delivered()
        print(f"Ann sees: {[line.mark.value for line in await ann.lines(chat) if line.sender_id == 'user:ann']}")


def main() -> None:
    """Tells the story."""
    chat = f"tea-{uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory)
        asyncio.run(begin(chat, files))
        process = multiprocessing.get_context("spawn").Process(target=killed, args=(chat, files))
        process.start()
        process.join()
        print(f"Ann was killed by signal {-(process.exitcode or 0)}")
        asyncio.run(go_on(chat, files))


if __name__ == "__main__":
    main()
