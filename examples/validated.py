"""A server that validates orders with an application function (shop_rules.py) before it commits them.

Run it with `.venv/bin/python examples/validated.py` (it needs the extra `server`). Each run recreates validated.db.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import orjson

FILE = Path("validated.db")
ORDER = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10"
OTHER = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a11"


def start_server() -> tuple["subprocess.Popen[str]", str]:
    """Start a server on a free port. Return its process and its address."""
    command = [sys.executable, "-m", "oncelog", "serve", "--development", "--port", "0", "--store", str(FILE)]
    server = subprocess.Popen(  # noqa: S603
        [*command, "--set", "validate=shop_rules:check", "--set", "log.level=error"],
        stdout=subprocess.PIPE,
        text=True,
        # The module is in the same directory as this file. A module in the server's working directory needs no path.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"listens on (\S+)", line)
        if found:
            return server, found[1]
    raise SystemExit("the server did not start")


def submit(url: str, *orders: tuple[str, Any]) -> list[dict[str, Any]]:
    """Submit orders with their ids in one request, and print the results."""
    events = [
        {"id": id_text, "partitions": ["orders"], "event": {"type": "order.placed", "total": total}}
        for id_text, total in orders
    ]
    body = orjson.dumps({"events": events})
    with urlopen(Request(f"{url}/v1/events", body, {"Content-Type": "application/json"})) as answer:  # noqa: S310
        results: list[dict[str, Any]] = orjson.loads(answer.read())["results"]
    for (id_text, total), result in zip(orders, results, strict=True):
        outcome = result.get("committed_id") or result["errors"][0]["message"]
        print(f"  …{id_text[-2:]}  total {total!r:6}  ->  {result['status']}: {outcome}")
    return results


def main() -> None:
    """Submit valid and invalid orders to a server."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm")):
        name.unlink(missing_ok=True)
    server, url = start_server()
    try:
        print("a valid order and an invalid one in one request: each has its own result")
        first, refused = submit(url, (ORDER, 4200), (OTHER, -1))
        print("a retry of the valid order gets the same answer, without another validation")
        assert submit(url, (ORDER, 4200)) == [first]
        print("a refused order leaves nothing behind: its id can be used again with a valid total")
        (corrected,) = submit(url, (OTHER, 100))
        assert (first["committed_id"], refused["status"], corrected["committed_id"]) == (1, "rejected", 2)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    assert server.returncode == 0


if __name__ == "__main__":
    main()
