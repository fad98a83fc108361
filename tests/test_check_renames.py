import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = """
[modules]
"oncelog.desk" = "oncelog.batch_state"
[names]
"oncelog.desk:Desk" = "BatchState"
"oncelog.desk:Desk.mark" = "savepoint"
"""
OLD = '''"""See `oncelog.desk`."""

from oncelog.limits import LIMIT


class Desk:
    def mark(self, limit: int = LIMIT) -> str:
        return f"{limit} of 3"


def made() -> "Desk":
    return Desk()
'''
NEW = OLD.replace("oncelog.desk", "oncelog.batch_state").replace("Desk", "BatchState").replace("mark", "savepoint")


class Repository:
    """Two revisions of a small source tree, and the name map between them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._source = directory / "src" / "oncelog"
        self._source.mkdir(parents=True)
        (directory / "map.toml").write_text(MAP)
        self._git("init", "--quiet")
        self._write("limits.py", "LIMIT = 3\n")
        self._write("schema.sql", "CREATE TABLE a (b);\n")
        self._write("desk.py", OLD)
        self._commit()

    def _git(self, *arguments: str) -> None:
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
        subprocess.run(command, cwd=self._directory, check=True)  # noqa: S603

    def _write(self, name: str, text: str) -> None:
        (self._source / name).write_text(text)

    def _commit(self) -> None:
        self._git("add", "--all")
        self._git("commit", "--quiet", "--no-gpg-sign", "--message=revision")

    def check(self, new: str, name: str = "batch_state.py", schema: str = "CREATE TABLE a (b);\n") -> tuple[int, str]:
        """Commit the second revision, compare it with the first, and return exit status and output."""
        (self._source / "desk.py").unlink()
        self._write(name, new)
        self._write("schema.sql", schema)
        self._commit()
        command = [sys.executable, "-m", "tools.check_renames", "HEAD~1", "HEAD", "map.toml"]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/local/bin"}
        done = subprocess.run(  # noqa: S603
            command, cwd=self._directory, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_revision_that_follows_the_map_has_no_differences(repository: Repository) -> None:
    assert repository.check(NEW) == (0, "2 files compared, 2 names changed, 0 differences\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("of 3", "of 4", "' of 3' became ' of 4'"),
        ("made", "make", "'made' became 'make'"),
        ("limit: int = LIMIT", "limit: int = 3", "'Name' became 'Constant'"),
        ("limit: int", "LIMIT: int", "'limit' became 'LIMIT'"),
        ("return BatchState()", "return savepoint()", "'Desk' became 'savepoint'"),
        ("import LIMIT", "import LIMIT as LIMIT_MAX", "the import ('oncelog.limits', 'LIMIT', 'LIMIT_MAX') is new"),
        ("`oncelog.batch_state`", "`oncelog.desk`s", "became 'See `oncelog.desk`s.'"),
    ],
)
def test_change_outside_the_map_is_reported(repository: Repository, old: str, new: str, message: str) -> None:
    assert old in NEW
    status, output = repository.check(NEW.replace(old, new))
    assert status == 1
    assert message in output


def test_changed_data_file_and_missing_module_are_reported(repository: Repository) -> None:
    status, output = repository.check(NEW, "other.py", "CREATE TABLE a (c);\n")
    assert status == 1
    assert "src/oncelog/desk.py: src/oncelog/batch_state.py does not exist" in output
    assert "src/oncelog/schema.sql: src/oncelog/schema.sql has different content" in output
    assert "src/oncelog/other.py: new file" in output
