-- application_id: 0
-- user_version: 0
-- encoding: UTF-8
-- page_size: 4096
-- journal_mode: wal
-- auto_vacuum: 0

-- index sqlite_autoindex_oncelog_client_outbox_1 on oncelog_client_outbox
-- automatic

-- table oncelog_client_outbox on oncelog_client_outbox
CREATE TABLE oncelog_client_outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    partitions TEXT NOT NULL,
    body BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    expected_committed_id INTEGER
) STRICT

-- table oncelog_client_rejected on oncelog_client_rejected
CREATE TABLE oncelog_client_rejected (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    partitions TEXT NOT NULL,
    body BLOB NOT NULL,
    outcome TEXT NOT NULL,
    rejected_at_ms INTEGER NOT NULL
) STRICT

-- table oncelog_client_set_aside on oncelog_client_set_aside
CREATE TABLE oncelog_client_set_aside (
    handler TEXT NOT NULL,
    committed_id INTEGER NOT NULL,
    event TEXT NOT NULL,
    error TEXT NOT NULL,
    PRIMARY KEY (handler, committed_id)
) STRICT, WITHOUT ROWID

-- table oncelog_client_state on oncelog_client_state
CREATE TABLE oncelog_client_state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    schema_version INTEGER NOT NULL,
    client_id TEXT NOT NULL,
    partitions TEXT NOT NULL,
    epoch TEXT NOT NULL,
    cursor INTEGER NOT NULL
) STRICT

-- table sqlite_sequence on sqlite_sequence
CREATE TABLE sqlite_sequence(name,seq)

