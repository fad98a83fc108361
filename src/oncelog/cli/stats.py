"""`oncelog stats`: what is in a log, without counting it."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import typer

from oncelog.cli.terminal import AsJson, File, ending_well, print_json
from oncelog.cli.times import utc
from oncelog.stores.about import About
from oncelog.stores.sqlite import reading
from oncelog.stores.sqlite.index import KeyIndex, Lane
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.statements import SQL


def stats(file: File, as_json: AsJson = False) -> None:
    """Prints what a log was made with, how far its lanes have come, its policies, key index, consumers and sizes.

    Example:  oncelog stats orders.db --json
    """
    with ending_well():
        with looking_at(file) as (connection, found):
            figures = _figures(connection, found)
            # Before the connection is closed: the last one out empties the write-ahead log.
            figures["bytes"] = Path(file).stat().st_size
            wal = Path(f"{file}-wal")
            figures["wal_bytes"] = wal.stat().st_size if wal.exists() else 0
        if as_json:
            print_json(figures)
        else:
            for line in _lines(figures):
                typer.echo(line)


def _figures(connection: Any, found: About) -> dict[str, Any]:
    heads = reading.heads(connection)
    commits, erasures, *_ = connection.execute(SQL["state"]).fetchone()
    lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in connection.execute(SQL["lanes"]).fetchall()}
    index = KeyIndex(found.index_secret)
    index.catch_up(connection, commits, lanes)
    levels = Counter(segment.level for segment in index.segments)
    return {
        "epoch": found.epoch,
        "schema": found.schema_version,
        "created_ms": found.created_ms,
        "settings": msgspec.structs.asdict(found.settings),
        "records": sum(head.position for head in heads.values()),
        "blocks": sum(head.height for head in heads.values()),
        "lanes": [
            {"lane": lane, "position": head.position, "height": head.height, "log_time_ms": head.log_time_ms}
            for lane, head in heads.items()
        ],
        "policies": [name for name, _ in connection.execute(SQL["policies"])],
        "keys": {
            "hot": index.hot_keys,
            "sealed": index.sealed_keys,
            "segments": {str(level): levels[level] for level in sorted(levels)},
        },
        "consumers": [
            msgspec.structs.asdict(consumer) for consumer in reading.consumers(connection, found.settings.lanes)
        ],
        "erasures": erasures,
    }


def _lines(figures: dict[str, Any]) -> list[str]:
    settings, keys = figures["settings"], figures["keys"]
    segments = ", ".join(f"{count} of level {level}" for level, count in keys["segments"].items()) or "none"
    return [
        f"epoch {figures['epoch']}, schema {figures['schema']}, created {utc(figures['created_ms'])}",
        f"streams over {settings['lanes']} lanes, evictions every {settings['eviction_interval']} positions",
        f"{figures['records']} records in {figures['blocks']} blocks, {figures['erasures']} erasures",
        *(
            f"  lane {lane['lane']}: position {lane['position']}, height {lane['height']}, {utc(lane['log_time_ms'])}"
            for lane in figures["lanes"]
        ),
        f"policies: {', '.join(figures['policies']) or 'none'}",
        f"keys: {keys['hot']} hot, {keys['sealed']} sealed; segments: {segments}",
        *(
            f"  consumer {one['name']!r} of {one['scope'] or 'lane 0'}: at {one['cursor']}, {one['lag']} behind"
            for one in figures["consumers"]
        ),
        f"file: {figures['bytes']} bytes, write-ahead log: {figures['wal_bytes']} bytes",
    ]
