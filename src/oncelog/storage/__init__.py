"""Stores of a log: SQLite, PostgreSQL and memory. A store loads and saves state; `core.plan` makes the decisions."""
