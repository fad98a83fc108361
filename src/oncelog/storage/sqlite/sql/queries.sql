-- Every statement that the store runs, by name. `:needs` is a JSON array of arrays, each the key of one row.

-- name: schema_version
-- Alone, because a later version may have other columns beside it.
SELECT schema_version FROM oncelog_log;

-- name: log
-- What the log was made with.
SELECT schema_version, epoch, lanes, eviction_interval, index_secret, created_ms FROM oncelog_log;

-- name: make_log
INSERT INTO oncelog_log (id, schema_version, epoch, lanes, eviction_interval, index_secret, created_ms)
VALUES (1, :schema_version, :epoch, :lanes, :eviction_interval, :index_secret, :created_ms);

-- name: make_state
INSERT INTO oncelog_state (id, commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms)
VALUES (1, 0, 0, '', 0, 0);

-- name: set_schema_version
UPDATE oncelog_log SET schema_version = ?;

-- name: set_epoch
UPDATE oncelog_log SET epoch = ?;

-- name: state
SELECT commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms FROM oncelog_state;

-- name: state_and_move
-- The same, whom to count for (storage/tenants.py), and where the log has been moved to (moved_marker.py). In the row that every transaction reads anyway.
SELECT commits, erasures, clock_boot, clock_elapsed_ms, clock_time_ms, tenants, moved, leaps FROM oncelog_state;

-- name: leaps
SELECT leaps FROM oncelog_state;

-- name: set_leaps
UPDATE oncelog_state SET leaps = ?;

-- name: set_floors
-- Of all streams that the log has.
INSERT INTO oncelog_floors (lane, scope, floor) SELECT lane, scope, ? FROM oncelog_streams WHERE true
ON CONFLICT (lane, scope) DO UPDATE SET floor = excluded.floor;

-- name: block_before_leap
-- The newest block of a lane up to a height: the one before a leap.
SELECT first_position + count - 1, height FROM oncelog_blocks WHERE lane = ? AND height <= ? ORDER BY height DESC LIMIT 1;

-- name: count_stream_records
SELECT count(*) FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence > ?;

-- name: sequence_before
SELECT sequence FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence <= ?
ORDER BY sequence DESC LIMIT 1 OFFSET ?;

-- name: sequence_after
SELECT max(sequence) FROM (
    SELECT sequence FROM oncelog_stream_records WHERE lane = ? AND scope = ? AND sequence > ? ORDER BY sequence LIMIT ?
);

-- name: tenants
SELECT tenants, usage_version FROM oncelog_state;

-- name: set_tenants
-- With a commit of its own: who has the log open reads everything anew.
UPDATE oncelog_state SET tenants = ?, usage_version = ?, commits = commits + 1;

-- name: usage
SELECT tenant, bytes, records, full_at_us FROM oncelog_usage ORDER BY tenant;

-- name: record_sizes
-- What records have, and what decides for which tenants they count.
SELECT place, sequence, policy, actor, scope, partitions, length(body),
    length(CAST(scope AS BLOB)) + length(CAST(client AS BLOB)) + length(key) + length(CAST(actor AS BLOB))
FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place LIMIT ?;

-- name: state_sizes
-- What entities, relationships and rows have, by scope. Expired entities may have been deleted already, and count nothing.
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
-- What members have, by stream, past members too.
SELECT scope, count(*), sum(length(CAST(member AS BLOB))) FROM (
    SELECT lane, scope, member FROM oncelog_members
    UNION SELECT lane, scope, member FROM oncelog_member_changes WHERE kind = 1
) GROUP BY lane, scope;

-- name: begin_usage
INSERT INTO oncelog_usage (lane, tenant, bytes, records, full_at_us) VALUES (0, ?, ?, ?, 0);

-- name: set_bytes
UPDATE oncelog_usage SET bytes = ? WHERE lane = 0 AND tenant = ?;

-- name: forget_usage
DELETE FROM oncelog_usage WHERE lane = 0 AND tenant = ?;

-- name: moved
SELECT moved FROM oncelog_state;

-- name: set_moved
-- With a commit of its own: who has the log open reads everything anew.
UPDATE oncelog_state SET commits = commits + 1, moved = ?;

-- name: save_state
UPDATE oncelog_state SET commits = commits + 1, clock_boot = ?, clock_elapsed_ms = ?, clock_time_ms = ?;

-- name: count_erasure
UPDATE oncelog_state SET commits = commits + 1, erasures = erasures + 1;

-- name: touch_state
-- A commit that adds nothing. (SQLite writes nothing for a row that stays the same.)
UPDATE oncelog_state SET commits = commits + 1;

-- name: policies
SELECT name, declaration FROM oncelog_policies ORDER BY name;

-- name: declare_policy
INSERT INTO oncelog_policies (name, declaration) VALUES (?, ?);

-- name: lanes
-- All heads, with how far their keys have been sealed.
SELECT lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash, sealed_position, sealing_position
FROM oncelog_lanes ORDER BY lane;

-- name: save_lane
INSERT INTO oncelog_lanes (lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (lane) DO UPDATE SET
    position = excluded.position, log_time_ms = excluded.log_time_ms, eviction_time_ms = excluded.eviction_time_ms,
    fence = excluded.fence, revision = excluded.revision, height = excluded.height, block_hash = excluded.block_hash;

-- name: touch_lane
-- Something in the lane has changed that is neither a record nor in its head.
UPDATE oncelog_lanes SET revision = revision + 1 WHERE lane = ?;

-- name: save_block
INSERT INTO oncelog_blocks (lane, height, first_position, count, log_time_ms, previous, root) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: block
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks WHERE lane = ? AND height = ?;

-- name: blocks
-- The blocks of a lane above a height, in order.
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks
WHERE lane = ? AND height > ? ORDER BY height LIMIT ?;

-- name: remembered
-- What is remembered of the records at some places.
SELECT place, sequence, log_time_ms, height, client_sequence, policy, scope, client, r.key, fingerprint, body IS NULL
FROM json_each(:places) AS n CROSS JOIN oncelog_records AS r ON place = n.value;

-- name: identities
-- The identities of the records between two places, for the key index.
SELECT place, policy, scope, client, client_sequence, key FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place;

-- name: lane_page
-- Records of a lane, by place.
SELECT place, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place LIMIT ?;

-- name: partition_positions
-- As one text: every row that is handed over costs as much as finding it. Ordered by the check of whoever reads it.
SELECT group_concat(position) FROM (
    SELECT position FROM oncelog_partition_records
    WHERE lane = ? AND partition = ? AND position > ? AND position <= ? ORDER BY position LIMIT ?
);

-- name: records_at
-- Records at some places, in the order asked for.
SELECT place, sequence, log_time_ms, height, policy, scope, r.key, fingerprint, actor, client, client_sequence, partitions, body
FROM json_each(:places) AS n CROSS JOIN oncelog_records AS r ON place = n.value ORDER BY n.key;

-- name: partition_page
-- Records that touch a partition.
SELECT place, r.sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_partition_records AS p CROSS JOIN oncelog_records AS r ON r.place = p.lane << 48 | p.position
WHERE p.lane = ? AND p.partition = ? AND p.position > ? AND p.position <= ? ORDER BY p.position LIMIT ?;

-- name: brief_partition_page
-- What readers are shown of the records of a policy that touch a partition.
SELECT p.position, log_time_ms, actor, client, scope, key, partitions, CAST(body AS TEXT)
FROM oncelog_partition_records AS p CROSS JOIN oncelog_records AS r ON r.place = p.lane << 48 | p.position
WHERE p.lane = ? AND p.partition = ? AND p.position > ? AND p.position <= ? AND policy = ? ORDER BY p.position LIMIT ?;

-- name: brief_lane_page
SELECT place & 281474976710655, log_time_ms, actor, client, scope, key, partitions, CAST(body AS TEXT)
FROM oncelog_records WHERE place > ? AND place <= ? AND policy = ? ORDER BY place LIMIT ?;

-- name: briefs_at
SELECT place & 281474976710655, log_time_ms, actor, client, scope, r.key, partitions, CAST(body AS TEXT)
FROM json_each(?) AS n CROSS JOIN oncelog_records AS r ON place = n.value WHERE policy = ? ORDER BY n.key;

-- name: stream_page
-- Records of a stream, by sequence.
SELECT place, r.sequence, log_time_ms, height, policy, r.scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_stream_records AS s CROSS JOIN oncelog_records AS r ON r.place = s.lane << 48 | s.position
WHERE s.lane = ? AND s.scope = ? AND s.sequence > ? AND s.sequence <= ? ORDER BY s.sequence LIMIT ?;

-- name: internal_page
-- Audit and restore records of a lane, by place.
SELECT place, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_records INDEXED BY oncelog_records_internal
WHERE place > ? AND place <= ? AND policy >= 'oncelog.' AND policy < 'oncelog/' AND policy IN ('oncelog.audit', 'oncelog.restore')
ORDER BY place LIMIT ?;

-- name: count_internal
-- Audit and restore records, by the index that finds them.
SELECT count(*) FROM oncelog_records INDEXED BY oncelog_records_internal
WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy IN ('oncelog.audit', 'oncelog.restore');

-- name: count_audit
SELECT count(*) FROM oncelog_records INDEXED BY oncelog_records_internal
WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy = 'oncelog.audit';

-- name: lane_head
SELECT position FROM oncelog_lanes WHERE lane = ?;

-- name: stream_head
SELECT sequence FROM oncelog_streams WHERE lane = ? AND scope = ?;

-- name: evidence
-- Records with all that their hashes are made of.
SELECT place, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body, salt, body_hash
FROM oncelog_records WHERE place > ? AND place <= ? ORDER BY place;

-- name: scoped_positions
-- Which of the records between two places are of a scope.
SELECT place & 281474976710655 FROM oncelog_records WHERE place > ? AND place <= ? AND scope = ? AND sequence > 0 ORDER BY place;

-- name: entity_page
-- Entities of a scope by key, without those that have expired. An empty bound is none.
SELECT key, value, version, expires_at_ms, erased FROM oncelog_entities
WHERE lane = ? AND scope = ? AND key > ? AND key >= ? AND key < ? AND (expires_at_ms IS NULL OR expires_at_ms > ?)
ORDER BY key;

-- name: entity_page_to_the_end
SELECT key, value, version, expires_at_ms, erased FROM oncelog_entities
WHERE lane = ? AND scope = ? AND key > ? AND key >= ? AND (expires_at_ms IS NULL OR expires_at_ms > ?) ORDER BY key;

-- name: row_page
-- Rows of all tables of a scope, by table and row.
SELECT table_name, row_id, state FROM oncelog_rows
WHERE lane = ? AND scope = ? AND (table_name, row_id) > (?, ?) ORDER BY table_name, row_id;

-- name: row_page_of_table
SELECT table_name, row_id, state FROM oncelog_rows
WHERE lane = ? AND scope = ? AND table_name = ? AND row_id > ? ORDER BY row_id;

-- name: relationship_page
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = :lane AND scope = :scope AND (resource, relation, subject) > (:after_resource, :after_relation, :after_subject)
ORDER BY resource, relation, subject LIMIT :limit;

-- name: relationship_page_of_resource
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = :lane AND scope = :scope AND resource = :resource
    AND (resource, relation, subject) > (:after_resource, :after_relation, :after_subject)
ORDER BY resource, relation, subject LIMIT :limit;

-- name: relationship_page_of_relation
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE lane = :lane AND scope = :scope AND resource = :resource AND relation = :relation
    AND (resource, relation, subject) > (:after_resource, :after_relation, :after_subject)
ORDER BY resource, relation, subject LIMIT :limit;

-- name: relationship_page_of_subject
SELECT resource, relation, subject, version FROM oncelog_relationships INDEXED BY oncelog_relationships_subject
WHERE lane = :lane AND scope = :scope AND subject = :subject AND (resource, relation) > (:after_resource, :after_relation)
    AND :resource IN ('', resource) AND :relation IN ('', relation)
ORDER BY resource, relation LIMIT :limit;

-- name: member_page
-- The members of a stream, each with what it has acknowledged and whether it acts as an owner.
SELECT m.member, coalesce(a.sequence, 0), m.is_owner = 1 OR r.owners IS NULL FROM oncelog_members AS m
LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member
WHERE m.lane = ? AND m.scope = ? AND m.member > ? ORDER BY m.member LIMIT ?;

-- name: membership_page
-- The streams of a member, each with its newest sequence, what the member has acknowledged and whether it acts as an owner.
SELECT m.scope, coalesce(s.sequence, 0), coalesce(a.sequence, 0), m.is_owner = 1 OR r.owners IS NULL
FROM oncelog_members AS m INDEXED BY oncelog_members_member
LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
LEFT JOIN oncelog_streams AS s ON s.lane = m.lane AND s.scope = m.scope
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member
WHERE m.member = ? AND m.scope > ? AND m.scope >= ? AND m.scope < ? ORDER BY m.scope LIMIT ?;

-- name: oldest_members
-- The members of some streams that joined first, at most as many of each as the second parameter says.
SELECT m.scope, m.member, m.joined, m.is_owner, a.sequence FROM json_each(?1) AS n
CROSS JOIN oncelog_members AS m INDEXED BY oncelog_members_joined ON m.lane = n.value ->> 0 AND m.scope = n.value ->> 1
    AND m.joined IN (
        SELECT o.joined FROM oncelog_members AS o INDEXED BY oncelog_members_joined
        WHERE o.lane = n.value ->> 0 AND o.scope = n.value ->> 1 ORDER BY o.joined LIMIT ?2
    )
LEFT JOIN oncelog_acknowledged AS a ON a.lane = m.lane AND a.scope = m.scope AND a.member = m.member;

-- name: member_changes
-- Who has come, gone or acknowledged something in a lane since a revision, as it stands now.
SELECT c.revision, c.scope, c.member, c.kind, m.member IS NOT NULL, coalesce(a.sequence, 0),
    m.is_owner = 1 OR r.owners IS NULL
FROM oncelog_member_changes AS c INDEXED BY oncelog_member_changes_revision
LEFT JOIN oncelog_rosters AS r ON r.lane = c.lane AND r.scope = c.scope
LEFT JOIN oncelog_members AS m ON m.lane = c.lane AND m.scope = c.scope AND m.member = c.member
LEFT JOIN oncelog_acknowledged AS a ON a.lane = c.lane AND a.scope = c.scope AND a.member = c.member
WHERE c.lane = ? AND (c.revision, c.scope, c.member, c.kind) > (?, ?, ?, ?) ORDER BY c.revision, c.scope, c.member, c.kind LIMIT ?;

-- name: body
-- What is about to be erased, and whose it is.
SELECT salt, body, sequence, policy, actor, scope, partitions, fingerprint FROM oncelog_records WHERE place = ?;

-- name: erase
-- Only the hash of the body stays, and as many zeros as keep the row at its size.
UPDATE oncelog_records SET body_hash = ?, salt = NULL, body = NULL,
    padding = zeroblob(length(body) + coalesce(length(padding), 0) - 20) WHERE place = ?;

-- name: bytes_of_values
-- The bytes of these values that tenants are charged for.
SELECT coalesce(sum(length(e.value)), 0) FROM oncelog_entities AS e JOIN oncelog_lanes AS l ON l.lane = e.lane
WHERE e.lane = ? AND e.scope = ? AND e.version IN (SELECT value FROM json_each(?)) AND e.key IN (SELECT value FROM json_each(?)) AND (e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms);

-- name: bytes_of_all_values
SELECT coalesce(sum(length(e.value)), 0) FROM oncelog_entities AS e JOIN oncelog_lanes AS l ON l.lane = e.lane
WHERE e.lane = ? AND e.scope = ? AND e.version IN (SELECT value FROM json_each(?)) AND (e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms);

-- name: erase_values
-- Erase the values that a record set and that no later record replaced, by the keys of its operations.
UPDATE oncelog_entities SET value = x'', erased = 1
WHERE lane = ? AND scope = ? AND version IN (SELECT value FROM json_each(?)) AND key IN (SELECT value FROM json_each(?));

-- name: erase_all_values
-- The same for a record whose body does not name its keys.
UPDATE oncelog_entities SET value = x'', erased = 1 WHERE lane = ? AND scope = ? AND version IN (SELECT value FROM json_each(?));

-- name: all_consumers
SELECT scope, consumer, cursor FROM oncelog_consumers ORDER BY scope, consumer;

-- name: scopes
SELECT scope FROM oncelog_streams;

-- name: client_names
SELECT policy, scope, client FROM oncelog_clients;

-- name: leases_of_key
SELECT policy, scope, client FROM oncelog_leases WHERE key_hex = ? LIMIT ?;

-- name: newest_id
SELECT coalesce(max(id), 0) FROM oncelog_records;

-- name: records_of_keys
-- Identities of the records with some keys, given in upper-case hex, among some that were committed one after the other. Only where clients number
-- their writes is the client part of the identity.
SELECT policy, scope, CASE WHEN client_sequence > 0 THEN client ELSE '' END, key FROM oncelog_records
WHERE id > ? AND id <= ? AND hex(key) IN (SELECT value FROM json_each(?));

-- name: segments
SELECT segment, level, keys FROM oncelog_key_segments ORDER BY segment;

-- name: jobs
SELECT level, target, sources, keys, cursor FROM oncelog_key_jobs ORDER BY level;

-- name: find_runs
-- For each of some hashes the run of a segment that has it, if any has.
SELECT h.value, (SELECT keys FROM oncelog_key_runs WHERE segment = :segment AND last >= h.value ORDER BY last LIMIT 1)
FROM json_each(:hashes) AS h;

-- name: runs_after
-- The next runs of a segment.
SELECT last, keys FROM oncelog_key_runs WHERE segment = ? AND last > ? ORDER BY last LIMIT ?;

-- name: drop_runs
-- Those of a segment whose keys have all been merged into another.
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

-- name: all_blocks
-- Those of all lanes, in order.
SELECT lane, height, first_position, count, log_time_ms, previous, root FROM oncelog_blocks ORDER BY lane, height;

-- name: all_evidence
-- All records with all that their hashes are made of, wherever they claim to be.
SELECT place >> 48, place & 281474976710655, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body, salt, body_hash
FROM oncelog_records ORDER BY place;

-- name: last_place
SELECT max(place) FROM oncelog_records WHERE place <= ?;

-- name: log_time_at
SELECT log_time_ms FROM oncelog_records WHERE place = ? << 48 | ?;

-- name: all_partition_records
SELECT lane, partition, position FROM oncelog_partition_records ORDER BY lane, partition, position;

-- name: missing_partition_record
-- A record that is not found under a partition it touches.
SELECT r.place >> 48, r.place & ((1 << 48) - 1), p.value FROM oncelog_records AS r CROSS JOIN json_each(r.partitions) AS p
WHERE NOT EXISTS (
    SELECT 1 FROM oncelog_partition_records AS i
    WHERE i.lane = r.place >> 48 AND i.partition = p.value AND i.position = r.place & ((1 << 48) - 1)
) ORDER BY r.place LIMIT 1;

-- name: extra_partition_record
-- A place that is found under a partition its record does not touch.
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
-- The runs of a segment, in its order.
SELECT last, keys FROM oncelog_key_runs WHERE segment = ? ORDER BY last;

-- name: next_segment
SELECT min(segment) FROM oncelog_key_runs WHERE segment > ?;

-- name: floor_without_stream
SELECT f.lane, f.scope FROM oncelog_floors AS f
WHERE NOT EXISTS (SELECT 1 FROM oncelog_streams AS s WHERE s.lane = f.lane AND s.scope = f.scope) LIMIT 1;

-- name: member_without_stream
-- Somebody who is or was a member of a stream that nobody has opened.
SELECT m.lane, m.scope, m.member FROM (
    SELECT lane, scope, member FROM oncelog_members UNION ALL SELECT lane, scope, member FROM oncelog_member_changes
) AS m
WHERE NOT EXISTS (SELECT 1 FROM oncelog_streams AS s WHERE s.lane = m.lane AND s.scope = m.scope) LIMIT 1;

-- name: stream_of_nobody
-- A stream without records of which nobody has ever been a member.
SELECT s.lane, s.scope FROM oncelog_streams AS s WHERE s.sequence = 0
    AND NOT EXISTS (SELECT 1 FROM oncelog_members AS m WHERE m.lane = s.lane AND m.scope = s.scope)
    AND NOT EXISTS (SELECT 1 FROM oncelog_member_changes AS c WHERE c.lane = s.lane AND c.scope = s.scope) LIMIT 1;

-- name: bad_roster
-- A stream whose members, owners or numbers of joining differ from its roster, or that has no owner.
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
-- A change of a member that its lane has not come to.
SELECT c.lane, c.scope, c.member, c.revision, coalesce(h.revision, 0)
FROM oncelog_member_changes AS c LEFT JOIN oncelog_lanes AS h ON h.lane = c.lane
WHERE c.kind NOT IN (1, 2) OR c.revision < 1 OR c.revision > coalesce(h.revision, 0) LIMIT 1;

-- name: acknowledged_beyond
-- A member that has acknowledged what its stream does not have.
SELECT a.lane, a.scope, a.member, a.sequence, coalesce(s.sequence, 0)
FROM oncelog_acknowledged AS a LEFT JOIN oncelog_streams AS s ON s.lane = a.lane AND s.scope = a.scope
WHERE a.sequence < 0 OR a.sequence > coalesce(s.sequence, 0) LIMIT 1;

-- name: lease_beyond
-- A lease whose fence its lane has never given out.
SELECT l.lane, l.policy, l.scope, l.key_hex, l.fence, coalesce(h.fence, 0)
FROM oncelog_leases AS l LEFT JOIN oncelog_lanes AS h ON h.lane = l.lane
WHERE l.fence < 0 OR max(l.fence, l.failed_fence) > coalesce(h.fence, 0) LIMIT 1;

-- name: rate_beyond
-- A bucket that is further from being full than any rate lets it be.
SELECT r.lane, r.scope, r.actor, r.full_at_us, h.log_time_ms
FROM oncelog_rates AS r JOIN oncelog_lanes AS h ON h.lane = r.lane
WHERE r.full_at_us < 0 OR r.full_at_us - h.log_time_ms * 1000 > ? LIMIT 1;

-- name: usage_below
-- What nobody can have.
SELECT tenant FROM oncelog_usage WHERE bytes < 0 OR records < 0 OR full_at_us < 0 LIMIT 1;

-- name: indexed_tables
-- Oncelog's tables that have an index.
SELECT DISTINCT tbl_name FROM sqlite_schema
WHERE type = 'index' AND tbl_name LIKE 'oncelog\_%' ESCAPE '\'
ORDER BY tbl_name;

-- name: schema
-- Oncelog's tables as they were made, and everything that is on them or has such a name. Indexes that SQLite makes itself are part of a table's text.
SELECT type, name, tbl_name, sql FROM sqlite_schema
WHERE (name LIKE 'oncelog\_%' ESCAPE '\' OR tbl_name LIKE 'oncelog\_%' ESCAPE '\')
    AND NOT (type = 'index' AND sql IS NULL AND name LIKE 'sqlite\_autoindex\_%' ESCAPE '\')
ORDER BY type, name;
