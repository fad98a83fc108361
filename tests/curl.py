"""A replacement for curl with only the options that the documentation and `oncelog serve` show.

This file is both the program, which uses only the standard library, and the helper that puts it on a PATH.
"""

import shlex
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

CANNOT_CONNECT: Final = 7
BROKEN_OFF: Final = 18
REFUSED: Final = 22
TOO_LATE: Final = 28
"""curl's exit statuses."""
PIECE_BYTES: Final = 65_536

STAND_IN: Final = "stand-in"
REAL: Final = "real"


# --- for tests -----------------------------------------------------------------------------------------


def kinds() -> list[str]:
    """Return the available kinds of curl, for parametrization. The replacement is always available."""
    return [STAND_IN] if shutil.which("curl") is None else [STAND_IN, REAL]


def environment_with(kind: str, environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the environment with the given kind of `curl`. The replacement is written to `directory`."""
    if kind == REAL:
        return dict(environment)
    program = directory / "curl"
    command = shlex.join([sys.executable, "-I", __file__])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return {**environment, "PATH": f"{directory}:{environment['PATH']}"}


# --- the program ---------------------------------------------------------------------------------------


class RefusedError(Exception):
    """With --fail: the HTTP status was 400 or higher."""


class TooLateError(Exception):
    """The --max-time limit was exceeded."""


def main() -> int:
    options = _options()
    try:
        _end_after(options.max_time)
        _fetch(options)
    except TooLateError:
        return _failed(options, TOO_LATE, f"Operation timed out after {options.max_time} seconds")
    except RefusedError as error:
        return _failed(options, REFUSED, f"The requested URL returned error: {error}")
    except HTTPException as error:
        return _failed(options, BROKEN_OFF, repr(error))
    except OSError as error:
        return _failed(options, CANNOT_CONNECT, str(error))
    return 0


def _options() -> Namespace:
    # As in curl, an unknown option exits with status 2.
    parser = ArgumentParser("curl", add_help=False, allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("-s", dest="is_silent", action="store_true")
    parser.add_argument("-N", dest="is_unbuffered", action="store_true", help="always unbuffered")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-X", dest="method")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--max-time", type=float, default=0)
    return parser.parse_args()


def _end_after(seconds: float) -> None:
    """Limit the whole transfer, as curl does. A socket timeout would restart with every chunk."""

    def end(*_: object) -> None:
        raise TooLateError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _fetch(options: Namespace) -> None:
    parts = urlsplit(options.url if "://" in options.url else f"http://{options.url}")
    headers = {"User-Agent": "curl", "Accept": "*/*"}
    if options.data is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    for header in options.headers:
        name, _, value = header.partition(":")
        headers[name] = value.strip()
    connection = HTTPConnection(parts.hostname or "", parts.port)
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    body = None if options.data is None else options.data.encode()
    method = options.method or ("GET" if body is None else "POST")
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    if options.fail and response.status >= 400:
        raise RefusedError(str(response.status))
    while piece := response.read1(PIECE_BYTES):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _failed(options: Namespace, status: int, message: str) -> int:
    if not options.is_silent:
        print(f"curl: ({status}) {message}", file=sys.stderr)  # noqa: T201 - its output
    return status


if __name__ == "__main__":
    sys.exit(main())
