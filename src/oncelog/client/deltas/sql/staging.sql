-- Rows of a snapshot that is being read, until its last page has arrived.
CREATE TEMP TABLE staged (
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    is_there INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (table_name, row_id)
) STRICT;
