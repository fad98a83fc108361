-- The file of a ledger's client: its own, nobody else's tables are in it. Version 1.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL
) STRICT;
-- An organization, or a vault of one, and the highest sequence there that is known to be committed.
CREATE TABLE scopes (
    id INTEGER PRIMARY KEY,
    organization TEXT NOT NULL,
    vault TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    UNIQUE (organization, vault)
) STRICT;
-- Writes without an outcome, in their callers' order. Nothing is sent that is not here.
CREATE TABLE pending (
    scope_id INTEGER NOT NULL REFERENCES scopes (id),
    number INTEGER NOT NULL,
    key BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    body BLOB NOT NULL,
    made_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope_id, number)
) STRICT, WITHOUT ROWID;
