-- name: client
SELECT client_id FROM client WHERE one = 1;

-- name: make_client
INSERT INTO client (one, client_id) VALUES (1, ?);

-- name: scopes_pending
SELECT organization, vault FROM scopes WHERE id IN (SELECT scope_id FROM pending) ORDER BY id;

-- name: scope
SELECT id, last_sequence, freed_sequence, highest_sequence FROM scopes WHERE organization = ? AND vault = ?;

-- name: make_scope
INSERT INTO scopes (organization, vault, last_sequence) VALUES (?, ?, 0) ON CONFLICT DO NOTHING;

-- name: save_state
UPDATE scopes SET last_sequence = ?, freed_sequence = ?, highest_sequence = ? WHERE id = ?;

-- name: pending
SELECT number, key, sequence, lowest_sequence, body, made_at_ms FROM pending WHERE scope_id = ? ORDER BY number;

-- name: save
INSERT INTO pending (scope_id, number, key, sequence, lowest_sequence, body, made_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope_id, number) DO UPDATE
    SET sequence = excluded.sequence, lowest_sequence = excluded.lowest_sequence;

-- name: highest_number
SELECT coalesce(max(number), 0) FROM pending;

-- name: settle
DELETE FROM pending WHERE scope_id = ? AND number = ?;
