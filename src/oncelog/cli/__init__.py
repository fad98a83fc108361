"""The command line: one file a command."""

import sys


def main() -> None:
    """What the `oncelog` script runs."""
    try:
        from oncelog.cli.app import app  # noqa: PLC0415 - the library can be installed without its command line
    except ModuleNotFoundError as error:
        sys.exit(f"oncelog: the command line needs {error.name}: pip install 'oncelog[cli]'")
    app()
