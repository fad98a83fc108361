"""Runs the command `oncelog` as `python -m oncelog`."""

from oncelog.cli import main

main()
