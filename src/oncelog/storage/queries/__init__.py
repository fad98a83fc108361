"""Queries that SQLite and PostgreSQL share: each is a generator, which a driver of the engine runs."""
