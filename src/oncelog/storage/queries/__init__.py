"""Queries that SQLite and PostgreSQL share. Each is a generator that the engine's driver runs."""
