"""State of a cluster, as its Patroni and etcd processes report it."""

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from oncelog.testing.cluster.layout import HOST, Layout

REQUEST_TIMEOUT_S: Final = 2
STREAMING: Final = "streaming"
_FAULTS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)


class Member(Struct, frozen=True, kw_only=True):
    """State of a server, as Patroni reports it."""

    name: str
    role: str
    """leader, sync_standby or replica."""
    state: str
    timeline: int = 0
    lag_bytes: int | None = None
    port: int = 0
    """Port for clients."""


class ClusterState(Struct, frozen=True, kw_only=True):
    """State of a cluster."""

    members: tuple[Member, ...]
    etcd_leader: int | None
    """Index of the etcd leader, or None if no member reports one."""

    @property
    def primary(self) -> Member | None:
        """Return the running server that accepts writes, or None."""
        return next((member for member in self.members if member.role == "leader" and member.state == "running"), None)

    @property
    def is_whole(self) -> bool:
        """Return whether there is a primary, all standbys follow it, and one of them is synchronous."""
        primary = self.primary
        others = [member for member in self.members if member is not primary]
        return (
            primary is not None
            and all(member.state == STREAMING and member.timeline == primary.timeline for member in others)
            and any(member.role == "sync_standby" for member in others)
        )


def fetch_state(layout: Layout) -> ClusterState:
    """Return the state from the first Patroni that answers. Servers that it does not list are unreachable."""
    ports = {node.name: node.port for node in layout.nodes}
    entries = next(_iterate_answers(layout), [])
    found = {member.name: member for member in (_parse_member(entry, ports) for entry in entries)}
    absent = (Member(name=name, role="", state="away", port=port) for name, port in ports.items() if name not in found)
    members = sorted([*found.values(), *absent], key=lambda member: member.name)
    return ClusterState(members=tuple(members), etcd_leader=_find_etcd_leader(layout))


def _iterate_answers(layout: Layout) -> Iterator[list[dict[str, Any]]]:
    for node in layout.nodes:
        with suppress(*_FAULTS):
            yield _request_json("GET", node.rest_port, "/cluster")["members"]


def _parse_member(entry: dict[str, Any], ports: dict[str, int]) -> Member:
    lag = entry.get("lag")
    return Member(
        name=entry["name"],
        role=entry["role"],
        state=entry["state"],
        timeline=entry.get("timeline", 0),
        lag_bytes=lag if isinstance(lag, int) else None,
        port=ports.get(entry["name"], 0),
    )


def is_etcd_ready(layout: Layout) -> bool:
    """Return whether all etcd members have agreed on their cluster. Until then, Patroni fails."""
    with suppress(*_FAULTS):
        versions = [_request_json("GET", port, "/version")["etcdcluster"] for port, _ in layout.etcd_ports]
        return "not_decided" not in versions
    return False


def _find_etcd_leader(layout: Layout) -> int | None:
    for index, (port, _) in enumerate(layout.etcd_ports):
        with suppress(*_FAULTS):
            status = _request_json("POST", port, "/v3/maintenance/status", "{}")
            if status.get("leader") == status["header"]["member_id"]:
                return index
    return None


def _request_json(method: str, port: int, path: str, body: str | None = None) -> Any:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, body)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
