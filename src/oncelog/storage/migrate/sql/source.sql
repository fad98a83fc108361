-- Statements that a migration runs on the file, by name.

-- name: records
-- Records of a lane between two places, with all columns.
SELECT place, sequence, log_time_ms, height, client_sequence, policy, scope, client, key, fingerprint, actor, partitions,
    salt, body_hash, body
FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place LIMIT ?;

-- name: blocks
-- Blocks of a lane between two heights.
SELECT lane, height, first_position, count, log_time_ms, previous, root
FROM oncelog_blocks WHERE lane = ? AND height > ? AND height <= ? ORDER BY height;

-- name: erased
-- Erased records, with the hashes of their bodies.
SELECT place >> 48, place & 281474976710655, body_hash FROM oncelog_records WHERE body IS NULL;

-- name: log_state
-- The log's state apart from heads, clock and side state.
SELECT erasures, tenants, usage_version, leaps FROM oncelog_state;
