-- Statements that a migration runs on the database, by name.

-- name: alone
-- Lock that a migration's session holds. If the migration is killed, the server releases it some time later.
SELECT pg_advisory_lock((1332634477::bigint << 32) | to_regnamespace(quote_ident(current_schema()))::oid::bigint);

-- name: begin
UPDATE oncelog_state SET move = $1, erasures = $2;

-- name: end
-- Ends the given move, unless it has already ended. Does not affect other moves.
UPDATE oncelog_state SET move = NULL WHERE move IS NOT NULL AND move = $1 RETURNING id;

-- name: reached
-- The last position and height in each lane.
SELECT lane,
    coalesce((SELECT position FROM oncelog_records AS r WHERE r.lane = l.lane ORDER BY position DESC LIMIT 1), 0),
    coalesce((SELECT height FROM oncelog_blocks AS b WHERE b.lane = l.lane ORDER BY height DESC LIMIT 1), 0)
FROM oncelog_lanes AS l ORDER BY lane;

-- name: erase
UPDATE oncelog_records AS r SET body_hash = n.body_hash, salt = NULL, body = NULL
FROM unnest($1::integer[], $2::bigint[], $3::bytea[]) AS n (lane, position, body_hash)
WHERE r.lane = n.lane AND r.position = n.position AND r.body IS NOT NULL;

-- name: set_log_state
UPDATE oncelog_state SET erasures = $1, tenants = $2, usage_version = $3, leaps = $4;
