"""Write bench/results/failover.md during a soak run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.report import Report, Table, page
from failover.findings import read_calls
from failover.load_apis import APIS
from failover.rounds import KINDS, MOVES, Round
from oncelog.testing.cluster import ClusterSettings
from servers.checker import COMMITTED

REPORT = Path(__file__).parents[2] / "bench" / "results" / "failover.md"
COMMAND = "python -m pytest --soak tests/failover/test_failover.py"
HOW_TO_READ = """\
A round begins with a complete cluster and ends when all APIs acknowledge writes again. Its time is the longest interval
without a new acknowledgement, of the API that waited longest.
[docs/guides/failover.md](../../docs/guides/failover.md) explains what determines it. A finding is a
violation that the checker of recorded histories reports: a lost acknowledged write, a record stored twice, a position
assigned twice, a reader that skipped a record."""


def write_report(
    rounds: Sequence[Round],
    findings: Sequence[str],
    settings: ClusterSettings,
    limits: Mapping[str, int],
    directory: Path,
) -> None:
    """Write the page from the rounds and the recorded history."""
    REPORT.write_text(page("fail-over", COMMAND, build_report(rounds, findings, settings, limits, directory)))


def build_report(
    rounds: Sequence[Round],
    findings: Sequence[str],
    settings: ClusterSettings,
    limits: Mapping[str, int],
    directory: Path,
) -> Report:
    """Return the page: the rounds, the times without acknowledgements, and the settings."""
    return Report(
        [_by_kind(rounds), _totals(rounds, findings, directory), _settings(settings, limits)], HOW_TO_READ, True
    )


def _by_kind(rounds: Sequence[Round]) -> Table:
    rows = []
    for kind in KINDS:
        times = sorted(one.longest_s for one in rounds if one.kind == kind.__name__)
        if times:
            assert kind.__doc__ is not None
            taken_over = "yes" if MOVES[kind.__name__] else "no"
            row = (kind.__name__, kind.__doc__, str(len(times)), taken_over, *_format_times(times))
            rows.append(row)
    moved = sorted(one.longest_s for one in rounds if one.has_moved)
    rows.append(("all with another primary", "", str(len(moved)), "yes", *_format_times(moved)))
    columns = ("round", "failure", "rounds", "another primary", "median s", "shortest s", "longest s")
    return Table(columns, rows)


def _format_times(times: Sequence[float]) -> tuple[str, str, str]:
    return f"{median(times):.1f}", f"{times[0]:.1f}", f"{times[-1]:.1f}"


def _totals(rounds: Sequence[Round], findings: Sequence[str], directory: Path) -> Table:
    rows = []
    for api in APIS:
        calls = read_calls(directory, api)
        answered = sum(call["answer"] == COMMITTED for call in calls)
        different = len({call["id"] for call in calls})
        mine = sum(one.startswith(f"{api.name}:") for one in findings)
        rows.append((api.name, str(len(rounds)), str(different), str(answered), str(len(calls) - answered), str(mine)))
    return Table(("API", "rounds", "writes", "acknowledgements", "calls without an answer", "findings"), rows)


def _settings(settings: ClusterSettings, limits: Mapping[str, int]) -> Table:
    patroni = {
        "ttl": f"{settings.ttl_s} s",
        "loop_wait": f"{settings.loop_wait_s} s",
        "retry_timeout": f"{settings.retry_timeout_s} s",
        "primary_start_timeout": "0 s",
        "synchronous_mode, synchronous_mode_strict": "on",
        "wal_sender_timeout, wal_receiver_timeout": f"{settings.replication_timeout_s} s",
        **settings.parameters,
    }
    gateway = {f"limits.{name}": f"{value} ms" for name, value in limits.items()}
    rows = [("Patroni and PostgreSQL", name, value) for name, value in patroni.items()]
    rows += [("servers (the defaults)", name, value) for name, value in gateway.items()]
    return Table(("component", "setting", "value"), rows)
