"""The previous version as a client, as a server and as the writer of a file or a database."""

import json
from pathlib import Path
from typing import Any

from cli.served import oncelog, serving
from databases import BOTH_STORES, log_at
from previous.previous_version import DIRECTORY, PreviousVersion
from scripts import start_script
from waiting import WAIT_S


def use_current_clients(*arguments: object) -> Any:
    """Run the script with the clients of the current version."""
    with start_script(DIRECTORY / "use_clients.py", *arguments) as process:
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    return json.loads(said)


def use_previous_clients(previous: PreviousVersion, *arguments: object) -> Any:
    """Run the script with the clients of the previous version."""
    return json.loads(previous.run_script("use_clients.py", *arguments))


def assert_both_are_read(first: Any, second: Any) -> None:
    """The second run of the script continues the numbers of the first one, and reads what the first one wrote."""
    assert first["committed_id"] < second["committed_id"]
    assert (second["events"], second["messages"]) == (["first", "second"], ["by first", "by second"])
    assert (second["entities"], second["rows"]) == (["by:first", "by:second"], ["first", "second"])
    assert (first["sequence"], second["sequence"]) == (1, 2)
    assert first["message_id"] < second["message_id"]
    assert first["tx_id"] < second["tx_id"]
    assert (first["client_sequence"], second["client_sequence"]) == (1, 1)


def test_clients_of_both_versions_share_the_current_server(previous: PreviousVersion, tmp_path: Path) -> None:
    with serving(tmp_path, grpc=True) as server:
        address = (server.url, server.rpc_address, tmp_path)
        first = use_previous_clients(previous, *address, "first")
        second = use_current_clients(*address, "second")
    assert first["version"] != second["version"]
    assert_both_are_read(first, second)


@BOTH_STORES
def test_log_written_by_the_previous_server_is_verified_and_continued(
    previous: PreviousVersion, tmp_path: Path
) -> None:
    log = log_at(tmp_path / "log.db")
    with previous.serving(log) as server:
        first = use_current_clients(server.url, server.rpc_address, tmp_path, "first")
        assert server.stop() == 0
    with serving(tmp_path, grpc=True) as server:
        second = use_current_clients(server.url, server.rpc_address, tmp_path, "second")
        assert server.stop() == 0
    assert_both_are_read(first, second)
    verified = oncelog("verify", log, "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["ok"]
