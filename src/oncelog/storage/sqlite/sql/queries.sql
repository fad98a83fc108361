-- SQLite statements, by name. queries/sql/queries.sql has the statements shared with PostgreSQL. Lists are passed as
-- JSON arrays. Several arrays are the columns of rows: `?2 ->> n.key` is in the same row as `n.value`.

-- name: make_log
INSERT INTO oncelog_log (id, schema_version, epoch, lanes, eviction_interval, index_secret, created_ms)
VALUES (1, :schema_version, :epoch, :lanes, :eviction_interval, :index_secret, :created_ms);

-- name: make_state
INSERT INTO oncelog_state (id, commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms)
VALUES (1, 0, 0, '', 0, 0);

-- name: state
SELECT commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms FROM oncelog_state;

-- name: state_and_move
-- The state with the quotas of tenants (storage/tenants.py) and the moved marker (moved_marker.py), in the one row that every transaction reads.
SELECT commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms, tenants, moved, leaps FROM oncelog_state;

-- name: count_stream_records
SELECT count(*) FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence > ?;

-- name: sequence_before
SELECT sequence FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence <= ?
ORDER BY sequence DESC LIMIT 1 OFFSET ?;

-- name: sequence_after
SELECT max(sequence) FROM (
    SELECT sequence FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence > ? ORDER BY sequence LIMIT ?
);

-- name: set_tenants
-- Counted as a commit, so that other processes reload all cached state.
UPDATE oncelog_state SET tenants = ?1, usage_version = ?2, commits = commits + 1;

-- name: record_sizes
-- Sizes of records, and the columns that determine their tenants.
SELECT place & 281474976710655, sequence, policy, actor, scope, partitions, length(body),
    length(CAST(scope AS BLOB)) + length(CAST(client AS BLOB)) + length(key) + length(CAST(actor AS BLOB))
FROM oncelog_records WHERE place > (?1 << 48 | ?2) AND place <= (?1 << 48 | ?3) ORDER BY place LIMIT ?4;

-- name: state_sizes
-- Sizes of entities, relationships and rows, by scope. Expired entities are not counted, because they may have been
-- deleted already.
SELECT e.scope, count(*), sum(length(CAST(e.key AS BLOB))), sum(length(e.value)) FROM oncelog_entities AS e
JOIN oncelog_lanes AS l ON l.lane = e.lane WHERE e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms
GROUP BY e.lane, e.scope
UNION ALL
SELECT scope, count(*),
    sum(length(CAST(resource AS BLOB)) + length(CAST(relation AS BLOB)) + length(CAST(subject AS BLOB))), 0
FROM oncelog_relationships GROUP BY lane, scope
UNION ALL
SELECT scope, count(*), sum(length(CAST(table_name AS BLOB)) + length(CAST(row_id AS BLOB))), sum(length(state))
FROM oncelog_rows GROUP BY lane, scope;

-- name: member_sizes
-- Sizes of current and past members, by stream.
SELECT scope, count(*), sum(length(CAST(member AS BLOB))) FROM (
    SELECT lane, scope, member FROM oncelog_members
    UNION SELECT lane, scope, member FROM oncelog_member_changes WHERE kind = 1
) GROUP BY lane, scope;

-- name: lock_usage
-- Usage of the given tenants. The caller holds the file's write lock.
SELECT tenant, bytes, records, full_at_us FROM oncelog_usage
WHERE lane = 0 AND tenant IN (SELECT value FROM json_each(?1)) ORDER BY tenant;

-- name: begin_usage
INSERT INTO oncelog_usage (lane, tenant, bytes, records, full_at_us)
SELECT 0, n.value, ?2 ->> n.key, ?3 ->> n.key, 0 FROM json_each(?1) AS n;

-- name: set_bytes
UPDATE oncelog_usage SET bytes = (SELECT ?2 ->> n.key FROM json_each(?1) AS n WHERE n.value = tenant)
WHERE lane = 0 AND tenant IN (SELECT value FROM json_each(?1));

-- name: forget_usage
DELETE FROM oncelog_usage WHERE lane = 0 AND tenant IN (SELECT value FROM json_each(?1));

-- name: moved
SELECT moved FROM oncelog_state;

-- name: set_moved
-- Counted as a commit, so that other processes reload all cached state.
UPDATE oncelog_state SET commits = commits + 1, moved = ?;

-- name: save_state
UPDATE oncelog_state SET commits = commits + 1, clock_boot = ?, clock_elapsed_ms = ?, clock_time_ms = ?;

-- name: count_erasure
UPDATE oncelog_state SET commits = commits + 1, erasures = erasures + 1;

-- name: touch_state
-- A commit without other changes. (SQLite does not write a row that does not change.)
UPDATE oncelog_state SET commits = commits + 1;

-- name: lanes
-- All heads, with the sealed positions of the key index.
SELECT lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash, sealed_position, sealing_position
FROM oncelog_lanes ORDER BY lane;

-- name: save_lane
INSERT INTO oncelog_lanes (lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (lane) DO UPDATE SET
    position = excluded.position, log_time_ms = excluded.log_time_ms, eviction_time_ms = excluded.eviction_time_ms,
    fence = excluded.fence, revision = excluded.revision, height = excluded.height, block_hash = excluded.block_hash;

-- name: save_block
INSERT INTO oncelog_blocks (lane, height, first_position, count, log_time_ms, previous, root) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: remembered
-- Stored answers (`Remembered`) for the records at the given places.
SELECT place, sequence, log_time_ms, height, client_sequence, policy, scope, client, r.key, fingerprint, body IS NULL
FROM json_each(:places) AS n CROSS JOIN oncelog_records AS r ON place = n.value;

-- name: identities
-- Identities of the records between two places, for the key index.
SELECT place, policy, scope, client, client_sequence, key FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place;

-- name: lane_page
-- Records of a lane, ordered by position.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_records WHERE place > (?1 << 48 | ?2) AND place <= (?1 << 48 | ?3) ORDER BY place LIMIT ?4;

-- name: partition_positions
-- Positions as one string, because returning a row costs as much as finding it. The caller sorts them.
SELECT group_concat(position) FROM (
    SELECT position FROM oncelog_partition_records
    WHERE lane = ? AND partition = ? AND position > ? AND position <= ? ORDER BY position LIMIT ?
);

-- name: records_at
-- Records at the given positions of a lane, in the order of the parameter.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, r.key, fingerprint, actor, client, client_sequence, partitions, body
FROM json_each(?2) AS n CROSS JOIN oncelog_records AS r ON place = (?1 << 48 | n.value) ORDER BY n.key;

-- name: partition_page
-- Records in a partition.
SELECT p.lane, p.position, r.sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_partition_records AS p CROSS JOIN oncelog_records AS r ON r.place = p.lane << 48 | p.position
WHERE p.lane = ?1 AND p.partition = ?2 AND p.position > ?3 AND p.position <= ?4 ORDER BY p.position LIMIT ?5;

-- name: brief_partition_page
-- Views of the records of a policy in a partition.
SELECT p.position, log_time_ms, actor, client, scope, key, partitions, CAST(body AS TEXT)
FROM oncelog_partition_records AS p CROSS JOIN oncelog_records AS r ON r.place = p.lane << 48 | p.position
WHERE p.lane = ?1 AND p.partition = ?2 AND p.position > ?3 AND p.position <= ?4 AND policy = ?6 ORDER BY p.position LIMIT ?5;

-- name: brief_lane_page
SELECT place & 281474976710655, log_time_ms, actor, client, scope, key, partitions, CAST(body AS TEXT)
FROM oncelog_records WHERE place > (?1 << 48 | ?2) AND place <= (?1 << 48 | ?3) AND policy = ?5 ORDER BY place LIMIT ?4;

-- name: briefs_at
SELECT place & 281474976710655, log_time_ms, actor, client, scope, r.key, partitions, CAST(body AS TEXT)
FROM json_each(?2) AS n CROSS JOIN oncelog_records AS r ON place = (?1 << 48 | n.value) WHERE policy = ?3 ORDER BY n.key;

-- name: stream_page
-- Records of a stream, ordered by sequence.
SELECT s.lane, s.position, r.sequence, log_time_ms, height, policy, r.scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_stream_records AS s CROSS JOIN oncelog_records AS r ON r.place = s.lane << 48 | s.position
WHERE s.lane = ?1 AND s.scope = ?2 AND s.sequence > ?3 AND s.sequence <= ?4 ORDER BY s.sequence LIMIT ?5;

-- name: internal_page
-- Audit and restore records of all lanes, ordered by log time. A page has at most `limit` records from each lane.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, r.key, fingerprint, actor, client, client_sequence, partitions, body
FROM json_each(?1) AS n CROSS JOIN oncelog_records AS r ON r.place IN (
    SELECT i.place FROM oncelog_records AS i INDEXED BY oncelog_records_internal
    WHERE i.place > (n.value << 48 | ?2 ->> n.key) AND i.place <= (n.value << 48 | ?3 ->> n.key)
        AND i.policy >= 'oncelog.' AND i.policy < 'oncelog/' AND i.policy IN ('oncelog.audit', 'oncelog.restore')
    ORDER BY i.place LIMIT ?4
)
ORDER BY log_time_ms, r.place LIMIT ?4;

-- name: count_internal
-- Audit and restore records, counted from their index.
SELECT count(*) FROM oncelog_records INDEXED BY oncelog_records_internal
WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy IN ('oncelog.audit', 'oncelog.restore');

-- name: count_audit
SELECT count(*) FROM oncelog_records INDEXED BY oncelog_records_internal
WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy = 'oncelog.audit';

-- name: evidence
-- Records with everything that their hashes cover.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body, salt, body_hash
FROM oncelog_records WHERE place > (?1 << 48 | ?2) AND place <= (?1 << 48 | ?3) ORDER BY place;

-- name: scoped_positions
-- Positions of the records of a scope between two positions.
SELECT place & 281474976710655 FROM oncelog_records
WHERE place > (?1 << 48 | ?2) AND place <= (?1 << 48 | ?3) AND scope = ?4 AND sequence > 0 ORDER BY place;

-- name: entity_page
-- Live entities of a scope, sorted by key. A blob is greater than every text, so an empty blob as the end does not
-- limit the page.
SELECT key, value, version, expires_at_ms, erased FROM oncelog_entities
WHERE lane = ?1 AND scope = ?2 AND key > ?3 AND key >= ?4 AND key < iif(?5 = '', x'', ?5)
    AND (expires_at_ms IS NULL OR expires_at_ms > ?6)
ORDER BY key;

-- name: row_page
-- Rows of all tables of a scope, sorted by table and row.
SELECT table_name, row_id, state FROM oncelog_rows
WHERE lane = ? AND scope = ? AND (table_name, row_id) > (?, ?) ORDER BY table_name, row_id;

-- name: row_page_of_table
SELECT table_name, row_id, state FROM oncelog_rows
WHERE lane = ? AND scope = ? AND table_name = ? AND row_id > ? ORDER BY row_id;

-- name: relationship_page
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = ?1 AND scope = ?2 AND (resource, relation, subject) > (?3, ?4, ?5)
ORDER BY resource, relation, subject LIMIT ?6;

-- name: relationship_page_of_resource
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = ?1 AND scope = ?2 AND resource = ?7 AND (resource, relation, subject) > (?3, ?4, ?5)
ORDER BY resource, relation, subject LIMIT ?6;

-- name: relationship_page_of_relation
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = ?1 AND scope = ?2 AND resource = ?7 AND relation = ?8 AND (resource, relation, subject) > (?3, ?4, ?5)
ORDER BY resource, relation, subject LIMIT ?6;

-- name: relationship_page_of_subject
SELECT resource, relation, subject, version FROM oncelog_relationships INDEXED BY oncelog_relationships_subject
WHERE lane = ?1 AND scope = ?2 AND subject = ?5 AND (resource, relation) > (?3, ?4)
    AND ?7 IN ('', resource) AND ?8 IN ('', relation)
ORDER BY resource, relation LIMIT ?6;

-- name: member_page
-- Members of a stream, each with its acknowledged sequence and its effective role.
SELECT m.member, coalesce(a.sequence, 0), m.is_owner = 1 OR r.owners IS NULL FROM oncelog_members AS m
LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member
WHERE m.lane = ? AND m.scope = ? AND m.member > ? ORDER BY m.member LIMIT ?;

-- name: membership_page
-- Streams of a member, each with its newest sequence, and the member's acknowledged sequence and effective role.
SELECT m.scope, coalesce(s.sequence, 0), coalesce(a.sequence, 0), m.is_owner = 1 OR r.owners IS NULL
FROM oncelog_members AS m INDEXED BY oncelog_members_member
LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
LEFT JOIN oncelog_streams AS s ON s.lane = m.lane AND s.scope = m.scope
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member
WHERE m.member = ? AND m.scope > ? AND m.scope >= ? AND m.scope < ? ORDER BY m.scope LIMIT ?;

-- name: oldest_members
-- The first members to join some streams, up to a number per stream.
SELECT m.scope, m.member, m.joined, m.is_owner, a.sequence FROM json_each(?1) AS n
CROSS JOIN oncelog_members AS m INDEXED BY oncelog_members_joined ON m.lane = n.value AND m.scope = ?2 ->> n.key
    AND m.joined IN (
        SELECT o.joined FROM oncelog_members AS o INDEXED BY oncelog_members_joined
        WHERE o.lane = n.value AND o.scope = ?2 ->> n.key ORDER BY o.joined LIMIT ?3
    )
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member;

-- name: member_changes
-- Member changes of a lane after a cursor, with the current state of each member.
SELECT c.revision, c.scope, c.member, c.kind, m.member IS NOT NULL, coalesce(a.sequence, 0),
    m.is_owner = 1 OR r.owners IS NULL
FROM oncelog_member_changes AS c INDEXED BY oncelog_member_changes_revision
LEFT JOIN oncelog_rosters AS r ON r.lane = c.lane AND r.scope = c.scope
LEFT JOIN oncelog_members AS m ON m.lane = c.lane AND m.scope = c.scope AND m.member = c.member
LEFT JOIN oncelog_acknowledged AS a ON a.lane = c.lane AND a.scope = c.scope AND a.member = c.member
WHERE c.lane = ? AND (c.revision, c.scope, c.member, c.kind) > (?, ?, ?, ?) ORDER BY c.revision, c.scope, c.member, c.kind LIMIT ?;

-- name: bodies
-- Records that are about to be erased, as in `evidence`.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, r.key, fingerprint, actor, client, client_sequence, partitions, body, salt, body_hash
FROM json_each(?2) AS n CROSS JOIN oncelog_records AS r ON place = (?1 << 48 | n.value) WHERE body IS NOT NULL ORDER BY n.key;

-- name: erase
-- Keeps only the hash of the body. Padding with zeros preserves the size of the row.
UPDATE oncelog_records SET body_hash = ?3, salt = NULL, body = NULL,
    padding = zeroblob(length(body) + coalesce(length(padding), 0) - 20) WHERE place = (?1 << 48 | ?2);

-- name: bytes_of_values
-- How many bytes of these values tenants were charged for.
SELECT coalesce(sum(length(e.value)), 0) FROM oncelog_entities AS e JOIN oncelog_lanes AS l ON l.lane = e.lane
WHERE e.lane = ? AND e.scope = ? AND e.version IN (SELECT value FROM json_each(?)) AND e.key IN (SELECT value FROM json_each(?)) AND (e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms);

-- name: bytes_of_all_values
SELECT coalesce(sum(length(e.value)), 0) FROM oncelog_entities AS e JOIN oncelog_lanes AS l ON l.lane = e.lane
WHERE e.lane = ? AND e.scope = ? AND e.version IN (SELECT value FROM json_each(?)) AND (e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms);

-- name: erase_values
-- Erases the values that a record set and that no later record has replaced, by the keys of its operations.
UPDATE oncelog_entities SET value = x'', erased = 1
WHERE lane = ? AND scope = ? AND version IN (SELECT value FROM json_each(?)) AND key IN (SELECT value FROM json_each(?));

-- name: erase_all_values
-- Like `erase_values`, for a record whose body does not determine its keys.
UPDATE oncelog_entities SET value = x'', erased = 1 WHERE lane = ? AND scope = ? AND version IN (SELECT value FROM json_each(?));

-- name: record_estimate
SELECT coalesce(max(id), 0) FROM oncelog_records;

-- name: records_of_keys
-- Identities of the records with the given keys (in upper-case hex), in a range of commits. The identity includes the
-- client only if clients number their writes.
SELECT policy, scope, CASE WHEN client_sequence > 0 THEN client ELSE '' END, key FROM oncelog_records
WHERE id > ? AND id <= ? AND hex(key) IN (SELECT value FROM json_each(?));

-- name: segments
SELECT segment, level, keys FROM oncelog_key_segments ORDER BY segment;

-- name: jobs
SELECT level, target, sources, keys, cursor FROM oncelog_key_jobs ORDER BY level;

-- name: find_runs
-- For each hash, the only run of a segment that can contain it.
SELECT h.value, (SELECT keys FROM oncelog_key_runs WHERE segment = :segment AND last >= h.value ORDER BY last LIMIT 1)
FROM json_each(:hashes) AS h;

-- name: runs_after
-- The next runs of a segment.
SELECT last, keys FROM oncelog_key_runs WHERE segment = ? AND last > ? ORDER BY last LIMIT ?;

-- name: drop_runs
-- Runs of a segment whose keys have all been merged into another segment.
DELETE FROM oncelog_key_runs WHERE segment = ? AND last <= ?;

-- name: start_sealing
UPDATE oncelog_lanes SET sealing_position = ? WHERE lane = ?;

-- name: end_sealing
UPDATE oncelog_lanes SET sealed_position = max(sealed_position, sealing_position), sealing_position = 0;

-- name: add_segment
INSERT INTO oncelog_key_segments (segment, level, keys) VALUES (?, ?, ?);

-- name: drop_segments
DELETE FROM oncelog_key_segments WHERE segment IN (SELECT value FROM json_each(?));

-- name: save_job
INSERT INTO oncelog_key_jobs (level, target, sources, keys, cursor) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (level) DO UPDATE SET cursor = excluded.cursor;

-- name: end_job
DELETE FROM oncelog_key_jobs WHERE level = ?;

-- name: all_evidence
-- All records with everything that their hashes cover, whatever their lane and position.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body, salt, body_hash
FROM oncelog_records ORDER BY place;

-- name: last_place
SELECT max(place) FROM oncelog_records WHERE place <= ?;

-- name: log_time_at
SELECT log_time_ms FROM oncelog_records WHERE place = ? << 48 | ?;

-- name: missing_partition_record
-- A record that a partition should list but does not.
SELECT r.place >> 48, r.place & ((1 << 48) - 1), p.value FROM oncelog_records AS r CROSS JOIN json_each(r.partitions) AS p
WHERE NOT EXISTS (
    SELECT 1 FROM oncelog_partition_records AS i
    WHERE i.lane = r.place >> 48 AND i.partition = p.value AND i.position = r.place & ((1 << 48) - 1)
) ORDER BY r.place LIMIT 1;

-- name: extra_partition_record
-- A place that a partition lists although its record is not in the partition.
SELECT i.lane, i.position, i.partition FROM oncelog_partition_records AS i
WHERE NOT EXISTS (
    SELECT 1 FROM oncelog_records AS r CROSS JOIN json_each(r.partitions) AS p
    WHERE r.place = i.lane << 48 | i.position AND p.value = i.partition
) LIMIT 1;

-- name: all_stream_records
SELECT lane, scope, sequence, position FROM oncelog_stream_records ORDER BY lane, scope, sequence;

-- name: missing_stream_record
SELECT r.place >> 48, r.place & ((1 << 48) - 1), r.scope FROM oncelog_records AS r
WHERE r.sequence > 0 AND NOT EXISTS (
    SELECT 1 FROM oncelog_stream_records AS i
    WHERE i.lane = r.place >> 48 AND i.scope = r.scope AND i.sequence = r.sequence AND i.position = r.place & ((1 << 48) - 1)
) ORDER BY r.place LIMIT 1;

-- name: extra_stream_record
SELECT i.lane, i.position, i.scope FROM oncelog_stream_records AS i
WHERE NOT EXISTS (
    SELECT 1 FROM oncelog_records AS r
    WHERE r.place = i.lane << 48 | i.position AND r.scope = i.scope AND r.sequence = i.sequence AND r.sequence > 0
) LIMIT 1;

-- name: all_identities
SELECT place, policy, scope, client, client_sequence, key FROM oncelog_records ORDER BY place;

-- name: identity_at
SELECT policy, scope, client, client_sequence, key FROM oncelog_records WHERE place = ?;

-- name: segment_runs
-- Runs of a segment, in order.
SELECT last, keys FROM oncelog_key_runs WHERE segment = ? ORDER BY last;

-- name: next_segment
SELECT min(segment) FROM oncelog_key_runs WHERE segment > ?;

-- name: lease_beyond
-- A lease with a fence that its lane has not assigned.
SELECT l.lane, l.policy, l.scope, l.key_hex, l.fence, coalesce(h.fence, 0)
FROM oncelog_leases AS l LEFT JOIN oncelog_lanes AS h ON h.lane = l.lane
WHERE l.fence < 0 OR max(l.fence, l.failed_fence) > coalesce(h.fence, 0) LIMIT 1;

-- name: rate_beyond
-- A bucket that is further from full than any rate allows.
SELECT r.lane, r.scope, r.actor, r.full_at_us, h.log_time_ms
FROM oncelog_rates AS r JOIN oncelog_lanes AS h ON h.lane = r.lane
WHERE r.full_at_us < 0 OR r.full_at_us - h.log_time_ms * 1000 > ? LIMIT 1;

-- name: indexed_tables
-- Oncelog's tables that have an index.
SELECT DISTINCT tbl_name FROM sqlite_schema
WHERE type = 'index' AND tbl_name LIKE 'oncelog\_%' ESCAPE '\'
ORDER BY tbl_name;

-- name: schema
-- Definitions of Oncelog's tables, and of everything that belongs to them or has a similar name. Indexes that SQLite
-- creates itself are part of the definition of their table.
SELECT type, name, tbl_name, sql FROM sqlite_schema
WHERE (name LIKE 'oncelog\_%' ESCAPE '\' OR tbl_name LIKE 'oncelog\_%' ESCAPE '\')
    AND NOT (type = 'index' AND sql IS NULL AND name LIKE 'sqlite\_autoindex\_%' ESCAPE '\')
ORDER BY type, name;

-- name: tables_of_others
-- The application's tables in the file.
SELECT name FROM sqlite_schema
WHERE type = 'table' AND name NOT LIKE 'oncelog\_%' ESCAPE '\' AND name <> '_oncelog_traces' AND name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY name;

-- name: find_traces
SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = '_oncelog_traces';

-- name: traces
SELECT t.position, t.traceparent, t.commit_traceparent
FROM json_each(?2) AS n CROSS JOIN _oncelog_traces AS t ON t.lane = ?1 AND t.position = n.value;

-- name: save_traces
INSERT OR REPLACE INTO _oncelog_traces (lane, position, traceparent, commit_traceparent) VALUES (?1, ?2, ?3, ?4);

-- name: expire_traces
DELETE FROM _oncelog_traces WHERE lane = ?1 AND position <= ?2;
