"""`oncelog stats`: print figures of a log, without counting its records."""

from typing import Any

import msgspec

from oncelog.cli.terminal import AsJson, LogArgument, format_record_counts, format_utc, print_result
from oncelog.core.policy import LEDGER
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.metadata import count_blocks, count_records
from oncelog.storage.queries.records import count_audit_records, count_erasures, list_consumers, load_gaps, load_heads
from oncelog.storage.queries.tenants import load_usage
from oncelog.storage.verify.side_state import decode_policies


def stats(log: LogArgument, as_json: AsJson = False) -> None:
    """Print the settings, lane heads, policies, consumers, tenants and sizes of a log.

    Example:  oncelog stats orders.db --json

    Example:  oncelog stats postgresql://oncelog@db.example.org/orders
    """
    with create_inspector(log).open_view() as view:
        figures = _collect_figures(view)
    print_result(figures, _format_figures(figures), as_json)


def _collect_figures(view: LogView) -> dict[str, Any]:
    ledger = decode_policies(view.iterate_rows("policies")).get(LEDGER.name, LEDGER)
    metadata, heads, gaps = view.metadata, view.run_query(load_heads), view.run_query(load_gaps)
    return {
        "epoch": metadata.epoch,
        "schema": metadata.schema_version,
        "created_ms": metadata.created_ms,
        "settings": {**msgspec.structs.asdict(metadata.settings), "ledger_ttl_ms": ledger.retention.ttl_ms},
        "records": count_records(heads, gaps),
        "restore_records": sum(len(lane_gaps.positions) for lane_gaps in gaps.values()),
        "audit_records": view.run_query(count_audit_records),
        "blocks": count_blocks(heads, gaps),
        "lanes": [
            {"lane": lane, "position": head.position, "height": head.height, "log_time_ms": head.log_time_ms}
            for lane, head in heads.items()
        ],
        "policies": [name for name, _ in view.iterate_rows("policies")],
        "consumers": [msgspec.structs.asdict(consumer) for consumer in view.run_query(list_consumers)],
        "erasures": view.run_query(count_erasures),
        "tenants": [
            {**msgspec.structs.asdict(tenant), "bytes": usage.bytes, "records": usage.records}
            for tenant, usage in view.run_query(load_usage)
        ],
        **view.get_sizes(),
    }


def _format_figures(figures: dict[str, Any]) -> list[str]:
    settings = figures["settings"]
    records = format_record_counts(figures["records"], figures["restore_records"], figures["audit_records"])
    return [
        f"epoch {figures['epoch']}, schema {figures['schema']}, created {format_utc(figures['created_ms'])}",
        f"streams over {settings['lanes']} lanes, evictions every {settings['eviction_interval']} positions",
        f"ledger clients and keys are forgotten after {settings['ledger_ttl_ms']} ms",
        f"{records} in {figures['blocks']} blocks, {figures['erasures']} erasures",
        *(
            f"  lane {lane['lane']}: position {lane['position']}, height {lane['height']}, "
            f"{format_utc(lane['log_time_ms'])}"
            for lane in figures["lanes"]
        ),
        f"policies: {', '.join(figures['policies']) or 'none'}",
        *(
            f"  consumer {consumer['name']!r} of {consumer['scope'] or 'lane 0'}: "
            f"at {consumer['cursor']}, {consumer['lag']} behind"
            for consumer in figures["consumers"]
        ),
        *map(_format_tenant, figures["tenants"]),
        *(_format_database(figures) if "tables" in figures else _format_file(figures)),
    ]


def _format_tenant(tenant: dict[str, Any]) -> str:
    limits = {name: tenant[f"{name}_max"] for name in ("bytes", "records")}
    has = ", ".join(f"{tenant[name]} {name}{f' of {limit}' if limit else ''}" for name, limit in limits.items())
    per_second = tenant["new_writes_per_second_max"]
    return f"  tenant {tenant['prefix']!r}: {has}{f', {per_second} new writes a second' if per_second else ''}"


def _format_file(figures: dict[str, Any]) -> list[str]:
    keys = figures["keys"]
    segments = ", ".join(f"{count} of level {level}" for level, count in keys["segments"].items()) or "none"
    return [
        f"keys: {keys['hot']} hot, {keys['sealed']} sealed; segments: {segments}",
        f"file: {figures['bytes']} bytes, write-ahead log: {figures['wal_bytes']} bytes",
    ]


def _format_database(figures: dict[str, Any]) -> list[str]:
    return [
        f"PostgreSQL {figures['server']}: {figures['bytes']} bytes, with indexes",
        *(f"  {name}: {size} bytes" for name, size in figures["tables"].items()),
    ]
