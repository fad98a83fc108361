"""The directory, the files and the servers with which users make mistakes."""

import asyncio
import inspect
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import oncelog
from cli.processes import ENVIRONMENT, MAIN, Command
from deadlines import WAIT_S, until
from mistakes.mistake import SECRET
from server.running_server import Answer, Serving

AUDIENCE: Final = "https://this.example"
"""The `aud` that the server accepts."""
EVENT: Final = {"type": "order.placed", "order": 17}
PAGE_BYTES: Final = 4096
"""Size of the pages of an SQLite file. The first one has the header."""
EVENT_ID: Final = "6f8b4c1e-3a52-4d8e-9c1f-0a7d2b5e4f60"


class Workplace:
    """A working directory of a user, with a server that requires credentials and one in development mode."""

    def __init__(
        self, directory: Path, template: Path, secured: Serving, development: Serving, closed_port: int
    ) -> None:
        self.directory = directory
        self.secured = secured
        self.development = development
        self.closed_port = closed_port
        """A port on which no program listens."""
        self.secrets: list[str] = []
        """Secrets of this mistake, in addition to `SECRET`."""
        self._template = template
        self._makers: dict[str, Callable[[Path], None]] = {
            "app.db": self._copy_log,
            "backup.db": self._copy_log,
            "newer.db": self._make_newer_log,
            "damaged.db": self._make_damaged_log,
            "foreign.db": _make_foreign_database,
            "notes.txt": _write_notes,
            "folder": Path.mkdir,
            "token.txt": lambda path: write_secret(path, SECRET, 0o644),
            "readable.key": lambda path: write_secret(path, SECRET, 0o644),
            "server.pem": lambda path: write_secret(path, "neither a certificate nor a key", 0o600),
        }
        """Functions that create a file when a command or program names it."""

    def path(self, name: str) -> Path:
        """Return a path in the directory, and create the file if it is one of the prepared files."""
        path = self.directory / name
        if name in self._makers and not path.exists():
            self._makers[name](path)
        return path

    async def run_command(
        self,
        *arguments: str,
        given: str = "",
        program: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command that must fail, and return what it prints."""
        for name in self._makers:
            if any(name in text for text in (*arguments, *(environment or {}).values())):
                self.path(name)
        urls = {"SECURED": self.secured.url, "DEVELOPMENT": self.development.url, "TAKEN": str(self.development.port)}
        for name, value in urls.items():
            arguments = tuple(text.replace(name, value) for text in arguments)
        return await asyncio.to_thread(
            self._run, arguments, given, program or MAIN, {**ENVIRONMENT, **(environment or {})}
        )

    def _run(self, arguments: tuple[str, ...], given: str, program: str, environment: Mapping[str, str]) -> str:
        with Command(*arguments, program=program, environment=environment, cwd=self.directory) as process:
            try:
                output, errors = process.communicate(given, timeout=WAIT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode not in (0, None), f"{arguments} succeeded:\n{output}\n{errors}"
        return errors or output

    def _copy_log(self, path: Path) -> None:
        shutil.copy(self._template, path)

    def _make_newer_log(self, path: Path) -> None:
        self._copy_log(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE oncelog_log SET schema_version = 999")
            connection.commit()

    def _make_damaged_log(self, path: Path) -> None:
        self._copy_log(path)
        content = path.read_bytes()
        path.write_bytes(content[:PAGE_BYTES] + b"\xa5" * (len(content) - PAGE_BYTES))


def write_secret(path: Path, secret: str, mode: int) -> None:
    path.write_text(secret)
    path.chmod(mode)


def _write_notes(path: Path) -> None:
    path.write_text("Buy milk.\n")


def _make_foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")


async def raised(work: Awaitable[Any] | Callable[[], Any]) -> str:
    """Return the error of a call as a program's output ends with it: its class and its message."""
    try:
        outcome = work() if callable(work) else work
        if inspect.isawaitable(outcome):
            outcome = await outcome
    except Exception as error:  # noqa: BLE001 - the mistake's table says which one
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no error, but {outcome!r}")


async def refused(work: Awaitable[Any]) -> str:
    """Return the message of a refusal."""
    verdict = await work
    assert isinstance(verdict, oncelog.Refused), verdict
    return f"{verdict.reason.value}: {verdict.message}"


def describe(answer: Answer) -> str:
    """Return the status and the document of an HTTP error response."""
    assert answer.status >= 400, answer.body
    return f"{answer.status} {answer.json}"


async def last_error(client: Any) -> str:
    """Open a client, wait until it knows why it is not connected, and return the reason."""
    async with client:
        await until(lambda: client.status().last_error)
        return str(client.status().last_error)
