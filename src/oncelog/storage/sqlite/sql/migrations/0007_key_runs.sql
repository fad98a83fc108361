-- The key index in runs (key_run.py): about 60 sorted keys in one row. `last` is the highest hash of the run. The old
-- table is renamed first, because a process of an older Oncelog version that has the file open must not write to it
-- once its keys have been copied (database_file.py).
ALTER TABLE oncelog_keys RENAME TO oncelog_key_rows;

CREATE TABLE oncelog_key_runs (
    segment INTEGER NOT NULL,
    last INTEGER NOT NULL,
    keys BLOB NOT NULL,
    PRIMARY KEY (segment, last)
) STRICT, WITHOUT ROWID;
