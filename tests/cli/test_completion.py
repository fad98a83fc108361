"""Shells complete commands, options and profiles."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.runner import COMMAND, RUNNER
from cli.server_process import ENVIRONMENT, oncelog
from deadlines import WAIT_S

PROGRAM = Path(sys.executable).with_name("oncelog")


@pytest.mark.parametrize(
    ("shell", "text"),
    [("bash", "complete -o default -F"), ("zsh", "#compdef oncelog"), ("fish", "complete --command oncelog")],
)
def test_script_is_printed(shell: str, text: str) -> None:
    done = RUNNER.invoke(COMMAND, ["completion", shell])
    assert done.exit_code == 0
    assert text in done.stdout
    assert "_ONCELOG_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("shell", "script", "start_file"),
    [
        ("bash", ".bash_completions/oncelog.sh", ".bashrc"),
        ("zsh", ".zfunc/_oncelog", ".zshrc"),
        ("fish", ".config/fish/completions/oncelog.fish", None),
    ],
)
def test_script_is_installed_once(shell: str, script: str, start_file: str | None, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        done = oncelog("completion", shell, "--install", HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / script) in done.stderr
        contents.append("" if start_file is None else (tmp_path / start_file).read_text(encoding="utf-8").strip())
    printed = oncelog("completion", shell).stdout
    assert (tmp_path / script).read_text(encoding="utf-8").strip() == printed.strip()
    assert contents[0] == contents[1]


def test_bash_completes_commands_options_and_profiles(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[profiles.production]\nurl = "http://127.0.0.1:1"\n', encoding="utf-8")

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        program = (
            f'eval "$({PROGRAM} completion bash)"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; '
            f'_oncelog_completion oncelog; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        path = os.pathsep.join([str(PROGRAM.parent), os.environ["PATH"]])
        environment = {**ENVIRONMENT, "PATH": path, "ONCELOG_PROFILES_FILE": str(profiles)}
        done = subprocess.run(  # noqa: S603
            [bash, "--norc", "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=WAIT_S
        )
        return done.stdout.split()

    assert complete("oncelog", "sub") == ["submit"]
    assert "--partition" in complete("oncelog", "submit", "--par")
    assert complete("oncelog", "deltas", "sna") == ["snapshot"]
    assert complete("oncelog", "stats", "--profile", "pro") == ["production"]


def test_unknown_shell_is_refused() -> None:
    done = RUNNER.invoke(COMMAND, ["completion", "tcsh"])
    assert done.exit_code == 2
