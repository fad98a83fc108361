-- Tables of an events client, in a file that may also contain the application's tables. Version 1.
CREATE TABLE IF NOT EXISTS oncelog_client_state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    schema_version INTEGER NOT NULL,
    client_id TEXT NOT NULL,
    partitions TEXT NOT NULL,
    epoch TEXT NOT NULL,
    cursor INTEGER NOT NULL
) STRICT;
-- Submissions without an outcome. The client sends them in order of their numbers and never reuses a number.
CREATE TABLE IF NOT EXISTS oncelog_client_outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    partitions TEXT NOT NULL,
    body BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    expected_committed_id INTEGER
) STRICT;
-- Refused submissions, until the application forgets them.
CREATE TABLE IF NOT EXISTS oncelog_client_rejected (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    partitions TEXT NOT NULL,
    body BLOB NOT NULL,
    outcome TEXT NOT NULL,
    rejected_at_ms INTEGER NOT NULL
) STRICT;
-- Events for which a handler raised an error.
CREATE TABLE IF NOT EXISTS oncelog_client_set_aside (
    handler TEXT NOT NULL,
    committed_id INTEGER NOT NULL,
    event TEXT NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (handler, committed_id)
) STRICT, WITHOUT ROWID;
