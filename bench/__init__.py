"""Benchmarks: `python -m bench`. See README.md."""
