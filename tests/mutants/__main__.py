"""Introduce the faults of mutants.toml one at a time, and report which ones the tests detect.

    python -m mutants                       all mutants, all stages
    python -m mutants --only 3 17           some of them, by number
    python -m mutants --tree DIR            the source and tests of another checkout, with its own .venv

A mutant is killed when a test fails or a run exceeds its time limit. Each mutant runs in stages: first the tests
closest to the code, then all others. A control run without a mutant comes first, because a tree with failing tests
would appear to kill every mutant.
"""

import argparse
import ast
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

MUTANTS: Final = Path(__file__).with_name("mutants.toml")
IGNORED: Final = shutil.ignore_patterns(".git", ".venv*", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__")
TEST_S: Final = 240
"""Time limit for a mutant that makes a test hang. On an idle machine, every test takes much less time."""
RUN_S: Final = 1800
"""Time limit for a hang that pytest-timeout cannot interrupt."""
STOP_S: Final = 60
"""Time for an interrupted run to stop the servers started by its tests."""
NOT_POSTGRES: Final = ("-k", "not postgres and not Postgres")

Stage = tuple[str, ...]
CORE: Final[list[Stage]] = [
    ("tests/core",),
    ("tests/engine", "tests/stores", "tests/idempotency", *NOT_POSTGRES),
]
ENGINE: Final[list[Stage]] = [
    ("tests/engine", *NOT_POSTGRES),
    ("tests/engine", "tests/stores", "tests/idempotency", "tests/core"),
]
SQLITE: Final[list[Stage]] = [
    ("tests/stores", "tests/engine", *NOT_POSTGRES),
    ("tests/crash", "tests/idempotency", *NOT_POSTGRES),
]
POSTGRES: Final[list[Stage]] = [
    ("tests/stores", "tests/engine", "-k", "postgres or Postgres"),
    ("tests/gateways", "tests/idempotency", "tests/cli/test_verify_database.py", "tests/cli/test_move.py"),
]
REST: Final[Stage] = ("tests/doors", "tests/client", "tests/cli", "tests/crash", "tests/gateways")
STAGES: Final = {"core": CORE, "engine": ENGINE, "sqlite": SQLITE, "postgres": POSTGRES}


class Mutant(NamedTuple):
    """A line of source and its replacement, both without indentation and without a trailing comment."""

    file: str
    function: str
    before: str
    after: str

    @property
    def stages(self) -> list[Stage]:
        part = next(name for name in ("sqlite", "postgres", "engine", "core") if f"/{name}/" in self.file)
        return [*STAGES[part], REST]

    def apply_to(self, text: str) -> str:
        """Return the source with the first matching line in the function replaced."""
        first, last = _lines_of(ast.parse(text), self.function.split("."))
        lines, comments = text.split("\n"), _comment_columns(text)
        for number in range(first, last + 1):
            code = lines[number - 1][: comments.get(number)].rstrip()
            if code.lstrip() == self.before:
                lines[number - 1] = code.removesuffix(self.before) + self.after
                return "\n".join(lines)
        raise LookupError(f"{self.file}: {self.function} has no line {self.before!r}")


def load_mutants() -> list[Mutant]:
    return [Mutant(**table) for table in tomllib.loads(MUTANTS.read_text())["mutant"]]


def _lines_of(node: ast.AST, path: Sequence[str]) -> tuple[int, int]:
    for name in path:
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name
        )
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return node.lineno, node.end_lineno or node.lineno


def _comment_columns(text: str) -> dict[int, int]:
    """Return the start column of the comment in each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return dict(token.start for token in tokens if token.type == tokenize.COMMENT)


def failing_test(tree: Path, python: Path, stage: Stage, workers: int) -> str | None:
    """Run a stage until its first failure and return the name of the test that failed."""
    command = [str(python), "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:randomly", f"-n{workers}", *stage]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTEST_TIMEOUT": str(TEST_S)}
    with subprocess.Popen(  # noqa: S603
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return f"no end within {RUN_S} s"
        finally:
            _stop(process)
    if process.returncode == 0:
        return None
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit status {process.returncode}"


def _stop(process: "subprocess.Popen[str]") -> None:
    """Stop a hanging run, its workers and the processes of its tests.

    It sends an interrupt first, so that the workers stop PostgreSQL, which runs in a separate session.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(tree: Path, only: Sequence[int], stages: int, workers: int) -> int:
    """Print a line for each mutant and return the number of survivors."""
    python = tree / ".venv/bin/python"
    survivors, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oncelog-mutants-") as directory:
        Path(directory).chmod(0o755)  # some tests drop root privileges and import modules afterwards
        copy = Path(directory) / "tree"
        shutil.copytree(tree, copy, ignore=IGNORED, symlinks=True)
        if (tree / ".node").exists() and not (copy / ".node").exists():
            (copy / ".node").symlink_to(tree / ".node")
        chosen = [(number, mutant) for number, mutant in enumerate(load_mutants(), 1) if not only or number in only]
        for stage in dict.fromkeys(stage for _, mutant in chosen for stage in mutant.stages[:stages]):
            failed = failing_test(copy, python, stage, workers)
            if failed is not None:
                _print(f"the control run of {' '.join(stage)} fails: {failed}")
                return len(chosen)
        for number, mutant in chosen:
            source = copy / mutant.file
            text = source.read_text()
            source.write_text(mutant.apply_to(text))
            killer = None
            for stage in mutant.stages[:stages]:
                killer = failing_test(copy, python, stage, workers)
                if killer is not None:
                    break
            source.write_text(text)
            if killer is None:
                survivors.append(number)
            outcome = "SURVIVED" if killer is None else f"killed by {killer}"
            _print(f"{number:3d} {mutant.file} {mutant.function}: {outcome}")
        minutes = (time.monotonic() - began) / 60
        killed = len(chosen) - len(survivors)
        _print(f"{killed} of {len(chosen)} killed in {minutes:.0f} minutes; survivors: {survivors}")
    return len(survivors)


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", default=(), metavar="N", help="numbers of mutants; default: all")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="a checkout with a .venv; default: this one")
    parser.add_argument("--stages", type=int, default=3, help="run only the first N stages of each mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that run tests")
    options = parser.parse_args()
    sys.exit(1 if run(options.tree.resolve(), options.only, options.stages, options.workers) else 0)


if __name__ == "__main__":
    main()
