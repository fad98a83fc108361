"""What names a log: the path of a file, or the address of a database."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from oncelog.core.values import Settings
from oncelog.errors import SettingsError

if TYPE_CHECKING:
    from oncelog.stores.protocol import Store

_SCHEMES: Final = ("postgresql://", "postgres://")
POSTGRES_TIMEOUTS: Final = ("connect_ms", "lane_ms", "commit_ms", "patience_ms")
"""What `timeouts_ms` may name; the defaults are those of `oncelog.stores.postgres.connecting.Timeouts`."""


def is_address(store: str) -> bool:
    """Whether it names a database, not a file."""
    return store.startswith(_SCHEMES)


def shown(store: str) -> str:
    """Without a password and parameters, for messages and logs."""
    if not is_address(store):
        return store
    parts = urlsplit(store)
    user, at, hosts = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, user.partition(":")[0] + at + hosts, parts.path, "", ""))


def postgres_store(
    address: str, settings: Settings | None, *, timeouts_ms: Mapping[str, int], **options: Any
) -> "Store":
    """A store in a database. Raises SettingsError where what it needs is not installed."""
    module = with_driver("oncelog.stores.postgres")
    store: Store = module.PostgresStore(address, settings, timeouts=module.Timeouts(**timeouts_ms), **options)
    return store


def with_driver(name: str) -> Any:
    """A module that needs the database's driver. Raises SettingsError where that is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        message = "a log in a database needs asyncpg: pip install 'oncelog[postgres]'"
        raise SettingsError(message) from error
