"""Errors for packages of an extra that are not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from oncelog.errors import SettingsError

PACKAGES: Final = {
    "aiohttp": "aiohttp",
    "asyncpg": "asyncpg",
    "cryptography": "cryptography",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "joserfc": "joserfc",
    "prometheus_client": "prometheus-client",
    "uvloop": "uvloop",
}
"""Packages of the extras and their dependencies, by top-level module."""


@contextmanager
def explain_missing_package(user: str, extra: str) -> Iterator[None]:
    """Raise SettingsError if an import fails because a package of an extra is not installed.

    `user` is what needs the package, such as "the server". The failed import of any other module remains an error of
    the program.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise SettingsError(f"{user} needs {package}: pip install 'oncelog[{extra}]'") from error
