"""Key index of the SQLite store: an LSM tree over the keys of all records."""
