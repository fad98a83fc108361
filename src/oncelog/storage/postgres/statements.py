"""PostgreSQL statements by name, and migrations in order."""

from importlib.resources import files
from typing import Final

from oncelog.sql_files import list_scripts
from oncelog.storage.queries.statement import load_statements

_SQL: Final = files("oncelog.storage.postgres") / "sql"
SQL: Final = load_statements(_SQL)
MIGRATIONS: Final = list_scripts(_SQL / "migrations")
"""Each version's number and script, oldest first."""
SCHEMA_VERSION: Final = MIGRATIONS[-1][0]
