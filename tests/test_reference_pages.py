"""The first example of each reference page works as printed."""

import re
from pathlib import Path

import pytest

from cli.server_process import reserve_port
from walkthrough import Walkthrough

REFERENCE = Path(__file__).parent.parent / "docs/reference"
EXAMPLES = {
    page.stem: found[1]
    for page in sorted(REFERENCE.glob("*.md"))
    if (found := re.search(r"^## Try it\n(.*?)(?=^## )", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_first_example_works_as_printed(page: str, tmp_path: Path) -> None:
    with reserve_port() as port:
        walkthrough = Walkthrough(tmp_path, port)
        try:
            walkthrough.follow(EXAMPLES[page])
        finally:
            walkthrough.kill_server()


def test_pages_with_examples_are_found() -> None:
    assert {"canonical", "deltas", "ledger", "proofs"} <= set(EXAMPLES)
