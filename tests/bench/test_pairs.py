"""The benchmark that compares two source trees. The tests compare a tree with itself."""

from pathlib import Path

import pytest

from bench.pairs import GROUPS, main
from bench.pairs_embedded import LOADS

ROOT = Path(__file__).parent.parent.parent


def test_server_comparison_prints_one_row_per_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), "server", "--pairs", "1", "--slice-s", "0.3"]) in (0, 1)
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "CPU per event"
    assert [row.split("  ")[0] for row in rows] == ["server, single events", "server, batches of 100"]


@pytest.mark.parametrize("name", LOADS)
async def test_embedded_load_measures_a_positive_time(name: str, tmp_path: Path) -> None:
    assert await LOADS[name](tmp_path / "log.db", 100) > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "/nowhere has no src/oncelog"),
        ([str(ROOT), "chat"], f"unknown name 'chat'; known names: {', '.join(GROUPS)}"),
        ([str(ROOT), "--pairs", "0"], "--pairs must be at least 1, not 0"),
        ([str(ROOT), "--slice-s", "0"], "--slice-s must be at least 0.1, not 0.0"),
    ],
)
def test_wrong_argument_is_reported(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert complaint in capsys.readouterr().err
