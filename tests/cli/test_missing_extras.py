"""Each command in an installation without extras either works or names the package to install."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.processes import ENVIRONMENT
from cli.test_command_surface import COMMANDS
from oncelog.extras import PACKAGES

EVENT = '{"type":"order.placed"}'
URL = ("--url", "http://127.0.0.1:9")
DELTAS = ("shop", *URL, "--client-id", "till-1")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "init": ("configuration", "--tokens"),
    "serve": ("--development",),
    "doctor": ("app.db",),
    "submit": (EVENT, "--partition", "orders", *URL),
    "tail": ("--partition", "orders", *URL),
    "load": URL,
    "verify": ("app.db",),
    "audit": URL,
    "head": ("app.db",),
    "proof": ("app.db", "x"),
    "backup": ("app.db", "copy.db"),
    "restore": ("copy.db", "new.db"),
    "move": ("app.db", "postgresql://ann@127.0.0.1:9/orders"),
    "show": (*URL, "x"),
    "stats": URL,
    "clock": ("app.db",),
    "epoch": ("app.db",),
    "token": ("--key", "private.pem", "--alg", "EdDSA", "--sub", "ada"),
    "profiles": (),
    "completion": ("bash",),
    "deltas push": DELTAS,
    "deltas pull": ("shop", *URL),
    "deltas rows": ("shop", "products", *URL),
    "deltas snapshot": ("shop", *URL),
    "deltas import": ("shop", "products", "rows.csv", *URL, "--client-id", "till-1", "--row-id", "sku"),
    "deltas compact": ("shop", *URL),
    "apikey create": ("keys.json", "--client-id", "till-1", "--name", "till"),
    "apikey list": ("keys.json",),
    "apikey revoke": ("keys.json", "x"),
    "key jcs": (),
    "key args": (),
    "key fingerprint": (),
    "key delta": (),
    "key run": (),
}
NEED_EXTRA = {"init", "serve", "submit", "tail", "load", "move", "show", "stats", "audit", "token", "deltas push"}
PROGRAM = f"""
import json, sys
for name in {[*PACKAGES]!r}:
    sys.modules[name] = None
from cli.runner import COMMAND, RUNNER
answers = {{}}
for name, arguments in json.loads(sys.argv[1]).items():
    done = RUNNER.invoke(COMMAND, [*name.split(), *arguments], input="{{}}\\n")
    answers[name] = repr(done.exception), done.stderr
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Return the exception and the standard error of each command, which share one process without extras."""
    directory: Path = tmp_path_factory.mktemp("without_extras")
    (directory / "rows.csv").write_text("sku\n1\n")
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PROGRAM, json.dumps(ARGUMENTS)],
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
        env={**ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)},
    )
    answers: dict[str, tuple[str, str]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("name", COMMANDS)
def test_command_without_extras_ends_without_a_traceback(name: str, answers: dict[str, tuple[str, str]]) -> None:
    exception, errors = answers[name]
    assert exception == "None" or exception.startswith("SystemExit")
    assert "Usage:" not in errors
    if name in NEED_EXTRA:
        assert re.fullmatch(r"oncelog: .+ needs [\w-]+: pip install 'oncelog\[\w+\]'\n", errors)
