"""Queries that SQLite and PostgreSQL share. Each is a generator, which a driver of the engine runs."""
