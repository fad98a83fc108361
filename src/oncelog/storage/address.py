"""What names a log: the path of a file, or the address of a database."""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import SettingsError

if TYPE_CHECKING:
    from oncelog.storage.store import Store

_SCHEMES: Final = ("postgresql://", "postgres://")
_ANY_SCHEME_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BAD_ADDRESS: Final = "the address cannot be read; it should be like postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
_PUBLIC_PARAMETERS: Final = ("host", "port", "search_path", "target_session_attrs")
"""Parameters of an address that may be shown."""
_HOSTS_PATTERN: Final = re.compile(r"[\w.,:%\[\]/-]*")
POSTGRES_TIMEOUTS: Final = ("connect_ms", "lane_ms", "commit_ms", "patience_ms")
"""What `timeouts_ms` may name; the defaults are those of `oncelog.storage.postgres.connection.Timeouts`."""


def is_address(store: str) -> bool:
    """Whether it names a database, not a file."""
    return store.lower().startswith(_SCHEMES)


def check_scheme(store: str) -> None:
    """Raise SettingsError for an address with another scheme. The message has no other part: it may have a password."""
    other = _ANY_SCHEME_PATTERN.match(store)
    if other is not None and not is_address(store):
        raise SettingsError(
            f"a log is a file or postgresql://USER@HOST/DATABASE, but the address begins with {other[0]}"
        )


def redact_address(store: str) -> str:
    """Without a password and what may be one, for messages and logs; with what says which database it is."""
    if not is_address(store):
        return store
    scheme = store.partition("://")[0]
    try:
        parts = urlsplit(store)
    except ValueError:
        raise SettingsError(BAD_ADDRESS) from None
    user, at, hosts = parts.netloc.rpartition("@")
    if parts.fragment or "@" in parts.path + parts.query or not _HOSTS_PATTERN.fullmatch(hosts):
        return f"{scheme}://…"  # what it means is not clear, so nobody knows which part is the password
    public_query = urlencode(
        [parameter for parameter in parse_qsl(parts.query) if parameter[0] in _PUBLIC_PARAMETERS], safe="/,"
    )
    return urlunsplit((scheme, user.partition(":")[0] + at + hosts, parts.path, public_query, ""))


def create_postgres_store(
    address: str, settings: Settings | RequestedSettings | None, *, timeouts_ms: Mapping[str, int], **options: Any
) -> "Store":
    """A store in a database. Raises SettingsError where what it needs is not installed."""
    module = import_with_driver("oncelog.storage.postgres")
    store: Store = module.PostgresStore(address, settings, timeouts=module.Timeouts(**timeouts_ms), **options)
    return store


def import_with_driver(module_name: str) -> Any:
    """A module that needs the database's driver. Raises SettingsError where that is not installed."""
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        message = "a log in a database needs asyncpg: pip install 'oncelog[postgres]'"
        raise SettingsError(message) from error
