"""The types that a user's type checker sees are precise."""

import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "typed_program.py"


def test_types_of_the_public_functions_are_precise(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)  # noqa: S603
    assert done.returncode == 0, done.stdout
