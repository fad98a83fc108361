"""`python -m oncelog` is `oncelog`."""

from oncelog.cli import main

main()
