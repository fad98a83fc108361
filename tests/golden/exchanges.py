"""Record exchanges between clients and a server: groups of scenarios, with a separate server for each group."""

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Final

from golden import scenario_chat, scenario_deltas, scenario_events, scenario_ledger, scenario_server
from golden.commands import fixed_server, run_command
from golden.fixed_sources import NOW_MS
from golden.ledger_stub import ledger_stub
from golden.steps import Step
from golden.transcripts import Transcript

Prepare = Callable[[Path], Mapping[str, str]]
"""Writes the files that a server needs, and returns the values that its scenarios use as `{{name}}`."""

DEVELOPMENT: Final = ("--development", "--quiet")
SMALL_FRAMES: Final = "--set=limits.frame_bytes_max=70000"
TENANTS: Final = "acme records_max=1,ledger/acme records_max=1,chat/full records_max=3,deltas/shop records_max=1"
SECRET: Final = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Group:
    """Scenarios, by file name, that run one after another on one server."""

    scenarios: Mapping[str, Sequence[Step]]
    arguments: Sequence[str] = DEVELOPMENT
    prepare: Prepare = field(default=lambda _: {})
    describes_rpc: bool = False


def record_group(group: Group, directory: Path) -> dict[str, str]:
    """Start the server of a group, and record its scenarios."""
    values = group.prepare(directory)
    arguments = [argument.replace("{directory}", str(directory)) for argument in group.arguments]
    found = {}
    with ExitStack() as stack:
        server = stack.enter_context(fixed_server(str(directory / "log.db"), *arguments, grpc=True))
        stub = stack.enter_context(ledger_stub(server.rpc_address))
        for name, steps in group.scenarios.items():
            transcript = Transcript(server, stub)
            for value_name, value in values.items():
                transcript.save(value_name, value)
            found[f"exchange-{name}.txt"] = transcript.record(steps)
        if group.describes_rpc:
            found["grpc-service.txt"] = stub.describe()
    return found


def _make_credentials(directory: Path) -> dict[str, str]:
    """Write a secret, and return tokens signed with it and an API key."""
    secret = directory / "secret.txt"
    secret.write_text(SECRET, encoding="ascii")
    secret.chmod(0o600)
    token = ("token", "--key", "secret.txt", "--alg", "HS256", "--sub", "ada", "--write", "orders")
    key = ("apikey", "create", "keys.json", "--client-id", "till", "--name", "Till", "--write", "orders")
    return {
        "ada": run_command(*token, "--read", "orders", cwd=directory).stdout.strip(),
        "expired": _sign({"sub": "ada", "exp": NOW_MS // 1000 - 3600}, SECRET),
        "forged": _sign({"sub": "ada", "exp": NOW_MS // 1000 + 3600}, SECRET[::-1]),
        "key": run_command(*key, cwd=directory).stdout.strip(),
    }


def _sign(claims: dict[str, object], secret: str) -> str:
    """Return an HS256 token."""
    parts = [dumps(part, separators=(",", ":")).encode() for part in ({"alg": "HS256", "typ": "JWT"}, claims)]
    signed = b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = hmac.digest(secret.encode(), signed, "sha256")
    return (signed + b"." + urlsafe_b64encode(signature).rstrip(b"=")).decode()


def _write_schemas(directory: Path) -> dict[str, str]:
    (directory / "schemas.json").write_text(dumps(scenario_deltas.SCHEMAS), encoding="utf-8")
    return {}


def _write_event(directory: Path) -> dict[str, str]:
    """Commit an event, so that the read-only server can answer a retry of it."""
    with fixed_server(str(directory / "log.db"), *DEVELOPMENT) as server:
        Transcript(server).record([scenario_server.FIRST_EVENT])
        server.stop()
    return {}


GROUPS: Final = {
    "events": Group(
        {
            "events-native": scenario_events.NATIVE,
            "events-first-frames": scenario_events.NATIVE_FIRST_FRAMES,
            "events-insieme": scenario_events.INSIEME,
            "events-http": scenario_events.HTTP,
        },
        (*DEVELOPMENT, SMALL_FRAMES, "--set=limits.request_events_max=3"),
    ),
    "ledger": Group(
        {"ledger-http": scenario_ledger.HTTP, "ledger-grpc": scenario_ledger.GRPC},
        (*DEVELOPMENT, SMALL_FRAMES),
        describes_rpc=True,
    ),
    "chat-and-deltas": Group(
        {
            "chat-http": scenario_chat.HTTP,
            "chat-socket": scenario_chat.SOCKET,
            "deltas": scenario_deltas.DELTAS,
            "audit": scenario_server.AUDIT,
            "service": scenario_server.SERVICE,
        },
        (*DEVELOPMENT, SMALL_FRAMES),
    ),
    "identity": Group(
        {"identity": scenario_server.IDENTITY},
        (
            "--quiet",
            "--set=tokens.algorithms=HS256",
            "--set=tokens.key_files=secret:{directory}/secret.txt",
            "--set=api_keys.file={directory}/keys.json",
            "--set=origins=https://app.example.org",
        ),
        _make_credentials,
    ),
    "limits": Group(
        {"limits": scenario_server.LIMITS},
        (
            *DEVELOPMENT,
            "--set=limits.new_events_per_second_max=2",
            "--set=limits.frames_per_second_max=5",
            "--set=limits.user_messages_per_second_max=1",
            f"--set=tenants={TENANTS}",
        ),
    ),
    "read-only": Group(
        {"read-only": scenario_server.READ_ONLY, "stopping": scenario_server.STOPPING},
        (*DEVELOPMENT, "--read-only"),
        _write_event,
    ),
    "heartbeats": Group(
        {"delta-schemas": scenario_deltas.DELTA_SCHEMAS, "heartbeats": scenario_server.HEARTBEATS},
        (*DEVELOPMENT, "--set=limits.heartbeat_ms=2000", "--set=deltas_schemas={directory}/schemas.json"),
        _write_schemas,
    ),
    "slow-reader": Group(
        {"slow-reader": scenario_server.SLOW_READER}, (*DEVELOPMENT, "--set=limits.outbox_bytes_max=200000")
    ),
}
