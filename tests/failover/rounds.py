"""What is done to a cluster in a round, and how it is waited for that writes go on."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oncelog.testing.cluster import Cluster, Node

FLOW = 5
"""So much more must be acknowledged at each door before a round goes on."""
GIVEN_UP = 4
"""So many calls must have been given up at each door before standbys come back: as many as it has clients."""
RUN_S = 240
"""Nothing takes that long, on a busy machine either."""


class Flow:
    """The load, as a process that tells how far it has come."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def tell(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def heard(self) -> str:
        return str(self._process.stdout.readline().decode().strip())

    def counts(self, what: str) -> list[int]:
        """Of each door."""
        self.tell(what)
        return [int(count) for count in json.loads(self.heard())]

    def go_on(self, more: int = FLOW) -> None:
        """Returns when so much more has been acknowledged at every door."""
        self._until("acknowledged", more)

    def stand_still(self, more: int = GIVEN_UP) -> None:
        """Returns when so many more calls have been given up at every door."""
        self._until("unanswered", more)

    def _until(self, what: str, more: int) -> None:
        before = self.counts(what)
        deadline = time.monotonic() + RUN_S
        while any(now < then + more for now, then in zip(self.counts(what), before, strict=True)):
            assert time.monotonic() < deadline, f"{what}: {before} before, {self.counts(what)} now"
            time.sleep(0.05)


@dataclass
class Round:
    """One, when it is over."""

    kind: str
    began_ns: int
    ended_ns: int = 0
    has_moved: bool = False
    """Whether another server took over."""
    stood_still_s: dict[str, float] = field(default_factory=dict)
    """By door."""

    @property
    def longest_s(self) -> float:
        """Of all doors."""
        return max(self.stood_still_s.values())


def another(cluster: Cluster, old: Node) -> None:
    """Returns when another server is the primary."""
    deadline = time.monotonic() + RUN_S
    while (found := cluster.state().primary) is None or found.name == old.name:
        assert time.monotonic() < deadline, cluster.state()
        time.sleep(0.05)


def kill(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """SIGKILL of PostgreSQL; its Patroni lives and sees it."""
    cluster.kill(primary)
    another(cluster, primary)


def power(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """The whole machine: nobody gives the lock back, it has to run out."""
    cluster.kill(primary, with_patroni=True)
    another(cluster, primary)
    flow.go_on()
    cluster.revive()


def freeze(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """SIGSTOP of the whole machine; it wakes up as a primary that has been replaced."""
    cluster.freeze(primary)
    another(cluster, primary)
    flow.go_on()
    cluster.thaw(primary)


def agent(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """SIGSTOP of Patroni alone: the old primary lives, and goes on to take sessions when it has been replaced."""
    cluster.freeze(primary, server=False)
    another(cluster, primary)
    flow.go_on()
    cluster.thaw(primary, server=False)


def cut(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """No way from the primary to the standbys and to etcd; gateways still reach it."""
    cluster.cut(primary, with_etcd=True)
    another(cluster, primary)
    flow.go_on()
    cluster.mend(primary)


def standbys(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """No way from the primary to the standbys: it stays the primary, and nothing is acknowledged meanwhile."""
    cluster.cut(primary, with_etcd=False)
    flow.stand_still()
    cluster.mend(primary)


def etcd(cluster: Cluster, flow: Flow, primary: Node) -> None:
    """SIGKILL of etcd's leader: the others choose another, and the primary stays."""
    cluster.kill_etcd_leader()
    flow.go_on()
    cluster.revive()


Kind = Callable[[Cluster, Flow, Node], None]
KINDS: tuple[Kind, ...] = (kill, power, freeze, agent, cut, standbys, etcd)
FEW: tuple[Kind, ...] = (kill, freeze)
MANY: tuple[Kind, ...] = (kill, freeze, cut, etcd, power, agent, standbys, etcd) * 2 + (kill, freeze, cut, etcd)

MOVES = {"kill": True, "power": True, "freeze": True, "agent": True, "cut": True, "standbys": False, "etcd": False}
"""Whether another server takes over."""


def done(kind: Kind, cluster: Cluster, flow: Flow) -> Round:
    """A round, from a cluster that is whole to one that is whole again."""
    cluster.wait_until_whole()
    flow.go_on()
    primary = cluster.primary()
    began = Round(kind.__name__, time.monotonic_ns())
    kind(cluster, flow, primary)
    flow.go_on()
    began.ended_ns = time.monotonic_ns()
    began.has_moved = cluster.primary().name != primary.name
    return began
