"""Secret files that commands read: their permissions are checked as the server checks its own."""

import os
import stat
from typing import Final

from oncelog.errors import OncelogError, SettingsError
from oncelog.server.auth.secret_files import SecretCheck, check_secret_file

CHECK_VARIABLE: Final = "ONCELOG_CHECK_SECRET_FILES"
"""The environment variable of the server's setting `check_secret_files`, for commands too."""
_CHECKS: Final = {"true": SecretCheck.COMMAND, "false": SecretCheck.WARN}


def get_secret_check() -> SecretCheck:
    """Return how strictly this command checks secret files. Raises SettingsError for a wrong variable."""
    check = _CHECKS.get(os.environ.get(CHECK_VARIABLE, "").lower() or "true")
    if check is None:
        raise SettingsError(f"environment variable {CHECK_VARIABLE} must be true or false")
    return check


def read_token_file(path: str, bytes_max: int) -> str:
    """Return the text of a file with a token; a pipe will do. Raises OncelogError."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - also of a descriptor, as the shell passes one
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode):
                check_secret_file(path, found.st_uid, stat.S_IMODE(found.st_mode), "a token", get_secret_check())
            return file.read(bytes_max).decode("ascii")
    except OSError as error:
        raise OncelogError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise OncelogError(f"{path} has no token in it") from None
