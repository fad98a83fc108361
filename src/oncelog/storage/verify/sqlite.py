"""Verifies a log in a file, in one read transaction and in bounded memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncelog.storage.metadata import LogMetadata
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.verify import verification
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions
from oncelog.storage.verify.sqlite_schema import check_newest, check_schema, check_structure
from oncelog.storage.verify.sqlite_source import FileSource


def verify_file(
    path: str | os.PathLike[str], head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Goes through a log. The last finding is a Lie, the first one found, or Passed; before it comes Progress.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError for what cannot be looked at. A log may be in use
    meanwhile; its write-ahead log cannot be emptied until the verification ends.
    """
    yield from verification.report_inconsistency(_verify_file(os.fspath(path), head, options))


def _verify_file(path: str, head: ExportedHead | None, options: VerifyOptions) -> Iterator[Finding]:
    with open_read_transaction(path) as (connection, file):
        yield from verify(connection, file, head, options, str(Path(path).absolute().parent))


def verify(
    connection: Any,
    metadata: LogMetadata,
    head: ExportedHead | None = None,
    options: VerifyOptions = DEFAULT_OPTIONS,
    log_directory: str | None = None,
) -> Iterator[Finding]:
    """The same on a connection inside a transaction. Raises InconsistencyError in place of a Lie."""
    with verification.translate_damage():
        source = FileSource(connection, metadata)
    yield from verification.verify(source, head, options, log_directory)


def verify_quickly(connection: Any) -> None:
    """SQLite's own check, and the newest of every lane only. Raises InconsistencyError."""
    with verification.translate_damage():
        check_structure(connection)
        check_schema(connection)
        check_newest(connection)
