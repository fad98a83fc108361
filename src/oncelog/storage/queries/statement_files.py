"""The SQL that both engines share. Parameters are `$1`, `$2`, … as PostgreSQL writes them."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from oncelog.sql_files import parse_statements

_SHARED: Final = files("oncelog.storage.queries") / "sql" / "queries.sql"


def load_statements(directory: Traversable, parameter_prefix: str = "$") -> dict[str, str]:
    """Return the statements of an engine by name: those in its directory, and the shared ones.

    Raises ValueError for a name that stands in both files.
    """
    shared = parse_statements(_SHARED.read_text(encoding="utf-8").replace("$", parameter_prefix))
    own = parse_statements((directory / "queries.sql").read_text(encoding="utf-8"))
    if shared.keys() & own.keys():
        raise ValueError(f"SQL statements have two definitions: {sorted(shared.keys() & own.keys())}")
    return shared | own
