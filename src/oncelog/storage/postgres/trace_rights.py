"""Checks that the database's user may use the table of trace contexts (`storage/queries/traces.py`)."""

from oncelog.errors import SettingsError
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries.statement import QuerySteps, Statement


def check_trace_rights() -> QuerySteps[None]:
    """Raise SettingsError if tracing needs rights that the user lacks. The message has the SQL that the owner runs."""
    [(is_created, missing, may_create, schema, user)] = yield Statement("trace_rights")
    table = f"{schema}._oncelog_traces"
    if is_created and missing:
        raise SettingsError(
            f"tracing needs {', '.join(missing)} on {table}, which the user {user} lacks. The owner of the table must "
            f"run: GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user};"
        )
    if not is_created and not may_create:
        create = SQL["create_traces"].replace("_oncelog_traces", table).strip().rstrip(";")
        raise SettingsError(
            f"tracing needs the table {table}, which the user {user} may not create. The owner of the log's tables "
            f"must run: {create}; GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user};"
        )
