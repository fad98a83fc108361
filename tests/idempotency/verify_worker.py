"""Verify a log: python verify_worker.py FILE. The exit status is that of `oncelog verify`."""

import sys

from oncelog.cli import main

sys.argv = ["oncelog", "verify", sys.argv[1]]
main()
