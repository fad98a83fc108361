"""Stores of a log: SQLite, PostgreSQL and memory. They load and save; `core.plan` decides."""
