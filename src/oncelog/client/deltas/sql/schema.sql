-- The file of a client of rows: its own, nobody else's tables are in it. Version 1.
-- Whose it is; the last reading of the clock (64 bits do not fit into an INTEGER); how far the gateway has been read,
-- and whether all rows are to be read anew.
CREATE TABLE client (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    client_id TEXT NOT NULL,
    gateway TEXT NOT NULL,
    hlc TEXT NOT NULL,
    cursor INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    is_reset_wanted INTEGER NOT NULL
) STRICT;
-- Rows with all that a merge needs. Deleted ones stay: a late delta must not bring them back.
CREATE TABLE row_states (
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    is_there INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (table_name, row_id)
) STRICT;
CREATE INDEX row_states_there ON row_states (table_name, row_id) WHERE is_there = 1;
-- Own deltas, in the order in which they were made. Nothing is sent that is not here. Those that are acknowledged stay
-- only while all rows are read anew: the pages may have been read before they were committed.
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    delta_id BLOB NOT NULL UNIQUE,
    body BLOB NOT NULL,
    acknowledged_epoch TEXT
) STRICT;
