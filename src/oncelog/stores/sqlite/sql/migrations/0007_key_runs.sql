-- The key index in runs (runs.py): some dozens of sorted keys in one row. `last` is the highest hash among them.
CREATE TABLE oncelog_key_runs (
    segment INTEGER NOT NULL,
    last INTEGER NOT NULL,
    keys BLOB NOT NULL,
    PRIMARY KEY (segment, last)
) STRICT, WITHOUT ROWID;
