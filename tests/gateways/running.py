"""Server processes that share one database."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Thread

from cli.served import ENVIRONMENT

HURRY = {"lane_ms": 1_500, "commit_ms": 2_000, "connect_ms": 10_000, "patience_ms": 10_000}
"""Shorter timeouts than the defaults, so that tests see them expire."""
START_TRIES = 10


class ServerProcess:
    """A server that can be killed, frozen, and started again at the same port. Its log is kept."""

    def __init__(self, address: str, **limits: int) -> None:
        timeouts = {f"postgres_{name}": value for name, value in HURRY.items()}
        chosen = {**timeouts, **limits}
        self._arguments = [f"--set=limits.{name}={value}" for name, value in chosen.items()]
        self._address = address
        self._port = 0
        self._listening: Thread
        self.said: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and return when it listens. If it cannot open its log, start it again."""
        for _ in range(START_TRIES):
            if self._started():
                return
        raise AssertionError("".join(self.said))

    def _started(self) -> bool:
        command = [sys.executable, "-m", "oncelog", "serve", "--port", str(self._port), "--store", self._address]
        command += ["--development", "--quiet", *self._arguments]
        process = self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)  # noqa: S603
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                self._port = int(self.url.rpartition(":")[2])
                self._listening = Thread(target=self.said.extend, args=[process.stderr])
                self._listening.start()
                return True
        process.stderr.close()
        process.wait()
        return False

    def kill(self) -> None:
        """Kill the process, as a power cut does."""
        self._send(signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        """Shut the server down and return its exit status."""
        self._send(signal.SIGTERM)
        return self._end()

    def freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _end(self) -> int:
        assert self.process is not None
        status = self.process.wait()
        self._listening.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@asynccontextmanager
async def running_servers(*addresses: str, **limits: int) -> AsyncIterator[list[ServerProcess]]:
    """Start a server for each address, all at the same time; kill them at the end."""
    found = [ServerProcess(address, **limits) for address in addresses]
    try:
        await asyncio.gather(*(asyncio.to_thread(one.start) for one in found))
        yield found
    finally:
        for one in found:
            if one.is_running:
                await asyncio.to_thread(one.kill)
