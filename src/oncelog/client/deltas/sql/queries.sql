-- name: make_client
INSERT INTO client (one, client_id, gateway, hlc, cursor, epoch, is_reset_wanted) VALUES (1, ?, ?, '0', 0, '', 0);

-- name: client
SELECT client_id, gateway, hlc, cursor, epoch, is_reset_wanted FROM client WHERE one = 1;

-- name: save_hlc
UPDATE client SET hlc = ?;

-- name: save_cursor
UPDATE client SET hlc = ?, cursor = ?, epoch = ?;

-- name: save_first_epoch
UPDATE client SET epoch = ? WHERE epoch = '';

-- name: want_reset
UPDATE client SET is_reset_wanted = 1;

-- name: end_reset
UPDATE client SET is_reset_wanted = 0;

-- name: row
SELECT state FROM row_states WHERE table_name = ? AND row_id = ?;

-- name: row_states
SELECT state FROM row_states;

-- name: rows_after
SELECT row_id, state FROM row_states
WHERE table_name = ? AND row_id > ? AND is_there = 1 ORDER BY row_id LIMIT ?;

-- name: save_row
INSERT INTO row_states (table_name, row_id, is_there, state) VALUES (?, ?, ?, ?)
ON CONFLICT (table_name, row_id) DO UPDATE SET is_there = excluded.is_there, state = excluded.state;

-- name: outbox_counts
SELECT count(*), coalesce(sum(length(body)), 0), coalesce(min(number), 0),
    coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0) FROM outbox
WHERE acknowledged_epoch IS NULL;

-- name: append
INSERT INTO outbox (delta_id, body) VALUES (?, ?);

-- name: pending
SELECT number, delta_id, body FROM outbox WHERE acknowledged_epoch IS NULL AND number < ? ORDER BY number LIMIT ?;

-- name: acknowledge
UPDATE outbox SET acknowledged_epoch = ? WHERE number <= ? AND acknowledged_epoch IS NULL;

-- name: forget_acknowledged
DELETE FROM outbox WHERE acknowledged_epoch IS NOT NULL;

-- name: discard
DELETE FROM outbox WHERE delta_id = ? AND acknowledged_epoch IS NULL;

-- name: outbox_of_epoch
SELECT body FROM outbox WHERE acknowledged_epoch IS NULL OR acknowledged_epoch = ? ORDER BY number;

-- name: clear_staged
DELETE FROM temp.staged;

-- name: staged_row
SELECT state FROM temp.staged WHERE table_name = ? AND row_id = ?;

-- name: stage
INSERT OR REPLACE INTO temp.staged (table_name, row_id, is_there, state) VALUES (?, ?, ?, ?);

-- name: replaced_rows
SELECT new.table_name, new.row_id, old.state, new.state
FROM temp.staged AS new LEFT JOIN row_states AS old USING (table_name, row_id)
WHERE old.state IS NOT new.state
UNION ALL
SELECT old.table_name, old.row_id, old.state, NULL
FROM row_states AS old LEFT JOIN temp.staged AS new USING (table_name, row_id)
WHERE old.is_there = 1 AND new.table_name IS NULL;

-- name: clear_rows
DELETE FROM row_states;

-- name: unstage
INSERT INTO row_states (table_name, row_id, is_there, state)
SELECT table_name, row_id, is_there, state FROM temp.staged;
