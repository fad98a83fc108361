"""Runs `oncelog doctor` and returns its findings."""

import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cli.runner import COMMAND, RUNNER, Result


class Findings:
    """The findings of one run."""

    def __init__(self, done: Result) -> None:
        self.status = done.exit_code
        self.text = done.stdout
        result = json.loads(done.stdout)
        self.all: list[dict[str, str]] = result["findings"]
        assert result["ok"] == (self.status == 0)
        assert self.status == int(any(one["level"] == "problem" for one in self.all))
        for one in self.all:  # a finding that needs action says which
            assert one["level"] == "ok" or len(one["message"] + one["remedy"]) > 20, one

    def get(self, level: str, check: str) -> str:
        """Return the texts of the findings with this level and check."""
        found = [
            f"{one['message']} {one['remedy']}" for one in self.all if (one["level"], one["check"]) == (level, check)
        ]
        assert found, (level, check, self.all)
        return "\n".join(found)

    @property
    def problems(self) -> list[str]:
        return [one["check"] for one in self.all if one["level"] == "problem"]


def doctor(*arguments: object, env: Mapping[str, str] | None = None) -> Findings:
    """Run the command in this process. It must be able to run."""
    done = RUNNER.invoke(COMMAND, ["doctor", *map(str, arguments), "--json"], env=env)
    assert done.exit_code in (0, 1), (done.stdout, done.stderr, done.exception)
    return Findings(done)


def refused(*arguments: object) -> str:
    """Run the command with arguments that it refuses, and return the message."""
    done = RUNNER.invoke(COMMAND, ["doctor", *map(str, arguments)])
    assert done.exit_code == 2, (done.stdout, done.stderr, done.exception)
    return done.stderr


def write_settings(directory: Path, *lines: str, keys: bool = True) -> Path:
    """Write the settings of a server with a log in this directory, which listens on any free port."""
    if keys and not (directory / "keys.json").exists():
        create_key(directory / "keys.json")
    given = "\n".join(line for line in lines if not line.startswith("["))
    tables = "\n".join(line for line in lines if line.startswith("["))
    defaults = [f'store = "{directory}/log.db"', "port = 0", "grpc = false", f"api_keys.file = '{directory}/keys.json'"]
    chosen = [line for line in defaults if f"\n{line.split()[0]} =" not in f"\n{given}"]
    path = directory / "oncelog.toml"
    path.write_text("\n".join([*chosen, given, tables]), encoding="utf-8")
    path.chmod(0o600)
    return path


def create_key(path: Path, *options: str) -> str:
    done = RUNNER.invoke(
        COMMAND, ["apikey", "create", str(path), "--client-id", "till", "--name", "Till", "--read", "*", *options]
    )
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def write_certificate(
    directory: Path, start_days: float, end_days: float, name: str = "localhost"
) -> tuple[Path, Path]:
    """Write a self-signed certificate that is valid between two times, in days from now. Returns it and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    builder: Any = x509.CertificateBuilder().subject_name(named).issuer_name(named).public_key(key.public_key())
    certificate = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=start_days))
        .not_valid_after(now + dt.timedelta(days=end_days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, private = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private
