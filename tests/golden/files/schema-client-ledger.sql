-- application_id: 1330400323
-- user_version: 2
-- encoding: UTF-8
-- page_size: 4096
-- journal_mode: wal
-- auto_vacuum: 0

-- index sqlite_autoindex_scopes_1 on scopes
-- automatic

-- table client on client
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL
) STRICT

-- table pending on pending
CREATE TABLE pending (
    scope_id INTEGER NOT NULL REFERENCES scopes (id),
    number INTEGER NOT NULL,
    key BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    lowest_sequence INTEGER NOT NULL DEFAULT 1,
    body BLOB NOT NULL,
    made_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope_id, number)
) STRICT, WITHOUT ROWID

-- table scopes on scopes
CREATE TABLE scopes (
    id INTEGER PRIMARY KEY,
    organization TEXT NOT NULL,
    vault TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    freed_sequence INTEGER NOT NULL DEFAULT 0,
    highest_sequence INTEGER NOT NULL DEFAULT 0,
    UNIQUE (organization, vault)
) STRICT

