"""Performance, measured: `python -m bench`. See README.md."""
