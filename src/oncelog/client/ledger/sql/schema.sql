-- The store of a ledger client. No other tables are in the file. Version 2.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL
) STRICT;
-- An organization or a vault, and its sequences: the highest one that is known to be committed, the highest one of a
-- write that ended without being committed, and the highest one that a write ever had.
CREATE TABLE scopes (
    id INTEGER PRIMARY KEY,
    organization TEXT NOT NULL,
    vault TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    freed_sequence INTEGER NOT NULL DEFAULT 0,
    highest_sequence INTEGER NOT NULL DEFAULT 0,
    UNIQUE (organization, vault)
) STRICT;
-- Writes without an outcome, in the order of the callers. A write is stored before it is sent. The server may have
-- committed it under any sequence from `lowest_sequence` on.
CREATE TABLE pending (
    scope_id INTEGER NOT NULL REFERENCES scopes (id),
    number INTEGER NOT NULL,
    key BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    lowest_sequence INTEGER NOT NULL DEFAULT 1,
    body BLOB NOT NULL,
    made_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope_id, number)
) STRICT, WITHOUT ROWID;
