"""The pip of a new environment can install every pinned file in requirements/ with hashes."""

import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "requirements").glob("*.txt"))
SUBSETS = {"image"}
"""Files whose pins are all in runtime.txt with the same hashes (checked by tests/test_deployment.py)."""


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as `make` creates it, with the pip that comes with Python, which may be years old."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=True)
    return directory


@pytest.mark.parametrize("file", [file for file in FILES if file.stem not in SUBSETS], ids=lambda file: file.stem)
def test_pinned_requirements_install_with_hashes(file: Path, new_environment: Path) -> None:
    pip = str(new_environment / "bin/pip")
    options = ["--dry-run", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    command = [pip, "install", *options, "-r", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr


def test_every_requirements_file_is_pinned() -> None:
    assert [file.stem for file in FILES] == sorted(file.stem for file in (ROOT / "requirements").glob("*.in"))
