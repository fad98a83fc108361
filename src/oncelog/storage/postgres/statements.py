"""The statements of `sql/queries.sql` by name, and the migrations in their order."""

from importlib.resources import files
from typing import Final

from oncelog.sql_files import list_scripts, parse_statements

_SQL: Final = files("oncelog.storage.postgres") / "sql"
SQL: Final = parse_statements((_SQL / "queries.sql").read_text(encoding="utf-8"))
MIGRATIONS: Final = list_scripts(_SQL / "migrations")
"""Each version's number and script, oldest first."""
SCHEMA_VERSION: Final = MIGRATIONS[-1][0]
