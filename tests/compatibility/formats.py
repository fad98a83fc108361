"""Files of every format that a version of Oncelog has written, and how to open copies of them."""

import lzma
import re
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import asyncpg

from databases import run_in_thread

FILES: Final = Path(__file__).parent / "files"
SCHEMA_NAME: Final = "log_schema"
"""Placeholder for the name of the PostgreSQL schema in the dumps."""
_OMITTED: Final = re.compile(r"--|\\|SET |SELECT pg_catalog\.set_config|CREATE SCHEMA |$")
"""Lines of a dump that a restore into an existing schema does not need."""


def name_versions(kind: str) -> dict[int, Path]:
    """Return the files of one kind by their version."""
    found = {}
    for file in sorted(FILES.iterdir()):
        match = re.fullmatch(rf"{kind}-(\d+)\.\w+(\.xz)?", file.name)
        if match is not None:
            found[int(match[1])] = file
    return found


def pack(content: bytes, target: Path) -> None:
    """Write a compressed file."""
    target.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def unpack(file: Path, target: Path) -> Path:
    """Write the content of a file, compressed or not, to the target, and return the target."""
    content = file.read_bytes()
    target.touch(mode=0o600)
    target.write_bytes(lzma.decompress(content) if file.suffix == ".xz" else content)
    return target


def shorten_dump(dump: str, schema: str) -> str:
    """Return the statements of a dump, with a placeholder for the name of its schema."""
    lines = [line for line in dump.splitlines() if not _OMITTED.match(line)]
    return "\n".join(lines).replace(f"{schema}.", f"{SCHEMA_NAME}.") + "\n"


def restore_dump(file: Path, address: str) -> None:
    """Execute a dump in the empty schema of an address."""
    statements = lzma.decompress(file.read_bytes()).decode().replace(f"{SCHEMA_NAME}.", f"{schema_of(address)}.")

    async def execute() -> None:
        connection = await asyncpg.connect(address)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    run_in_thread(execute())


def schema_of(address: str) -> str:
    """Return the schema that an address names."""
    (schema,) = parse_qs(urlsplit(address).query)["search_path"]
    return schema
