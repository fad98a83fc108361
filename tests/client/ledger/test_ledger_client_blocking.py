"""The blocking ledger client: threads, settings, and a missing gRPC package."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from cli.server_process import serving
from client.ledger.ledgers import LIMITS, UNREACHABLE_ADDRESS, expect_written
from databases import BOTH_STORES
from oncelog.client.ledger import BlockingLedgerClient, LedgerClient, LedgerLimits, relate, set_entity
from oncelog.errors import CanonicalError, ClosedError, SettingsError, StoreInUseError


def blocking_of(address: str, path: Path | str = ":memory:", **options: Any) -> BlockingLedgerClient:
    chosen = {"organization": "acme", "client_id": "billing-1", "limits": LIMITS, **options}
    return BlockingLedgerClient(address, path=path, **chosen)


@BOTH_STORES
@pytest.mark.rule("LG-19")
def test_threads_share_one_client(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    with serving(tmp_path, grpc=True) as server:
        address = server.rpc_address
        with blocking_of(address, path) as ledger, ThreadPoolExecutor(8) as threads:
            assert ledger.recovered() == []
            outcomes = list(threads.map(lambda number: ledger.write(set_entity(str(number), b"1")), range(40)))
            assert sorted(expect_written(one).sequence for one in outcomes) == list(range(1, 41))
            with pytest.raises(StoreInUseError):
                blocking_of(address, path).__enter__()
            vault = ledger.scope("acme", "main")
            assert (vault.organization, vault.vault) == ("acme", "main")
            first = expect_written(vault.write([set_entity("a", b"1"), relate("d", "o", "ann")], key=UUID(int=1)))
            assert first.tx_id is not None
            assert first.height is not None
            assert vault.client_state().last_sequence == 1
            entity = vault.get_entity("a")
            assert entity is not None
            assert entity.value == b"1"
            assert [one.key for one in vault.list_entities()] == ["a"]
            assert [one.subject for one in vault.list_relationships(subject="ann")] == ["ann"]
            assert vault.check_relationship("d", "o", "ann")
            assert vault.get_transaction(first.tx_id) is not None
            assert vault.get_block(first.height) is not None
            proof = vault.get_proof(first.tx_id)
            assert proof is not None
            assert proof.is_valid
            for block in vault.watch_blocks():
                assert block.tx_ids == (first.tx_id,)
                break
            assert vault.pending() == []
            assert vault.last_error is None
            assert vault.resume(resend=False) == []
        with pytest.raises(ClosedError):
            ledger.write(set_entity("a", b"1"))


def test_timed_out_write_remains_pending(tmp_path: Path) -> None:
    with blocking_of(UNREACHABLE_ADDRESS, tmp_path / "client.db") as ledger:
        with pytest.raises(TimeoutError):
            ledger.write(set_entity("a", b"1"), timeout_s=0.01)
        assert len(ledger.pending()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "http://127.0.0.1:7171"}, "address must be HOST:PORT"),
        ({"address": ""}, "address must be HOST:PORT"),
        ({"address": "127.0.0.1"}, "address must be HOST:PORT.*not '127.0.0.1'"),
        ({"address": "::1:7271"}, "address must be HOST:PORT"),
        ({"address": "ann@ledger.example.org:7271"}, "address must be HOST:PORT"),
        ({"path": ""}, "must be the path"),
        ({"organization": ""}, "organization must be a string of 1 to 80"),
        ({"organization": "a" * 81}, "organization must be a string of 1 to 80"),
        ({"vault": "\0"}, "vault must be a string"),
        ({"client_id": ""}, "client_id must be a string"),
        ({"client_id": None}, "client_id must be given"),
        ({"token": "ü"}, "token must be a string of printable ASCII"),
        ({"limits": 7}, "limits must be LedgerLimits"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], words: str) -> None:
    chosen = {
        "address": UNREACHABLE_ADDRESS,
        "path": ":memory:",
        "organization": "acme",
        "client_id": "billing-1",
        **options,
    }
    with pytest.raises(SettingsError, match=words):
        LedgerClient(chosen.pop("address"), **chosen)


@pytest.mark.parametrize("address", ["127.0.0.1:7271", "ledger.example.org:443", "localhost:1", "[::1]:7271"])
def test_address_with_host_and_port_is_accepted(address: str) -> None:
    assert LedgerClient(address, path=":memory:", organization="acme", client_id="billing-1").address == address


def test_missing_root_certificates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tls: .*roots\.pem"):
        blocking_of(UNREACHABLE_ADDRESS, tls=tmp_path / "roots.pem").__enter__()


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(SettingsError, match="in_flight_max must be a whole number from 1"):
        LedgerLimits(in_flight_max=0)
    with pytest.raises(SettingsError, match="pause_ms_min must not be more"):
        LedgerLimits(pause_ms_min=2, pause_ms_max=1)


@pytest.mark.parametrize(
    "given",
    [
        {"key": 7, "value": b""},
        {"key": "a", "value": "text"},
        {"key": "a", "value": b"", "value_equals": "text"},
        {"key": "a", "value": b"", "version_is": True},
        {"key": "a", "value": b"", "must_exist": True, "must_not_exist": True},
    ],
)
def test_invalid_operations_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(CanonicalError):
        set_entity(**given)
