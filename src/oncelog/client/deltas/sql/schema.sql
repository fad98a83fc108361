-- Tables of a deltas client, in a separate file. Version 1.
-- Owner of the file, last clock reading (TEXT, because unsigned 64-bit numbers do not fit into an INTEGER), cursor in
-- the gateway, and whether all rows must be read again.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL,
    gateway TEXT NOT NULL,
    hlc TEXT NOT NULL,
    cursor INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    is_reset_wanted INTEGER NOT NULL
) STRICT;
-- Rows with the state that a merge needs. Deleted rows are kept so that a late delta does not restore them.
CREATE TABLE row_states (
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    is_there INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (table_name, row_id)
) STRICT;
CREATE INDEX row_states_there ON row_states (table_name, row_id) WHERE is_there = 1;
-- Deltas of this client, in edit order. Only deltas in this table are sent. Acknowledged deltas are kept only during a
-- reset, because its pages may have been read before the deltas were committed.
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    delta_id BLOB NOT NULL UNIQUE,
    body BLOB NOT NULL,
    acknowledged_epoch TEXT
) STRICT;
