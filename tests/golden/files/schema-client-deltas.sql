-- application_id: 1330398275
-- user_version: 1
-- encoding: UTF-8
-- page_size: 4096
-- journal_mode: wal
-- auto_vacuum: 0

-- index row_states_there on row_states
CREATE INDEX row_states_there ON row_states (table_name, row_id) WHERE is_there = 1

-- index sqlite_autoindex_outbox_1 on outbox
-- automatic

-- index sqlite_autoindex_row_states_1 on row_states
-- automatic

-- table client on client
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL,
    gateway TEXT NOT NULL,
    hlc TEXT NOT NULL,
    cursor INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    is_reset_wanted INTEGER NOT NULL
) STRICT

-- table outbox on outbox
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    delta_id BLOB NOT NULL UNIQUE,
    body BLOB NOT NULL,
    acknowledged_epoch TEXT
) STRICT

-- table row_states on row_states
CREATE TABLE row_states (
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    is_there INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (table_name, row_id)
) STRICT

-- table sqlite_sequence on sqlite_sequence
CREATE TABLE sqlite_sequence(name,seq)

