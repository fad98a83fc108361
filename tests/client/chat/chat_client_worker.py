"""Send messages, then kill this process: python chat_client_worker.py URL FILE MOMENT COUNT

Ann sends the messages `0` to COUNT - 1 to the `tea` chat. The process kills itself when all messages are on disk and
the first one is at MOMENT: `unsent` (not sent yet) or `unanswered` (the server has answered, but the client has not
processed the answer).
"""

import asyncio
import os
import signal
import sys

from oncelog.client.chat import ChatClient
from oncelog.client.chat import codec as chat_words
from oncelog.client.chat.protocol import ChatProtocol

_, URL, FILE, MOMENT, COUNT = sys.argv
send_some, receive = ChatProtocol._send_messages, ChatProtocol.receive
may_send = is_all_on_disk = is_answered = False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sending(self: ChatProtocol, *arguments: object) -> None:
    if may_send:
        send_some(self, *arguments)  # type: ignore[arg-type]


def receiving(self: ChatProtocol, data: str | bytes, now_ms: int) -> None:
    global is_answered  # noqa: PLW0603 - main reads it
    if not isinstance(chat_words.decode_frame(data)[0], chat_words.SendAck):
        receive(self, data, now_ms)
    elif is_all_on_disk:
        die()
    else:
        is_answered = True


async def main() -> None:
    global may_send, is_all_on_disk  # noqa: PLW0603 - the patches above read them
    async with ChatClient(URL, path=FILE, token="ann") as client:  # noqa: S106
        for number in range(int(COUNT) - 1):
            await client.send("tea", str(number))
        may_send = MOMENT != "unsent"
        await client.send("tea", str(int(COUNT) - 1))
        is_all_on_disk = True
        if is_answered or MOMENT == "unsent":
            die()
        await asyncio.Event().wait()


ChatProtocol._send_messages = sending  # type: ignore[assignment]
ChatProtocol.receive = receiving  # type: ignore[method-assign]
asyncio.run(main())
