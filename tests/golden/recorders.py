"""All recorders of golden files, by name. A recorder gets an empty directory and returns file contents by file name."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from golden import command_lines, exchanges, surfaces

Recorder = Callable[[Path], Mapping[str, str]]

RECORDERS: Final[Mapping[str, Recorder]] = {
    "openapi": surfaces.record_openapi,
    "metrics": surfaces.record_metrics,
    "settings": surfaces.record_settings,
    "python-names": surfaces.record_python_names,
    "sqlite-schemas": surfaces.record_sqlite_schemas,
    "postgres-schema": surfaces.record_postgres_schema,
    "history": surfaces.record_history,
    "postgres-history": surfaces.record_postgres_history,
    "help": surfaces.record_help,
    "commands": command_lines.record_commands,
    "server-commands": command_lines.record_server_commands,
    "postgres-commands": command_lines.record_postgres_commands,
    **{f"exchanges-{name}": partial(exchanges.record_group, group) for name, group in exchanges.GROUPS.items()},
}
