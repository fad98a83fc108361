"""Verification of a log: all checks, for both databases."""
