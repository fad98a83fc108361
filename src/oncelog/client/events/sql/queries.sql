-- name: state
SELECT schema_version, client_id, partitions, epoch, cursor FROM oncelog_client_state WHERE one = 1;

-- name: make_state
INSERT INTO oncelog_client_state (one, schema_version, client_id, partitions, epoch, cursor) VALUES (1, ?, ?, ?, '', 0);

-- name: save_cursor
UPDATE oncelog_client_state SET cursor = ?, epoch = ? WHERE one = 1;

-- name: save_client
UPDATE oncelog_client_state SET client_id = ? WHERE one = 1;

-- name: start_over
UPDATE oncelog_client_state SET partitions = ?, cursor = ?, epoch = ? WHERE one = 1;

-- name: outbox
SELECT number, id, partitions, body, fingerprint, expected_committed_id FROM oncelog_client_outbox ORDER BY number;

-- name: accept
INSERT INTO oncelog_client_outbox (number, id, partitions, body, fingerprint, expected_committed_id)
VALUES (?, ?, ?, ?, ?, ?);

-- name: highest_number
SELECT max((SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'oncelog_client_outbox'),
           (SELECT coalesce(max(number), 0) FROM oncelog_client_rejected));

-- name: settle
DELETE FROM oncelog_client_outbox WHERE number = ?;

-- name: refuse
INSERT OR REPLACE INTO oncelog_client_rejected (number, id, partitions, body, outcome, rejected_at_ms)
VALUES (?, ?, ?, ?, ?, ?);

-- name: refused
SELECT id, partitions, body, outcome, rejected_at_ms FROM oncelog_client_rejected ORDER BY number;

-- name: forget_refused
DELETE FROM oncelog_client_rejected WHERE id = ?;

-- name: count_refused
SELECT count(*) FROM oncelog_client_rejected;

-- name: set_aside
INSERT OR REPLACE INTO oncelog_client_set_aside (handler, committed_id, event, error) VALUES (?, ?, ?, ?);

-- name: all_set_aside
SELECT handler, event, error FROM oncelog_client_set_aside ORDER BY committed_id, handler;

-- name: taken_at_last
DELETE FROM oncelog_client_set_aside WHERE handler = ? AND committed_id = ?;

-- name: forget_set_aside
DELETE FROM oncelog_client_set_aside;

-- name: forget_set_aside_at
DELETE FROM oncelog_client_set_aside WHERE committed_id = ?;

-- name: count_set_aside
SELECT count(*) FROM oncelog_client_set_aside;
