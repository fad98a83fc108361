"""Concurrent `make` commands build one complete environment."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent

PYTHON = """#!/bin/bash
# Stands for Python: creates an environment whose pip notes its calls. Its first call waits for the test.
if [ "$*" != "-m venv .venv" ]; then exit 0; fi
mkdir -p .venv/bin
cat > .venv/bin/pip <<'PIP'
#!/bin/bash
echo "$@" >> calls
if mkdir has-waited 2>/dev/null; then cat barrier > /dev/null; fi
PIP
printf '#!/bin/bash\\n' > .venv/bin/python
chmod +x .venv/bin/*
"""


@contextmanager
def start_make(directory: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "PYTHON=./python", ".venv/.dev"]
    with subprocess.Popen(  # noqa: S603
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_second_make_waits_for_the_first_and_does_not_install_again(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/runtime.txt", "requirements/dev.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    os.mkfifo(tmp_path / "barrier")
    with ExitStack() as stack:
        first = stack.enter_context(start_make(tmp_path))
        assert first_line(first) == "Installing Oncelog into .venv …\n"
        second = stack.enter_context(start_make(tmp_path))
        assert first_line(second) == "Waiting for another make that installs here …\n"
        (tmp_path / "barrier").write_text("go on")
        assert (first.wait(), second.wait()) == (0, 0)
    installed = [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert installed == ["requirements/runtime.txt", ".", "requirements/dev.txt"]
    assert (tmp_path / ".venv/.dev").exists()
