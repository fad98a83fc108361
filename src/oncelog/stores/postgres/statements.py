"""The statements of `sql/queries.sql` by name, and the migrations in their order."""

from importlib.resources import files
from typing import Final

from oncelog.statements import named_statements, numbered_scripts

_SQL: Final = files("oncelog.stores.postgres") / "sql"
SQL: Final = named_statements((_SQL / "queries.sql").read_text(encoding="utf-8"))
MIGRATIONS: Final = numbered_scripts(_SQL / "migrations")
"""Each version's number and script, oldest first."""
SCHEMA_VERSION: Final = MIGRATIONS[-1][0]
