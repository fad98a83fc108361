"""A client that sends a message from a file: python chat_worker.py URL FILE silent|on

With `silent` it prints "sent" after sending and waits to be killed; with `on` it prints the answer.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp


async def main(url: str, message: dict[str, Any], how: str) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/chat") as socket:
        await socket.send_json({"type": "connect", "token": "ann", "device_id": "worker"})
        assert (await socket.receive_json())["type"] == "connected"
        await socket.send_json({"type": "send_message", "request_id": "mine", **message})
        if how == "silent":
            os.write(1, b"sent\n")
            await asyncio.Event().wait()
        while (answer := await socket.receive_json()).get("request_id") != "mine":
            pass
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]))
