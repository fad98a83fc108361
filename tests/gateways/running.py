"""Gateways: servers in processes of their own, on one database."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from cli.served import ENVIRONMENT, WAIT_S

HURRY = {"lane_ms": 500, "commit_ms": 1_500, "connect_ms": 2_000, "patience_ms": 3_000}
"""Time-outs of gateways that are to be seen at work."""

START_TRIES = 10


class Gateway:
    """A server that can be killed, frozen, and started again at the port it had. What it says is kept."""

    def __init__(self, address: str, **limits: int) -> None:
        timeouts = {f"postgres_{name}": value for name, value in HURRY.items()}
        chosen = {**timeouts, **limits}
        self._arguments = [f"--set=limits.{name}={value}" for name, value in chosen.items()]
        self._address = address
        self._port = 0
        self._listening: Thread
        self.said: list[str] = []
        self.process: subprocess.Popen[str]
        self.url = ""

    def start(self) -> None:
        """Returns when it listens. One that cannot open its log is started again, as whoever looks after it does."""
        for _ in range(START_TRIES):
            if self._started():
                return
        raise AssertionError("".join(self.said))

    def _started(self) -> bool:
        command = [sys.executable, "-m", "oncelog", "serve", "--port", str(self._port), "--store", self._address]
        command += ["--development", "--quiet", *self._arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)  # noqa: S603
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                self._port = int(self.url.rpartition(":")[2])
                self._listening = Thread(target=self.said.extend, args=[self.process.stderr])
                self._listening.start()
                return True
        self.process.stderr.close()
        self.process.wait(WAIT_S)
        return False

    def kill(self) -> None:
        """As a power cut does."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """In order; gives the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._end()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _end(self) -> int:
        status = self.process.wait(WAIT_S)
        self._listening.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def gateways(*addresses: str, **limits: int) -> Iterator[list[Gateway]]:
    """One at each address, started together; killed at the end."""
    found = [Gateway(address, **limits) for address in addresses]
    starting = [Thread(target=one.start) for one in found]
    try:
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        assert all(one.url for one in found), [one.said for one in found]
        yield found
    finally:
        for one in found:
            if one.process.poll() is None:
                one.kill()
