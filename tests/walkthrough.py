"""Follow a documentation page as a reader would: save its programs, run its commands, and compare the output.

- `Save this … as `NAME`` saves the next block.
- `In `NAME`, replace the line that begins with `TEXT`` replaces that line with the next block.
- A `sh` block runs as printed. `oncelog serve` runs in the background, as in a second terminal, until a paragraph
  begins with `Stop the server`.
- A `text` block after commands is their complete output, in which `…` stands for any text.

Only the port differs from the printed one, because tests run concurrently.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from deadlines import WAIT_S

_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME: Final = re.compile(r"Save (?:this|it|the program)[^.]*? as `([^`]+)`")
_REPLACED: Final = re.compile(r"In `([^`]+)`,\s+replace\s+the\s+line\s+that\s+begins\s+with\s+`([^`]+)`")
_PORT: Final = "7171"


class Walkthrough:
    """A directory in which the commands of pages run, one page after another."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.outputs: list[str] = []
        """Standard output of each command block."""
        self._port = port
        self._server: subprocess.Popen[bytes] | None = None
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "NO_COLOR": "1"}

    def follow(self, page: str) -> None:
        """Follow a page. `page` is its text."""
        position = 0
        for block in _BLOCK.finditer(page):
            prose = page[position : block.start()]
            position = block.end()
            if re.search(r"^Stop the server", prose, re.MULTILINE):
                self.stop_server()
            self._handle_block(block[1], block[2].replace(_PORT, str(self._port)), prose)
        if re.search(r"^Stop the server", page[position:], re.MULTILINE):
            self.stop_server()

    def _handle_block(self, language: str, text: str, prose: str) -> None:
        names = _NAME.findall(prose)
        replaced = _REPLACED.search(prose)
        if names and language != "sh":
            (self.directory / names[-1]).write_text(text, encoding="utf-8")
        elif replaced and language != "sh":
            self._replace_line(replaced[1], replaced[2], text)
        elif language == "sh" and text.startswith("oncelog serve"):
            self._start_server(text)
        elif language == "sh":
            self.outputs.append(self._run(text))
        elif language == "text":
            pattern = ".*".join(map(re.escape, text.split("…")))
            is_shown = re.fullmatch(pattern, self.outputs[-1], re.DOTALL) is not None
            assert is_shown, f"the page shows:\n{text}\nthe command printed:\n{self.outputs[-1]}"

    def _replace_line(self, name: str, start: str, text: str) -> None:
        path = self.directory / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (number,) = [number for number, line in enumerate(lines) if line.startswith(start)]
        lines[number] = text
        path.write_text("".join(lines), encoding="utf-8")

    def _run(self, commands: str) -> str:
        # Use the default port for these commands, unless the page specifies a server.
        commands = re.sub(r"\boncelog (tail|submit|load)\b", rf"\g<0> --url http://127.0.0.1:{self._port}", commands)
        done = subprocess.run(  # noqa: S603
            ["/bin/bash", "-e", "-c", commands],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=self._environment,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _start_server(self, command: str) -> None:
        assert self._server is None, "the page starts a second server"
        extra = [] if "--config" in command else ["--port", str(self._port)]
        arguments = [*shlex.split(command), *extra, "--set", "grpc_port=0"]
        self._server = subprocess.Popen(  # noqa: S603
            arguments, cwd=self.directory, env=self._environment, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + WAIT_S
        while True:
            assert self._server.poll() is None, "the server has stopped"
            assert time.monotonic() < deadline
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.05)

    def stop_server(self) -> None:
        """Stop the server as Ctrl-C does."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(WAIT_S) == 0
            self._server = None

    def kill_server(self) -> None:
        """Kill the server if a failed test has left it running."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
