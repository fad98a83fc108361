-- Statements that SQLite and PostgreSQL share, by name. For SQLite, `$1` becomes `?1`.

-- name: schema_version
-- A separate statement, because a later schema version may have different columns.
SELECT schema_version FROM oncelog_log;

-- name: log
-- Properties of the log.
SELECT schema_version, epoch, lanes, eviction_interval, index_secret, created_ms FROM oncelog_log;

-- name: set_schema_version
UPDATE oncelog_log SET schema_version = $1;

-- name: set_epoch
UPDATE oncelog_log SET epoch = $1;

-- name: leaps
SELECT leaps FROM oncelog_state;

-- name: set_leaps
UPDATE oncelog_state SET leaps = $1;

-- name: block_before_leap
-- The newest block of a lane up to a height: the block before a leap.
SELECT first_position + count - 1, height FROM oncelog_blocks WHERE lane = $1 AND height <= $2 ORDER BY height DESC LIMIT 1;

-- name: set_floors
-- Covers all streams of the log. (SQLite needs a WHERE before ON CONFLICT.)
INSERT INTO oncelog_floors (lane, scope, floor) SELECT lane, scope, $1 FROM oncelog_streams WHERE true
ON CONFLICT (lane, scope) DO UPDATE SET floor = excluded.floor;

-- name: erasures
SELECT erasures FROM oncelog_state;

-- name: consumers
-- All consumers, each with the newest number in the order that it reads.
SELECT c.lane, c.scope, c.consumer, c.cursor, coalesce(s.sequence, CASE WHEN c.scope = '' THEN l.position END, 0)
FROM oncelog_consumers AS c LEFT JOIN oncelog_streams AS s ON s.lane = c.lane AND s.scope = c.scope
LEFT JOIN oncelog_lanes AS l ON l.lane = c.lane ORDER BY c.scope, c.consumer;

-- name: tenants
SELECT tenants, usage_version FROM oncelog_state;

-- name: usage
SELECT tenant, bytes, records, full_at_us FROM oncelog_usage ORDER BY tenant;

-- name: policies
SELECT name, declaration FROM oncelog_policies ORDER BY name;

-- name: declare_policy
INSERT INTO oncelog_policies (name, declaration) VALUES ($1, $2);

-- name: touch_lane
-- Counts a change to the lane that neither adds a record nor changes its head.
UPDATE oncelog_lanes SET revision = revision + 1 WHERE lane = $1;

-- name: block
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks WHERE lane = $1 AND height = $2;

-- name: blocks
-- Blocks of a lane above a height, in order.
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks
WHERE lane = $1 AND height > $2 ORDER BY height LIMIT $3;

-- name: lane_head
SELECT position FROM oncelog_lanes WHERE lane = $1;

-- name: stream_head
SELECT sequence FROM oncelog_streams WHERE lane = $1 AND scope = $2;

-- name: scopes
SELECT scope FROM oncelog_streams;

-- name: client_names
SELECT policy, scope, client FROM oncelog_clients;

-- name: leases_of_key
SELECT policy, scope, client FROM oncelog_leases WHERE key_hex = $1 LIMIT $2;

-- name: all_lanes
-- All heads, including those of lanes without records.
SELECT lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash FROM oncelog_lanes ORDER BY lane;

-- name: all_blocks
-- Blocks of all lanes, in order.
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks ORDER BY lane, height;

-- name: all_partition_records
SELECT lane, partition, position FROM oncelog_partition_records ORDER BY lane, partition, position;

-- name: member_without_stream
-- A current or past member of a stream that was never opened.
SELECT m.lane, m.scope, m.member FROM (
    SELECT lane, scope, member FROM oncelog_members UNION ALL SELECT lane, scope, member FROM oncelog_member_changes
) AS m
WHERE NOT EXISTS (SELECT 1 FROM oncelog_streams AS s WHERE s.lane = m.lane AND s.scope = m.scope) LIMIT 1;

-- name: stream_of_nobody
-- A stream without records that never had a member.
SELECT s.lane, s.scope FROM oncelog_streams AS s WHERE s.sequence = 0
    AND NOT EXISTS (SELECT 1 FROM oncelog_members AS m WHERE m.lane = s.lane AND m.scope = s.scope)
    AND NOT EXISTS (SELECT 1 FROM oncelog_member_changes AS c WHERE c.lane = s.lane AND c.scope = s.scope) LIMIT 1;

-- name: bad_roster
-- A stream whose members, owners or `joined` numbers differ from its roster, or that has no owner.
SELECT coalesce(m.lane, r.lane), coalesce(m.scope, r.scope), coalesce(m.members, 0), coalesce(m.owners, 0),
    coalesce(r.members, 0), r.owners
FROM (
    SELECT lane, scope, count(*) AS members, sum(is_owner) AS owners, min(joined) AS first, max(joined) AS last,
        count(DISTINCT joined) AS numbers, min(is_owner) AS least, max(is_owner) AS most
    FROM oncelog_members GROUP BY lane, scope
) AS m FULL JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
WHERE coalesce(m.members, 0) <> coalesce(r.members, -1) OR coalesce(m.owners, 0) <> coalesce(r.owners, 0)
    OR m.numbers <> m.members OR m.first < 1 OR m.last > r.joined OR m.least < 0 OR m.most > 1
    OR (r.owners = 0 AND r.members > 0) LIMIT 1;

-- name: member_change_beyond
-- A member change with a revision that its lane has not reached.
SELECT c.lane, c.scope, c.member, c.revision, coalesce(h.revision, 0)
FROM oncelog_member_changes AS c LEFT JOIN oncelog_lanes AS h ON h.lane = c.lane
WHERE c.kind NOT IN (1, 2) OR c.revision < 1 OR c.revision > coalesce(h.revision, 0) LIMIT 1;

-- name: acknowledged_beyond
-- A member that has acknowledged a sequence beyond the end of its stream.
SELECT a.lane, a.scope, a.member, a.sequence, coalesce(s.sequence, 0)
FROM oncelog_acknowledged AS a LEFT JOIN oncelog_streams AS s ON s.lane = a.lane AND s.scope = a.scope
WHERE a.sequence < 0 OR a.sequence > coalesce(s.sequence, 0) LIMIT 1;

-- name: usage_below
-- Usage with impossible values.
SELECT lane, tenant FROM oncelog_usage WHERE bytes < 0 OR records < 0 OR full_at_us < 0 LIMIT 1;

-- name: create_traces
-- Not a migration: only logs with tracing have the table. See storage/queries/traces.py.
CREATE TABLE IF NOT EXISTS _oncelog_traces (
    lane INTEGER NOT NULL, position BIGINT NOT NULL, traceparent TEXT NOT NULL, commit_traceparent TEXT NOT NULL,
    PRIMARY KEY (lane, position)
);
