"""Who listens where, and what Patroni and etcd are told."""

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
"""Beyond it there are no ports for the other servers."""


class PortError(ValueError):
    """A port that servers cannot have; says which, and why."""


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """What decides how soon another server takes over. The defaults are the shortest that Patroni takes."""

    ttl_s: int = 20
    """A primary that has not been heard of for so long is replaced."""
    loop_wait_s: int = 1
    """How often each Patroni looks."""
    retry_timeout_s: int = 3
    """How long Patroni tries to reach etcd or its server before it gives up. `loop_wait_s` and twice this fit in
    `ttl_s`."""
    replication_timeout_s: int = 5
    """A standby that says nothing for so long is no longer waited for, if another can take its place."""
    parameters: dict[str, str] = {}
    """More settings of PostgreSQL."""


class Node(Struct, frozen=True, kw_only=True):
    """A machine with PostgreSQL and its Patroni, as it were."""

    name: str
    data: str
    port: int
    """Where PostgreSQL listens."""
    rest_port: int
    """Where its Patroni listens."""
    wire_ports: tuple[int, int] = (0, 0)
    """Where the other nodes find both: the same, or wires that can be cut."""
    etcd_ports: tuple[int, ...] = ()
    """Where its Patroni finds etcd: the same as others, or wires that can be cut."""

    @property
    def configuration(self) -> Path:
        """Of its Patroni."""
        return Path(self.data).parent / "patroni.yml"


class Layout(Struct, frozen=True, kw_only=True):
    """Of a whole cluster; kept in its directory, for commands that come later."""

    directory: str
    pid: int
    """Of the process that looks after it."""
    born_at: int | None = None
    """When that was started: its number may be somebody else's later."""
    nodes: tuple[Node, ...]
    etcd_ports: tuple[tuple[int, int], ...]
    """Of each member: for clients, for the other members."""

    @property
    def address(self) -> str:
        """For gateways: all servers, of which they take the one that can be written to."""
        hosts = ",".join(f"{HOST}:{node.port}" for node in self.nodes)
        return f"postgresql://postgres@{hosts}/postgres"

    def save(self) -> None:
        """For `load`."""
        Path(self.directory, FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, directory: Path) -> "Layout":
        """Raises FileNotFoundError where there is no cluster."""
        return msgspec.json.decode((directory / FILE).read_bytes(), type=cls)


class Ports:
    """Kept for servers that come later, so that nobody else is given them."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, port: int = 0) -> int:
        """Any that is free, or this one. Raises PortError if that cannot be had."""
        try:
            reserved = reserve_port(port)
        except OSError as error:
            raise PortError(f"port {port} cannot be had: {error.strerror}") from error
        self._sockets.append(reserved)
        return int(reserved.getsockname()[1])

    def close(self) -> None:
        """They are free again when their servers have ended."""
        for reserved in self._sockets:
            reserved.close()


def build_etcd_arguments(layout: Layout, index: int) -> list[str]:
    """Of one member."""
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
    """Of Python."""
    return ["-m", "patroni", str(node.configuration)]


def build_patroni_configuration(node: Node, settings: ClusterSettings, programs: Path) -> str:
    """As Patroni reads it: JSON is YAML."""
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
        # A primary that has died is not waited for: a standby that has everything takes over.
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
        # With `use_proxies` it takes no other way to etcd than these: they may be wires that are cut.
        "etcd3": {"hosts": [f"{HOST}:{port}" for port in node.etcd_ports], "use_proxies": True},
        "bootstrap": {
            "dcs": common,
            # Small files of its write-ahead log are sooner written, and copied to standbys.
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
            # One that has diverged and cannot be rewound is made anew: nobody else has what it alone has.
            "remove_data_directory_on_rewind_failure": True,
            "remove_data_directory_on_diverged_timelines": True,
        },
        "watchdog": {"mode": "off"},
    }
    return json.dumps(configuration, indent=1)
