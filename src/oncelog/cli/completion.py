"""`oncelog completion`: print or install the completion of commands and options for a shell."""

from typing import Annotated, Final, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined] # imported there from a private module
    completion_init,
    get_completion_script,
    install,
)

from oncelog.cli.terminal import print_message

PROGRAM: Final = "oncelog"
COMPLETE_VARIABLE: Final = "_ONCELOG_COMPLETE"
"""Environment variable that a shell sets to request completions."""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)
    ],
    is_installing: Annotated[
        bool, typer.Option("--install", help="Add the script to the shell's start files in your home directory.")
    ] = False,
) -> None:
    """Print the script with which a shell completes commands, options and profiles, or install it.

    --install writes ~/.bash_completions/oncelog.sh and adds it to ~/.bashrc, writes ~/.zfunc/_oncelog and adds it to
    ~/.zshrc, or writes ~/.config/fish/completions/oncelog.fish. Start a new shell afterwards.

    Examples:

      oncelog completion bash --install

      eval "$(oncelog completion zsh)"

      oncelog completion fish > ~/.config/fish/completions/oncelog.fish
    """
    if not is_installing:
        typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell))
        return
    _, path = install(shell=shell, prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE)
    print_message(f"completion for {shell} is installed in {path}; start a new shell")


def enable_completion() -> None:
    """Let the command line answer the requests of the scripts."""
    completion_init()
