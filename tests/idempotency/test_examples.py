"""The examples and the programs of docs/once.md do what they say."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = re.findall(r"```python\n(.*?)```", (ROOT / "docs/once.md").read_text(encoding="utf-8"), re.DOTALL)


def told(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.rule("RU-6", "RU-7")
def test_the_agent(tmp_path: Path) -> None:
    said = told(str(ROOT / "examples/agent.py"), cwd=tmp_path)
    assert re.findall(r"(\w+) +(reused|executed)\n", said) == [
        ("search", "reused"),
        ("book", "reused"),
        ("send_mail", "executed"),
    ]
    assert len((tmp_path / "agent-outbox.txt").read_text().splitlines()) == 3


@pytest.mark.rule("RU-11")
def test_the_nightly_job(tmp_path: Path) -> None:
    assert "20 bills for 20 accounts" in told(str(ROOT / "examples/nightly.py"), cwd=tmp_path)


@pytest.mark.rule("RU-11")
def test_the_payment_endpoint(tmp_path: Path) -> None:
    said = told(str(ROOT / "examples/payments.py"), cwd=tmp_path)
    assert "charged: [('ada', 30), ('bob', 30)]" in said
    assert said.count("replayed=true") == 10


@pytest.mark.rule("RU-12")
def test_the_transfer_that_is_killed_at_every_step(tmp_path: Path) -> None:
    said = told(str(ROOT / "examples/transfer.py"), cwd=tmp_path)
    deaths = int(re.findall(r"killed before each of its (\d+) statements", said)[0])
    assert deaths > 20  # BEGIN, what is looked up, the savepoint, three rows, the record, its places, COMMIT
    assert told("-m", "oncelog", "verify", "transfer.db", cwd=tmp_path)


@pytest.mark.parametrize("number", range(len(PAGE)))
def test_the_programs_of_the_page_run(number: int, tmp_path: Path) -> None:
    said = told("-c", PAGE[number], cwd=tmp_path)
    assert said == ("this key was used for something else; nothing was done\n" if number == 0 else "")


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


def test_a_function_has_one_name_however_its_module_is_started(tmp_path: Path) -> None:
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "job.py").write_text(SCRIPT)
    assert told("job.py", cwd=tmp_path) == "ran\ndeclined\n"
    assert told("-m", "job", cwd=tmp_path) == ""
    assert told("-c", "import job; job.main()", cwd=tmp_path) == ""
    spawning = "import job, multiprocessing as m\nif __name__ == '__main__':\n"
    spawning += "    worker = m.get_context('spawn').Process(target=job.main); worker.start(); worker.join()\n"
    (tmp_path / "spawning.py").write_text(spawning)
    assert told("spawning.py", cwd=tmp_path) == ""
    (package / "__main__.py").write_text(SCRIPT)
    assert told("-m", "jobs", cwd=tmp_path) == "ran\ndeclined\n"  # another module, another function
    assert told("-m", "jobs", cwd=tmp_path) == ""
