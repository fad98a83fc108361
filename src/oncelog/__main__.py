"""Run the `oncelog` command with `python -m oncelog`."""

from oncelog.cli import main

main()
