-- The key index in runs (key_run.py): some dozens of sorted keys in one row. `last` is the highest hash among them.
-- The old table gets another name at once: a process of an older Oncelog that has the file open must not write to it
-- once its keys have been copied (schema_migration.py).
ALTER TABLE oncelog_keys RENAME TO oncelog_key_rows;

CREATE TABLE oncelog_key_runs (
    segment INTEGER NOT NULL,
    last INTEGER NOT NULL,
    keys BLOB NOT NULL,
    PRIMARY KEY (segment, last)
) STRICT, WITHOUT ROWID;
