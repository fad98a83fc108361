"""The application-validation example works as documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.rule("EV-10")
def test_validation_example_commits_rejects_and_replays(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/validated.py")]
    for _ in range(2):  # the second run also starts with a new log
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)  # noqa: S603
        assert (done.returncode, done.stderr) == (0, "")
        assert re.findall(r"-> +(.*)", done.stdout) == [
            "committed: 1",
            "rejected: total must be a whole number of cents, above 0",
            "committed: 1",
            "committed: 2",
        ]
    verified = [sys.executable, "-m", "oncelog", "verify", "validated.db"]
    assert subprocess.run(verified, capture_output=True, check=False, cwd=tmp_path).returncode == 0  # noqa: S603
