"""Verification of a log in an SQLite file or a PostgreSQL database."""
