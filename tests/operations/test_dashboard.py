"""The queries of the dashboard and the alerts use metrics, labels and values that a server exports."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import pytest
import yaml  # type: ignore[import-untyped]
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from oncelog import error_codes
from oncelog.core.tenants import Tenant
from oncelog.server.metrics import CONNECTION_REFUSALS
from oncelog.server.settings import DISK_DEFAULTS
from server.running_server import item, serving
from server.test_write_refusals import measured, ways

GRAFANA: Final = Path(__file__).parents[2] / "examples/grafana"
DASHBOARD: Final = json.loads((GRAFANA / "oncelog.json").read_text(encoding="utf-8"))
ALERTS: Final = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))
BY_PROMETHEUS: Final = {"job", "instance"}
"""Labels that Prometheus adds to every sample."""
VARIABLES: Final = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}

Labels = dict[str, dict[str, set[str]]]
"""The labels of each metric, with their values."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    """Metrics of a server on which everything has happened that a panel shows."""

    async def scrape() -> str:
        tenants = (Tenant("acme", bytes_max=10**9, records_max=10**6),)
        disk = replace(DISK_DEFAULTS, store_bytes_max=2**50)
        async with serving(tmp_path_factory.mktemp("log"), tenants=tenants, disk=disk) as served, ways(served) as doors:
            for _ in range(2):  # new, and known
                for number, write in enumerate(doors.values(), 1):
                    assert await write(number) is None
            assert (await served.submit({})).status == 400
            served.server.log.set_read_only()
            assert (await served.submit(item(99))).status == 503
            shown = await measured(served)
        # The server above is in development mode, which has no credential files.
        async with serving(tmp_path_factory.mktemp("keys"), api_keys=True, metrics_public=True) as served:
            return shown + await measured(served)

    # Outcomes that this test cannot provoke.
    found: Labels = {"oncelog_requests_total": {"outcome": {error_codes.SERVER_ERROR, error_codes.SERVER_BUSY}}}
    for family in text_string_to_metric_families(asyncio.run(scrape())):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield the place of each query, the query, and the legend of its series."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            yield f"variable {variable['name']}", asked[1], f"{{{{{asked[2]}}}}}"
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            named = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
            yield rule["alert"], rule["expr"], " ".join(f"{{{{{name}}}}}" for name in named)


@pytest.mark.parametrize(
    ("where", "query", "legend"), [pytest.param(*one, id=f"{one[0]}-{n}") for n, one in enumerate(queries())]
)
def test_every_query_names_existing_metrics_and_labels(where: str, query: str, legend: str, scraped: Labels) -> None:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query, "unknown dashboard variable"
    parsed = promql.parse(query)
    selectors = [one for one in parts(parsed) if isinstance(one, promql.VectorSelector)]
    assert selectors, where
    known: set[str] = set(BY_PROMETHEUS)
    for selector in selectors:
        if selector.name == "up":  # Prometheus' own
            continue
        assert selector.name in scraped, f"{where}: no server has the metric {selector.name}"
        labels = scraped[selector.name]
        known |= labels.keys()
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels.keys() | BY_PROMETHEUS, f"{where}: {selector.name} has no {matcher.name}"
            if matcher.name in labels:
                assert any(matches(matcher, value) for value in labels[matcher.name]), f"{where}: {matcher.value}"
    for aggregate in (one for one in parts(parsed) if isinstance(one, promql.AggregateExpr)):
        grouped = set(aggregate.modifier.labels) if aggregate.modifier is not None else set()
        assert grouped <= known, f"{where}: nothing has {grouped - known}"
    # `group_right` keeps the labels of the other side.
    kept = (
        None if "group_right" in query else re.search(r"^(?:sum|max|histogram_quantile\(.*?sum) by \(([^)]*)\)", query)
    )
    shown = {name.strip() for name in kept[1].split(",")} if kept else known
    assert set(re.findall(r"{{\s*(\w+)\s*}}", legend)) <= shown, f"{where}: {legend} of {shown}"


def test_dashboard_shows_every_metric_of_a_server(scraped: Labels) -> None:
    """Except metrics that are shown in another form or are for debugging."""
    asked = " ".join(query for _, query, _ in queries())
    left_out = {"oncelog_frames_received_total", "oncelog_sent_bytes_total"}
    ours = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in scraped if name.startswith("oncelog_")}
    assert {name for name in ours if name not in asked} == left_out


def test_every_reason_of_a_refused_connection_has_a_sample_from_the_start(scraped: Labels) -> None:
    assert scraped["oncelog_connections_refused_total"]["reason"] == set(CONNECTION_REFUSALS)


def test_panels_have_unique_titles_and_positions() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all("${datasource}" in json.dumps(panel["datasource"]) for panel in panels)


def parts(expression: Any) -> Iterator[Any]:
    """Yield all parts of a query."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "vs", "param"):
        inner = getattr(expression, name, None)
        if isinstance(inner, promql.Expr):
            yield from parts(inner)
    for inner in getattr(expression, "args", None) or ():
        yield from parts(inner)


def matches(matcher: Any, value: str) -> bool:
    """Whether the matcher selects a series with that value."""
    if matcher.op == promql.MatchOp.Equal:
        return bool(matcher.value == value)
    if matcher.op == promql.MatchOp.NotEqual:
        return bool(matcher.value != value)
    is_like = re.fullmatch(matcher.value, value) is not None
    return is_like if matcher.op == promql.MatchOp.Re else not is_like
