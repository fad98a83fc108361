"""Ports and configurations of PostgreSQL, Patroni and etcd."""

import json
import socket
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.testing.programs import reserve_port

HOST: Final = "127.0.0.1"
MEMBERS: Final = 3
SCOPE: Final = "oncelog"
FILE: Final = "cluster.json"
FIRST_PORT_MAX: Final = 65_535 - MEMBERS + 1
"""Highest possible first port, because the other servers need the ports that follow."""


class PortError(ValueError):
    """A port is unavailable to servers. The message contains the port and the reason."""


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """Failover settings. The defaults are the shortest times that Patroni accepts."""

    ttl_s: int = 20
    """A primary that shows no sign of life for this long is replaced."""
    loop_wait_s: int = 1
    """Interval at which each Patroni checks the cluster."""
    retry_timeout_s: int = 3
    """Time after which Patroni gives up on etcd or its server. `loop_wait_s` plus twice this time must fit in
    `ttl_s`."""
    replication_timeout_s: int = 5
    """Time after which a silent synchronous standby is replaced by another standby."""
    parameters: dict[str, str] = {}
    """Additional PostgreSQL settings."""


class Node(Struct, frozen=True, kw_only=True):
    """A simulated machine with PostgreSQL and its Patroni."""

    name: str
    data: str
    port: int
    """PostgreSQL port."""
    rest_port: int
    """Patroni port."""
    wire_ports: tuple[int, int] = (0, 0)
    """PostgreSQL and Patroni ports as the other nodes use them: the same ports, or links that can be cut."""
    etcd_ports: tuple[int, ...] = ()
    """etcd ports that Patroni uses: shared ports, or links that can be cut."""

    @property
    def configuration(self) -> Path:
        """Return the path of Patroni's configuration file."""
        return Path(self.data).parent / "patroni.yml"


class Layout(Struct, frozen=True, kw_only=True):
    """Layout of a cluster. It is saved in the cluster's directory for later commands."""

    directory: str
    pid: int
    """Process that supervises the cluster."""
    born_at: int | None = None
    """Start time of that process, because its pid may be reused."""
    nodes: tuple[Node, ...]
    etcd_ports: tuple[tuple[int, int], ...]
    """Two ports for each etcd member: one for clients and one for the other members."""

    @property
    def address(self) -> str:
        """Address for clients: all servers, from which the client picks the writable one."""
        hosts = ",".join(f"{HOST}:{node.port}" for node in self.nodes)
        return f"postgresql://postgres@{hosts}/postgres"

    def save(self) -> None:
        """Save the layout for `load`."""
        Path(self.directory, FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, directory: Path) -> "Layout":
        """Load the layout from a directory. Raises FileNotFoundError if the directory has no cluster."""
        return msgspec.json.decode((directory / FILE).read_bytes(), type=cls)


class Ports:
    """Ports reserved for servers, so that no other process gets them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, port: int = 0) -> int:
        """Reserve a port, or any free one. Raises PortError if it is unavailable."""
        try:
            reserved = reserve_port(port)
        except OSError as error:
            raise PortError(f"port {port} is unavailable: {error.strerror}") from error
        self._sockets.append(reserved)
        return int(reserved.getsockname()[1])

    def close(self) -> None:
        """Release the ports. Each becomes free once its server has exited."""
        for reserved in self._sockets:
            reserved.close()


def build_etcd_arguments(layout: Layout, index: int) -> list[str]:
    """Return the command-line arguments for an etcd member."""
    client, peer = (f"http://{HOST}:{port}" for port in layout.etcd_ports[index])
    members = ",".join(f"etcd{number}=http://{HOST}:{ports[1]}" for number, ports in enumerate(layout.etcd_ports))
    return [
        f"--name=etcd{index}",
        f"--data-dir={layout.directory}/etcd{index}/data",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={members}",
        "--initial-cluster-token=oncelog",
        "--heartbeat-interval=100",
        "--election-timeout=1000",
        "--log-level=warn",
    ]


def build_patroni_arguments(node: Node) -> list[str]:
    """Return the Python arguments that run Patroni."""
    return ["-m", "patroni", str(node.configuration)]


def build_patroni_configuration(node: Node, settings: ClusterSettings, programs: Path) -> str:
    """Return Patroni's configuration as JSON, which is valid YAML."""
    directory = Path(node.data).parent
    timeout = f"{settings.replication_timeout_s}s"
    parameters = {
        "max_connections": "100",
        "shared_buffers": "32MB",
        "wal_sender_timeout": timeout,
        "wal_receiver_timeout": timeout,
        "wal_keep_size": "256MB",
        "min_wal_size": "8MB",
        "synchronous_commit": "on",
        **settings.parameters,
    }
    common: dict[str, Any] = {
        "ttl": settings.ttl_s,
        "loop_wait": settings.loop_wait_s,
        "retry_timeout": settings.retry_timeout_s,
        # Patroni does not wait for a dead primary: a standby that has all commits takes over.
        "primary_start_timeout": 0,
        "synchronous_mode": True,
        "synchronous_mode_strict": True,
        "postgresql": {"use_pg_rewind": True, "use_slots": True, "parameters": parameters},
    }
    anybody = [f"host all all {HOST}/32 trust", f"host replication all {HOST}/32 trust", "local all all trust"]
    configuration = {
        "scope": SCOPE,
        "name": node.name,
        "restapi": {"listen": f"{HOST}:{node.rest_port}", "connect_address": f"{HOST}:{node.wire_ports[1]}"},
        # With `use_proxies`, Patroni uses only these ports, which may be links that can be cut.
        "etcd3": {"hosts": [f"{HOST}:{port}" for port in node.etcd_ports], "use_proxies": True},
        "bootstrap": {
            "dcs": common,
            # Small write-ahead log segments are faster to write and copy.
            "initdb": [{"auth": "trust"}, {"encoding": "UTF8"}, {"locale": "C"}, {"wal-segsize": "1"}, "no-sync"],
        },
        "postgresql": {
            "listen": f"{HOST}:{node.port}",
            "connect_address": f"{HOST}:{node.wire_ports[0]}",
            "data_dir": node.data,
            "bin_dir": str(programs),
            "pgpass": str(directory / "pgpass"),
            "authentication": {name: {"username": "postgres"} for name in ("superuser", "replication", "rewind")},
            "parameters": {"unix_socket_directories": ""},
            "pg_hba": anybody,
            "create_replica_methods": ["basebackup"],
            "basebackup": [{"checkpoint": "fast"}, "no-sync"],
            # Recreate a diverged server that cannot be rewound. The primary has its data.
            "remove_data_directory_on_rewind_failure": True,
            "remove_data_directory_on_diverged_timelines": True,
        },
        "watchdog": {"mode": "off"},
    }
    return json.dumps(configuration, indent=1)
