-- Tables of a ledger client, in a separate file. Version 2.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL
) STRICT;
-- An organization or a vault, and its sequences: the highest one known to be committed, the highest one of a refused or
-- withdrawn write, and the highest one that any write ever had.
CREATE TABLE scopes (
    id INTEGER PRIMARY KEY,
    organization TEXT NOT NULL,
    vault TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    freed_sequence INTEGER NOT NULL DEFAULT 0,
    highest_sequence INTEGER NOT NULL DEFAULT 0,
    UNIQUE (organization, vault)
) STRICT;
-- Writes without an outcome, in order of submission. A write is stored before it is sent. The server may have committed
-- it under any sequence from `lowest_sequence` on.
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
