"""The examples and the programs in docs/guides/once.md print the documented output."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from scripts import RUN_TWICE

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/once.md").read_text(encoding="utf-8"), re.DOTALL)


def run_python(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.rule("RU-6", "RU-7")
def test_agent_example_reuses_tools_after_a_crash(tmp_path: Path) -> None:
    output = run_python(str(ROOT / "examples/agent.py"), cwd=tmp_path)
    assert re.findall(r"(\w+) +(reused|executed)\n", output) == [
        ("search", "reused"),
        ("book", "reused"),
        ("send_mail", "executed"),
    ]
    assert len((tmp_path / "agent-outbox.txt").read_text().splitlines()) == 3


@pytest.mark.rule("RU-11")
def test_nightly_example_bills_each_account_once(tmp_path: Path) -> None:
    assert "20 bills for 20 accounts" in run_python(str(ROOT / "examples/nightly.py"), cwd=tmp_path)


@pytest.mark.rule("RU-11")
def test_payment_example_charges_once_and_replays(tmp_path: Path) -> None:
    output = run_python(str(ROOT / "examples/payments.py"), cwd=tmp_path)
    assert "charged: [('ada', 30), ('bob', 30)]" in output
    assert output.count("replayed=true") == 10


@pytest.mark.rule("RU-12")
def test_transfer_example_survives_a_kill_at_every_statement(tmp_path: Path) -> None:
    output = run_python(str(ROOT / "examples/transfer.py"), cwd=tmp_path)
    deaths = int(re.findall(r"killed before each of its (\d+) statements", output)[0])
    assert deaths > 20  # BEGIN, the lookups, the savepoint, three rows, the record, its indexes, COMMIT
    assert run_python("-m", "oncelog", "verify", "transfer.db", cwd=tmp_path)


@pytest.mark.parametrize("number", range(len(PAGE)))
def test_programs_on_the_page_run_repeatedly(number: int, tmp_path: Path) -> None:
    output = run_python("-c", RUN_TWICE, PAGE[number], cwd=tmp_path)
    conflict = (
        "the key 'order-1' of 'once/charge' was already used with different arguments or for different work; "
        "nothing was done; use a new key for new work\ncharged in this run: "
    )
    assert output == (f"{conflict}['order-1', 'order-2']\n{conflict}[]\n" if number == 0 else "")


SCRIPT: Final = """
import oncelog

class Declined(Exception):
    pass

log = oncelog.open_blocking("app.db")

@oncelog.once(log)
def work() -> int:
    print("ran", flush=True)
    return 1

@oncelog.once(log, remember=[Declined])
def decline() -> int:
    print("declined", flush=True)
    raise Declined

def main() -> None:
    with log:
        work()
        try:
            decline()
        except Declined:
            pass

if __name__ == "__main__":
    main()
"""


def test_function_has_the_same_name_in_script_module_import_and_spawned_process(tmp_path: Path) -> None:
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "job.py").write_text(SCRIPT)
    assert run_python("job.py", cwd=tmp_path) == "ran\ndeclined\n"
    assert run_python("-m", "job", cwd=tmp_path) == ""
    assert run_python("-c", "import job; job.main()", cwd=tmp_path) == ""
    spawning = "import job, multiprocessing as m\nif __name__ == '__main__':\n"
    spawning += "    worker = m.get_context('spawn').Process(target=job.main); worker.start(); worker.join()\n"
    (tmp_path / "spawning.py").write_text(spawning)
    assert run_python("spawning.py", cwd=tmp_path) == ""
    (package / "__main__.py").write_text(SCRIPT)
    assert run_python("-m", "jobs", cwd=tmp_path) == "ran\ndeclined\n"  # another module, another function
    assert run_python("-m", "jobs", cwd=tmp_path) == ""
