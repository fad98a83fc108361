"""Names of logs: either a file path or a database address."""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import SettingsError
from oncelog.extras import explain_missing_package

if TYPE_CHECKING:
    from oncelog.storage.store import Store

_SCHEMES: Final = ("postgresql://", "postgres://")
_ANY_SCHEME_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BAD_ADDRESS: Final = (
    "the address cannot be parsed; it must look like postgresql://USER:PASSWORD@HOST:PORT/DATABASE, and special "
    "characters in it must be percent-encoded"
)
_PUBLIC_PARAMETERS: Final = ("host", "port", "search_path", "target_session_attrs")
"""Address parameters that messages and logs may show."""
_HOSTS_PATTERN: Final = re.compile(r"[\w.,:%\[\]/-]*")
POSTGRES_TIMEOUTS: Final = ("connect_ms", "lane_ms", "commit_ms", "patience_ms")
"""Names that `timeouts_ms` accepts; `oncelog.storage.postgres.connection.Timeouts` has the defaults."""


def is_address(store: str) -> bool:
    """Return whether a name is a database address rather than a path."""
    return store.lower().startswith(_SCHEMES)


def check_scheme(store: str) -> None:
    """Raise SettingsError if the address is empty, contains U+0000 or has an unsupported scheme.

    The message quotes only the scheme, because the rest of the address may contain a password.
    """
    if not store:
        raise SettingsError("the log's address is empty: pass a file or postgresql://USER@HOST/DATABASE")
    if "\0" in store:
        raise SettingsError("the log's address must not contain U+0000")
    other = _ANY_SCHEME_PATTERN.match(store)
    if other is not None and not is_address(store):
        raise SettingsError(
            f"the log's address must be a file or postgresql://USER@HOST/DATABASE, but it begins with {other[0]}"
        )


def redact_address(store: str) -> str:
    """Return the address without passwords, for use in messages and logs.

    The result still identifies the database.
    """
    if not is_address(store):
        return store
    scheme = store.partition("://")[0]
    try:
        parts = urlsplit(store)
    except ValueError:
        raise SettingsError(BAD_ADDRESS) from None
    user, at, hosts = parts.netloc.rpartition("@")
    if parts.fragment or "@" in parts.path + parts.query or not _HOSTS_PATTERN.fullmatch(hosts):
        return f"{scheme}://…"  # in an ambiguous address, any part may be the password
    public_query = urlencode(
        [parameter for parameter in parse_qsl(parts.query) if parameter[0] in _PUBLIC_PARAMETERS], safe="/,"
    )
    return urlunsplit((scheme, user.partition(":")[0] + at + hosts, parts.path, public_query, ""))


def create_postgres_store(
    address: str, settings: Settings | RequestedSettings | None, *, timeouts_ms: Mapping[str, int], **options: Any
) -> "Store":
    """Create a store for a database. Raises SettingsError if the driver is not installed."""
    module = import_with_driver("oncelog.storage.postgres")
    store: Store = module.PostgresStore(address, settings, timeouts=module.Timeouts(**timeouts_ms), **options)
    return store


def import_with_driver(module_name: str) -> Any:
    """Import a module that needs the database driver. Raises SettingsError if the driver is not installed."""
    with explain_missing_package("a log in a database", "postgres"):
        return import_module(module_name)
