"""The web chat's protocol in Node against a model of the server: fixed cases and random histories."""

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from insieme.clients import find_program
from oncelog.server.web_chat.endpoints import STATIC_DIRECTORY

HERE: Final = Path(__file__).parent
STORIES: Final = 40
SOAK_STORIES: Final = 2000


def node_test(name: str, **environment: str) -> None:
    command = [find_program("node", "nodejs"), "--test", "--test-reporter=tap", str(HERE / name)]
    done = subprocess.run(  # noqa: S603
        command,
        env={**os.environ, "CHAT_PAGE": STATIC_DIRECTORY.as_uri(), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    failed = [line for line in done.stdout.splitlines() if "not ok" in line or "error:" in line]
    assert done.returncode == 0, "\n".join(failed) or done.stdout + done.stderr


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
def test_protocol_passes_the_fixed_cases() -> None:
    node_test("protocol.test.mjs")


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
def test_simulated_pages_on_bad_networks_agree_on_one_order(request: pytest.FixtureRequest) -> None:
    is_soak = request.config.getoption("--soak")
    first = int(request.config.getoption("--hypothesis-seed") or 0) % 10**6 if is_soak else 1
    stories = SOAK_STORIES if is_soak else STORIES
    node_test("simulated.test.mjs", CHAT_SEEDS=str(stories), CHAT_FIRST_SEED=str(first))
