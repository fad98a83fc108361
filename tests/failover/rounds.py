"""The kinds of cluster failure, and how a round waits until writes continue."""

import base64
import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cli.processes import Command
from deadlines import WAIT_S, wait_until
from oncelog.testing.cluster import Cluster, Node
from oncelog.testing.cluster.layout import SCOPE
from scripts import read_line, write_line

FLOW = 5
"""Number of writes that each API must acknowledge before a round continues."""
GIVEN_UP = 4
"""Number of abandoned calls per API before the standbys return: one per client."""


class Flow:
    """The load process, which reports its progress."""

    def __init__(self, process: Command) -> None:
        self._process = process

    def send_line(self, line: str) -> None:
        write_line(self._process, line)

    def read_reply(self) -> str:
        return read_line(self._process)

    def read_counters(self, what: str) -> list[int]:
        """Return a counter for each API."""
        self.send_line(what)
        return [int(count) for count in json.loads(self.read_reply())]

    def wait_for_writes(self, more: int = FLOW) -> None:
        """Wait until every API has acknowledged this number of further writes."""
        self._until("acknowledged", more)

    def wait_for_abandoned_calls(self, more: int = GIVEN_UP) -> None:
        """Wait until this number of further calls has been abandoned at every API."""
        self._until("unanswered", more)

    def _until(self, what: str, more: int) -> None:
        before = self.read_counters(what)
        wait_until(
            lambda: all(now >= then + more for now, then in zip(self.read_counters(what), before, strict=True)),
            lambda: f"{what}: {before} before, {self.read_counters(what)} now",
        )


@dataclass
class Round:
    """The result of a round."""

    kind: str
    began_ns: int
    ended_ns: int = 0
    has_moved: bool = False
    """Whether another server became the primary."""
    measure_outage_s: dict[str, float] = field(default_factory=dict)
    """Longest time without a new acknowledgement, per API."""

    @property
    def longest_s(self) -> float:
        """Return the longest time of any API."""
        return max(self.measure_outage_s.values())


def expire_lock(cluster: Cluster) -> None:
    """Delete the leader lock from etcd, as if its time to live of 20 s had passed.

    20 s is the minimum that Patroni accepts. Only rounds whose time is not measured use this.
    """
    ports = [port for port, _ in cluster.layout.etcd_ports]
    wait_until(lambda: any(is_lock_deleted(port) for port in ports), lambda: "etcd has no leader lock")


def is_lock_deleted(port: int) -> bool:
    """Delete the leader lock through an etcd member. Return False if there is no lock or no etcd leader."""
    body = json.dumps({"key": base64.b64encode(f"/service/{SCOPE}/leader".encode()).decode()})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("POST", "/v3/kv/deleterange", body)
        return bool(json.loads(connection.getresponse().read()).get("deleted"))
    finally:
        connection.close()


def wait_for_another(cluster: Cluster, old: Node) -> None:
    """Wait until another server is the primary."""

    def has_moved() -> bool:
        found = cluster.state().primary
        return found is not None and found.name != old.name

    wait_until(has_moved, cluster.state)


def kill(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Kill PostgreSQL; Patroni survives and notices it."""
    cluster.kill(primary)
    wait_for_another(cluster, primary)


def power(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Kill the whole machine. The leader lock is not released and must expire."""
    cluster.kill(primary, with_patroni=True)
    wait_for_another(cluster, primary)
    flow.wait_for_writes()
    cluster.revive()


def freeze(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Stop the whole machine with SIGSTOP, and continue it after another primary has replaced it."""
    cluster.freeze(primary)
    wait_for_another(cluster, primary)
    flow.wait_for_writes()
    cluster.thaw(primary)


def freeze_expired(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Like `freeze`, but the leader lock expires immediately."""
    cluster.freeze(primary)
    expire_lock(cluster)
    wait_for_another(cluster, primary)
    flow.wait_for_writes()
    cluster.thaw(primary)


def agent(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Stop only Patroni. The old primary still accepts sessions after it has been replaced."""
    cluster.freeze(primary, server=False)
    wait_for_another(cluster, primary)
    flow.wait_for_writes()
    cluster.thaw(primary, server=False)


def cut(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Disconnect the primary from the standbys and etcd, but not from the servers."""
    cluster.cut(primary, with_etcd=True)
    wait_for_another(cluster, primary)
    flow.wait_for_writes()
    cluster.mend(primary)


def standbys(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Disconnect the primary from the standbys. It remains the primary, but cannot acknowledge writes."""
    cluster.cut(primary, with_etcd=False)
    flow.wait_for_abandoned_calls()
    cluster.mend(primary)


def etcd(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """Kill the etcd leader. The other members elect a new leader, and the primary does not change."""
    cluster.kill_etcd_leader()
    flow.wait_for_writes()
    cluster.revive()


Kind = Callable[[Cluster, Flow, Node], None]
KINDS: tuple[Kind, ...] = (kill, power, freeze, agent, cut, standbys, etcd)
FEW: tuple[Kind, ...] = (kill, freeze_expired)
MANY: tuple[Kind, ...] = (kill, freeze, cut, etcd, power, agent, standbys, etcd) * 2 + (kill, freeze, cut, etcd)

MOVES = {
    "kill": True,
    "power": True,
    "freeze": True,
    "freeze_expired": True,
    "agent": True,
    "cut": True,
    "standbys": False,
    "etcd": False,
}
"""Whether another server becomes the primary."""


def run_round(kind: Kind, cluster: Cluster, flow: Flow) -> Round:
    """Wait for a complete cluster, break it, and wait until writes continue."""
    cluster.wait_until_whole()
    flow.wait_for_writes()
    primary = cluster.primary()
    began = Round(kind.__name__, time.monotonic_ns())
    kind(cluster, flow, primary)
    flow.wait_for_writes()
    began.ended_ns = time.monotonic_ns()
    began.has_moved = cluster.primary().name != primary.name
    return began
