"""Generates load on all APIs: python load_worker.py DIRECTORY SEED PAUSE_S ADDRESS URL...

Each client writes step by step, with a pause of PAUSE_S between steps. It tries another server when one does not
answer in time, and sometimes repeats an acknowledged write. Some readers use one server, others switch servers. Calls
and readings are recorded in the format of `checker`, in one directory per API. The process answers these input lines:
`acknowledged` (number of acknowledged writes per API), `unanswered` (number of abandoned calls), `stop` (all clients
stop after an acknowledgement), and then, as JSON, the positions that the readers of each API must reach before the
process exits.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, aclosing, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO

import aiohttp

from failover.load_apis import APIS, Api, Endpoints, RunsByLibrary, content
from failover.replicas import Replicas
from oncelog.engine.log import open_log
from oncelog.errors import OncelogError
from scripts import print_line
from servers.checker import COMMITTED, UNKNOWN, Call, Seen, line_of

CLIENTS: Final = 4
"""Number of clients per API."""
RETRY_S: Final = 0.03
STEPS_MIN: Final = 2
"""Minimum number of steps of a client."""
CALL_S: Final = 5.0
"""Timeout of a call. The client then tries another server."""
AGAIN_RATE: Final = 0.1
LIBRARIES: Final = 2
COUNTED: Final = ("acknowledged", "unanswered")
"""Counters that the test can query."""
LOST: Final = (aiohttp.ClientError, OSError, AssertionError, TimeoutError, KeyError, ValueError, OncelogError)


class Client:
    """Retries forever: it sends an unanswered write to another server."""

    def __init__(self, api: Api, number: int, seed: int, pause_s: float, calls: TextIO) -> None:
        self._api = api
        self._number = number
        self._chance = Random(f"{seed}/{api.name}/{number}")
        self._pause_s = pause_s
        self._calls = calls
        self.acknowledged = 0
        self.unanswered = 0
        self.is_done = False

    async def run(self) -> None:
        for step in count():
            await self._insist(step)
            self.acknowledged += 1
            if self._chance.random() < AGAIN_RATE:
                await self._insist(self._chance.randrange(step + 1))
            if self.is_done and step + 1 >= STEPS_MIN:
                return
            await asyncio.sleep(self._pause_s)

    async def _insist(self, step: int) -> None:
        while not await self._call(step):
            self.unanswered += 1
            await asyncio.sleep(RETRY_S)

    async def _call(self, step: int) -> bool:
        gateway = self._chance.randrange(self._api.gateways)
        id_ = self._api.id(self._number, step)
        began = time.monotonic_ns()
        answer, position = UNKNOWN, 0
        with suppress(*LOST):
            async with asyncio.timeout(CALL_S):
                position = await self._api.submit(gateway, self._number, step)
            answer = COMMITTED
        name = f"{self._api.name}/{self._number}"
        said = content(self._number, step)
        call = Call(name, gateway, id_, said, began, time.monotonic_ns(), answer, position)
        self._calls.write(line_of(call))
        return answer == COMMITTED


class Reader:
    """Resumes from its cursor, on the same server or, if it switches servers, on a different one."""

    def __init__(self, api: Api, gateway: int | None, seed: int, file: TextIO) -> None:
        self._api = api
        self._gateway = gateway
        self._chance = Random(f"{seed}/{api.name}/reader/{gateway}")
        self._file = file
        self.cursor = 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            gateway = self._gateway
            if gateway is None:
                gateway = self._chance.randrange(self._api.gateways)
            with suppress(*LOST):
                await self._read(gateway)
            await asyncio.sleep(RETRY_S)

    async def _read(self, gateway: int) -> None:
        turns = self._chance.randint(50, 500) if self._gateway is None else sys.maxsize
        following: Any = self._api.follow(gateway, self.cursor)
        async with aclosing(following):
            async for seen in following:
                self._take(seen)
                turns -= 1
                if not turns:
                    return

    def _take(self, seen: Seen) -> None:
        self._file.write(line_of(seen))
        self.cursor = max(self.cursor, seen.position)


async def live(directory: Path, seed: int, pause_s: float, apis: list[Api], replicas: Replicas) -> None:
    clients: list[Client] = []
    readers: dict[str, list[Reader]] = {}
    for api in apis:
        place = directory / api.name
        place.mkdir()
        calls = (place / "calls-load.jsonl").open("w", buffering=1)
        clients += [Client(api, number, seed, pause_s, calls) for number in range(CLIENTS)]
        readers[api.name] = [Reader(api, None, seed, (place / "readings-wanderer.jsonl").open("w", buffering=1))]
        for gateway in range(api.gateways):
            file = (place / f"readings-at-{gateway}.jsonl").open("w", buffering=1)
            readers[api.name].append(Reader(api, gateway, seed, file))
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(reader.run()) for some in readers.values() for reader in some]
        writing = [tasks.create_task(client.run()) for client in clients]
        writing.append(tasks.create_task(replicas.run()))
        while (asked := (await asyncio.to_thread(sys.stdin.readline)).strip()) in COUNTED:
            each = [sum(getattr(one, asked) for one in clients if one._api is api) for api in apis]
            print_line(json.dumps(each))
        assert asked == "stop", asked
        for client in clients:
            client.is_done = True
        replicas.is_done = True
        await asyncio.gather(*writing)
        await replicas.check_agreement()
        print_line("stopped")
        heads = json.loads(await asyncio.to_thread(sys.stdin.readline))
        while any(reader.cursor < heads[name] for name, some in readers.items() for reader in some):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in reading:
            task.cancel()
    outputs = {key: text for api in apis if isinstance(api, RunsByLibrary) for key, text in api.outputs.items()}
    (directory / "outputs.json").write_text(json.dumps(outputs))


async def main(directory: str, seed: str, pause_s: str, address: str, *urls: str) -> None:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        logs = [await stack.enter_async_context(open_log(address)) for _ in range(LIBRARIES)]
        places = Endpoints(session, urls, logs)
        print_line("ready")
        replicas = await Replicas.open(stack, Path(directory), session, list(urls))
        await live(Path(directory), int(seed), float(pause_s), [api(places) for api in APIS], replicas)
    print_line("end")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
