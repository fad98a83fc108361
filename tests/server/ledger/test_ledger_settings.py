"""Time to live and eviction interval of a ledger are server settings that the log stores."""

import json
import logging
from pathlib import Path

import pytest

from cli.runner import COMMAND, RUNNER
from databases import BOTH_STORES, log_at, run_in_thread
from oncelog.core.operations import SetEntity
from oncelog.core.policy import LEDGER, build_ledger_policy
from oncelog.core.transactions import transaction
from oncelog.core.values import Settings
from oncelog.engine.log import open_log
from oncelog.errors import PolicyError, SettingsError
from oncelog.server.settings import LedgerSettings, load
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.assertions import assert_committed
from server.ledger.ledger_servers import LedgerServer, key, run_server
from server.ledger.ledger_transports import GRPC, code, expect_success, put
from server.ledger.write_answers import outcome, receipt_of, retry_write, write_transactions

pytestmark = BOTH_STORES

TTL_MS = 5000
INTERVAL = 4
SHORT = LedgerSettings(ttl_ms=TTL_MS, eviction_interval=INTERVAL)


async def lines_of(server: LedgerServer) -> set[str]:
    return set((await server.served.get("/metrics")).body.decode().splitlines())


async def fill(server: LedgerServer, count: int) -> None:
    """Write as other clients in the same organization, and therefore in the same lane."""
    for number in range(count):
        others = server.ledger(client_id=f"client-{number}")
        expect_success(await others.write(await others.last_sequence() + 1, put("z")))


@pytest.mark.rule("LG-21", "LG-15")
async def test_new_log_gets_the_settings_of_its_server(tmp_path: Path, wire: str) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, wire, clock=clock, ledger=SHORT) as server:
        ledger = server.ledger(client_id="app")
        (first,) = await write_transactions(ledger, 1)
        clock.advance(TTL_MS + 1)
        await fill(server, INTERVAL - 2)
        assert await ledger.last_sequence() == 1
        await fill(server, 1)
        assert await ledger.last_sequence() == 0
        # The late retry as sequence 1 is a new write.
        assert expect_success(await retry_write(ledger, 1))["committed_tx_id"] != first["committed_tx_id"]
        assert server.log.settings == Settings(eviction_interval=INTERVAL)
    # A server without these settings uses those of the log.
    async with run_server(tmp_path, wire, clock=clock) as server:
        ledger = server.ledger(client_id="app")
        (second,) = await write_transactions(server.ledger(client_id="other"), 1)
        clock.advance(TTL_MS)
        assert await ledger.last_sequence() == 1
        assert outcome(await retry_write(server.ledger(client_id="other"), 1)) == receipt_of(second)
        clock.advance(1)
        await fill(server, INTERVAL)
        assert await ledger.last_sequence() == 0


@pytest.mark.rule("LG-21")
async def test_settings_that_contradict_the_log_are_refused_with_both_values(tmp_path: Path) -> None:
    async with run_server(tmp_path, GRPC, ledger=SHORT):
        pass
    for settings, values in (
        (LedgerSettings(ttl_ms=6000), ("5000 ms", "6000 ms")),
        (LedgerSettings(ttl_ms=LEDGER.retention.ttl_ms), ("5000 ms", "86400000 ms")),
        (LedgerSettings(eviction_interval=5), ("eviction_interval=4", "eviction_interval=5")),
    ):
        with pytest.raises(SettingsError) as caught:
            async with run_server(tmp_path, GRPC, ledger=settings):
                pass
        for value in values:
            assert value in str(caught.value)
    async with run_server(tmp_path, GRPC, ledger=SHORT) as server:
        assert code(await server.ledger(client_id="app").write(1, put("a"), key=key(1))) == "OK"


@pytest.mark.rule("LG-21")
async def test_existing_log_with_the_defaults_refuses_other_settings(tmp_path: Path) -> None:
    place_of_log = log_at(tmp_path / "events.db")
    async with open_log(place_of_log):
        pass
    with pytest.raises(SettingsError, match=r"86400000 ms.* 5000 ms"):
        async with run_server(tmp_path, GRPC, ledger=LedgerSettings(ttl_ms=TTL_MS)):
            pass
    async with run_server(tmp_path, GRPC, ledger=LedgerSettings(ttl_ms=86_400_000, eviction_interval=1000)) as server:
        assert server.log.policies["ledger"] == LEDGER


@pytest.mark.rule("LG-21")
async def test_library_opens_a_log_with_a_different_time_to_live(tmp_path: Path) -> None:
    place_of_log, policy = log_at(tmp_path / "events.db"), build_ledger_policy(TTL_MS)
    async with open_log(place_of_log, policies=[policy]):
        pass
    async with open_log(place_of_log) as log:
        assert log.policies["ledger"] == policy
        operations = [SetEntity("a", b"1")]
        assert_committed(
            await log.submit(transaction("ledger/acme", "c", 1, operations, policy=log.policies["ledger"]))
        )
        entry = await log.state.client("ledger/acme", "c")
        assert entry is not None
        assert entry.sequence == 1
        with pytest.raises(PolicyError, match="a different policy named 'ledger'"):
            await log.submit(transaction("ledger/acme", "c", 2, operations))


@pytest.mark.rule("LG-21")
def test_stats_shows_time_to_live_and_interval(tmp_path: Path) -> None:
    async def make() -> None:
        async with run_server(tmp_path, GRPC, ledger=SHORT):
            pass

    run_in_thread(make())
    place_of_log = log_at(tmp_path / "events.db")
    said = json.loads(RUNNER.invoke(COMMAND, ["stats", place_of_log, "--json"]).stdout)
    assert said["settings"] == {"lanes": 16, "eviction_interval": INTERVAL, "ledger_ttl_ms": TTL_MS}
    lines = RUNNER.invoke(COMMAND, ["stats", place_of_log]).stdout
    assert "evictions every 4 positions" in lines
    assert "forgotten after 5000 ms" in lines


@pytest.mark.rule("LG-21", "CO-43")
async def test_evictions_appear_in_metrics_and_in_the_server_log(
    tmp_path: Path, wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="oncelog.engine")
    clock = ManualClock()
    async with run_server(tmp_path, wire, clock=clock, ledger=SHORT) as server:
        await write_transactions(server.ledger(client_id="app"), 1)
        assert {"oncelog_evictions_total 0.0", "oncelog_evicted_clients_total 0.0"} <= await lines_of(server)
        clock.advance(TTL_MS + 1)
        ledger = server.ledger(client_id="busy")
        await write_transactions(ledger, 40)
        lines = await lines_of(server)
        assert "oncelog_evictions_total 10.0" in lines
        assert "oncelog_evicted_clients_total 1.0" in lines
        assert (await server.served.server.log.audit()).entries == []
    assert any("1 evictions" in record.getMessage() for record in caplog.records)


@pytest.mark.rule("LG-21")
async def test_positions_of_all_lanes_appear_in_metrics(tmp_path: Path, wire: str) -> None:
    async with run_server(tmp_path, wire) as server:
        await write_transactions(server.ledger(client_id="app"), 3)
        lane = server.log.state.lane("ledger/acme")
        lines = await lines_of(server)
        assert f'oncelog_last_committed_position{{lane="{lane}"}} 3.0' in lines
        assert 'oncelog_last_committed_position{lane="0"} 0.0' in lines


@pytest.mark.rule("LG-21", "LG-15")
def test_settings_are_read_from_file_environment_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "oncelog.toml"
    file.write_text("development = true\n[ledger]\nttl_ms = 3600000\neviction_interval = 10\n")
    assert load(str(file), {}, {}).ledger == LedgerSettings(ttl_ms=3_600_000, eviction_interval=10)
    environment = {"ONCELOG_LEDGER__TTL_MS": "7200000"}
    assert load(str(file), environment, {"ledger.eviction_interval": "20"}).ledger == LedgerSettings(
        ttl_ms=7_200_000, eviction_interval=20
    )
    for name in ("ttl_ms", "eviction_interval"):
        for value in ("0", "-1"):
            with pytest.raises(SettingsError, match=rf"ledger\.{name} must be a whole number from 1"):
                load(str(file), {}, {f"ledger.{name}": value})
