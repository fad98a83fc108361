"""Two chat clients: Ann's process is killed while she writes offline, and Bob gets every message once, in order.

Start a server (`.venv/bin/oncelog serve --development`), then run `.venv/bin/python examples/chat_client.py`. Pass the
server's address as an argument if it is not http://127.0.0.1:7171. The clients' files are in a temporary directory, and
each run creates a new chat.
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
UNREACHABLE_URL = "http://127.0.0.1:9"


def open_client(name: str, files: Path, url: str = URL) -> ChatClient:
    """Return a user's client, which has its own file. In development mode a user's name is also the token."""
    return ChatClient(url, path=files / f"{name}.db", token=name)


async def write_and_die(chat: str, files: Path) -> None:
    """Write two messages without a network, and kill the process before it can send them."""
    async with open_client("ann", files, UNREACHABLE_URL) as ann:
        await ann.send(chat, "Is there tea?")
        await ann.send(chat, "I bring cake.")
        os.kill(os.getpid(), signal.SIGKILL)


def run_ann(chat: str, files: Path) -> None:
    """Run Ann's process, which is killed."""
    asyncio.run(write_and_die(chat, files))


async def create_chat(chat: str, files: Path) -> None:
    """Create the chat as Bob, and send its first message."""
    async with open_client("bob", files) as bob:
        await bob.create(chat, members=["user:ann"])
        await (await bob.send(chat, "Tea at five.")).outcome()


async def continue_chat(chat: str, files: Path) -> None:
    """Open Ann's file again, and read all messages as Bob."""
    async with open_client("ann", files) as ann, open_client("bob", files) as bob:
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
    """Create a chat, kill Ann's process, and continue."""
    chat = f"tea-{uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory)
        asyncio.run(create_chat(chat, files))
        process = multiprocessing.get_context("spawn").Process(target=run_ann, args=(chat, files))
        process.start()
        process.join()
        print(f"Ann's process was killed by signal {-(process.exitcode or 0)}")
        asyncio.run(continue_chat(chat, files))


if __name__ == "__main__":
    main()
