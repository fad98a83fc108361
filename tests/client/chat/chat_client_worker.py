"""Send messages and kill the process: python chat_client_worker.py URL FILE MOMENT COUNT

Ann sends `0` to COUNT - 1 to the chat `tea`. The process kills itself when its first message reaches the moment:
`unsent` (all are on disk, nothing is sent) or `unanswered` (sent and answered by the server, but the client has not
processed the answer).
"""

import asyncio
import os
import signal
import sys

from oncelog.client.chat import ChatClient
from oncelog.client.chat import words as chat_words
from oncelog.client.chat.protocol import Protocol

_, URL, FILE, MOMENT, COUNT = sys.argv
send_some, receive = Protocol._send_some, Protocol.receive
is_all_sent = False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sending(self: Protocol, *arguments: object) -> None:
    if is_all_sent:
        send_some(self, *arguments)  # type: ignore[arg-type]


def receiving(self: Protocol, data: str | bytes, now_ms: int) -> None:
    if isinstance(chat_words.read(data)[0], chat_words.Acked):
        die()
    receive(self, data, now_ms)


async def main() -> None:
    global is_all_sent  # noqa: PLW0603 - the patches above read it
    async with ChatClient(URL, path=FILE, token="ann") as client:  # noqa: S106
        for number in range(int(COUNT) - 1):
            await client.send("tea", str(number))
        is_all_sent = MOMENT != "unsent"
        await client.send("tea", str(int(COUNT) - 1))
        if MOMENT == "unsent":
            die()  # the last message is on disk too
        await asyncio.Event().wait()


Protocol._send_some = sending  # type: ignore[assignment]
Protocol.receive = receiving  # type: ignore[method-assign]
asyncio.run(main())
