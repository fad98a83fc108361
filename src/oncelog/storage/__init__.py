"""Stores of a log: SQLite, PostgreSQL and memory. A store loads and saves; `core.plan` decides."""
