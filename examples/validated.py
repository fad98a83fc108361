"""A server that asks the application before it commits: shop_rules.py says what an order must be.

Run it with `.venv/bin/python examples/validated.py` (it needs the extra `server`). It leaves validated.db behind, made
anew by every run.
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


def start() -> tuple["subprocess.Popen[str]", str]:
    """A server on any free port, and where that is."""
    command = [sys.executable, "-m", "oncelog", "serve", "--development", "--port", "0", "--store", str(FILE)]
    server = subprocess.Popen(  # noqa: S603
        [*command, "--set", "validate=shop_rules:check", "--set", "log.level=error"],
        stdout=subprocess.PIPE,
        text=True,
        # The module is beside this file. A module in the directory where the server is started needs no path.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"listens on (\S+)", line)
        if found:
            return server, found[1]
    raise SystemExit("the server did not start")


def submit(url: str, *orders: tuple[str, Any]) -> list[dict[str, Any]]:
    """Orders with their ids, in one request."""
    events = [
        {"id": id_text, "partitions": ["orders"], "event": {"type": "order.placed", "total": total}}
        for id_text, total in orders
    ]
    body = orjson.dumps({"events": events})
    with urlopen(Request(f"{url}/v1/events", body, {"Content-Type": "application/json"})) as answer:  # noqa: S310
        results: list[dict[str, Any]] = orjson.loads(answer.read())["results"]
    for (id_text, total), result in zip(orders, results, strict=True):
        told = result.get("committed_id") or result["errors"][0]["message"]
        print(f"  …{id_text[-2:]}  total {total!r:6}  ->  {result['status']}: {told}")
    return results


def main() -> None:
    """Tells the story."""
    for name in (FILE, Path(f"{FILE}-wal"), Path(f"{FILE}-shm")):
        name.unlink(missing_ok=True)
    server, url = start()
    try:
        print("a good order and a bad one in one request: each is judged alone")
        first, refused = submit(url, (ORDER, 4200), (OTHER, -1))
        print("a retry of the good one gets its answer; the rules are not asked again")
        assert submit(url, (ORDER, 4200)) == [first]
        print("a refusal leaves nothing behind: the id of the bad one is free, and it can be put right")
        (mended,) = submit(url, (OTHER, 100))
        assert (first["committed_id"], refused["status"], mended["committed_id"]) == (1, "rejected", 2)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    assert server.returncode == 0


if __name__ == "__main__":
    main()
