"""Figures of a log, for `oncelog stats` and `GET /v1/stats`."""

from msgspec import Struct
from msgspec.structs import asdict

from oncelog.core.policy import LEDGER
from oncelog.core.tenants import Tenant
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.metadata import count_blocks, count_records
from oncelog.storage.queries.records import count_audit_records, count_erasures, list_consumers, load_gaps, load_heads
from oncelog.storage.queries.tenants import load_usage
from oncelog.storage.verify.side_state import decode_policies


class LaneFigures(Struct, frozen=True):
    """The head of a lane."""

    lane: int
    position: int
    height: int
    log_time_ms: int


class ConsumerFigures(Struct, frozen=True):
    """A named consumer and how many records it is behind."""

    scope: str
    name: str
    cursor: int
    lag: int


class TenantFigures(Tenant, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A tenant with its limits and its usage."""

    bytes: int
    records: int


class KeyFigures(Struct, frozen=True):
    """The key index of a file."""

    hot: int
    """Records whose keys no segment contains yet."""
    sealed: int
    segments: dict[str, int]
    """Number of segments by level."""


class LogFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The figures of a log. A figure without a value does not apply to the log's database."""

    epoch: str
    schema: int
    created_ms: int
    settings: dict[str, int]
    records: int
    restore_records: int
    audit_records: int
    blocks: int
    lanes: list[LaneFigures]
    policies: list[str]
    consumers: list[ConsumerFigures]
    erasures: int
    tenants: list[TenantFigures]
    server: str | None = None
    keys: KeyFigures | None = None
    bytes: int
    wal_bytes: int | None = None
    tables: dict[str, int] | None = None
    leaps: list[int] = []
    """The numbers above which restores and renewed epochs continued all numbers."""


def read_figures(log: str, *, is_open_here: bool = False) -> LogFigures:
    """Read the figures of a log, without counting its records. Raises the errors of `Inspector`.

    Set `is_open_here` if this process has the log open.
    """
    with create_inspector(log, is_open_here=is_open_here).open_view() as view:
        return _collect_figures(view)


def _collect_figures(view: LogView) -> LogFigures:
    ledger = decode_policies(view.iterate_rows("policies")).get(LEDGER.name, LEDGER)
    metadata, heads, gaps = view.metadata, view.run_query(load_heads), view.run_query(load_gaps)
    sizes = view.get_sizes()
    if "keys" in sizes:
        sizes["keys"] = KeyFigures(**sizes["keys"])
    return LogFigures(
        epoch=metadata.epoch,
        schema=metadata.schema_version,
        created_ms=metadata.created_ms,
        settings={**asdict(metadata.settings), "ledger_ttl_ms": ledger.retention.ttl_ms},
        records=count_records(heads, gaps),
        restore_records=sum(len(lane_gaps.positions) for lane_gaps in gaps.values()),
        audit_records=view.run_query(count_audit_records),
        leaps=sorted({end - 1 for lane_gaps in gaps.values() for _, end in lane_gaps.positions}),
        blocks=count_blocks(heads, gaps),
        lanes=[LaneFigures(lane, head.position, head.height, head.log_time_ms) for lane, head in heads.items()],
        policies=[name for name, _ in view.iterate_rows("policies")],
        consumers=[ConsumerFigures(**asdict(consumer)) for consumer in view.run_query(list_consumers)],
        erasures=view.run_query(count_erasures),
        tenants=[
            TenantFigures(**asdict(tenant), bytes=usage.bytes, records=usage.records)
            for tenant, usage in view.run_query(load_usage)
        ],
        **sizes,
    )
