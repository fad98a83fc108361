"""Deprecated names work for one release and warn."""

import importlib
import sys

import pytest

import oncelog
import oncelog.client
import oncelog.client.chat
import oncelog.testing.cluster


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("oncelog", "Room", "DiskLimits"),
        ("oncelog.client", "State", "ConnectionState"),
        ("oncelog.client", "Rejected", "Refused"),
        ("oncelog.client", "Rejection", "RefusedEvent"),
        ("oncelog.client.chat", "State", "ConnectionState"),
        ("oncelog.client.deltas", "State", "ConnectionState"),
        ("oncelog.client.deltas", "ChangesLostError", "UpdatesLostError"),
        ("oncelog.testing.cluster", "State", "ClusterState"),
        ("oncelog.testing.cluster", "Wire", "TcpLink"),
        ("oncelog.testing.cluster", "Wires", "TcpLinks"),
        ("oncelog.testing.cluster", "running_cluster", "run_cluster"),
    ],
)
def test_deprecated_name_is_an_alias_that_warns(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is deprecated .* use {module}\.{new}") as warnings:
        assert getattr(found, old) is getattr(found, new)
    assert warnings[0].filename == __file__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'oncelog' has no attribute 'Rooms'"):
        _ = oncelog.Rooms


def test_deprecated_module_path_has_the_public_names() -> None:
    for name in ("oncelog.doors", "oncelog.doors.identity"):
        sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=r"oncelog\.doors\.identity is deprecated") as warnings:
        old = importlib.import_module("oncelog.doors.identity")
    assert warnings[0].filename == __file__
    new = importlib.import_module("oncelog.server.auth.authenticator")
    assert old.Tokens is new.Tokens
    assert old.Authenticates is new.Authenticator
    assert old.granted is new.parse_grants


async def test_deprecated_attributes_of_a_log_warn() -> None:
    async with oncelog.open(":memory:") as log:
        for old, new in (
            ("books", "state"),
            ("works", "leases"),
            ("guard", "write_gate"),
            ("queued", "queue_length"),
            ("evicted_clients", "client_evictions"),
        ):
            with pytest.warns(DeprecationWarning, match=f"Log.{old} is deprecated"):
                assert type(getattr(log, old)) is type(getattr(log, new))
        with pytest.warns(DeprecationWarning, match="Log.settled is deprecated"):
            await log.settled()


def test_deprecated_attributes_of_a_blocking_log_warn() -> None:
    with oncelog.open_blocking(":memory:") as log:
        for old, new in (("books", "state"), ("works", "leases")):
            with pytest.warns(DeprecationWarning, match=f"BlockingLog.{old} is deprecated"):
                assert type(getattr(log, old)) is type(getattr(log, new))
