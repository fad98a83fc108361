-- PostgreSQL statements, by name. queries/sql/queries.sql has the statements shared with SQLite. All keys or rows of a
-- batch are passed to one statement as arrays.

-- fragment: record_columns
-- The columns of a record, in the order of `decode_record`.
lane, position, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body;

-- fragment: view_columns
-- The columns of a record view (`RecordView`) after the position.
log_time_ms, actor, client, scope, key, partitions, body;

-- fragment: receipt_columns
-- The columns of a receipt, the fingerprint, and whether the record was erased.
lane, position, sequence, log_time_ms, height, client_sequence, fingerprint, body IS NULL;

-- fragment: head_columns
-- The columns of a lane's head (`LaneHead`).
lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash;

-- fragment: set_head
SET position = n.position, log_time_ms = n.log_time_ms, eviction_time_ms = n.eviction_time_ms,
    fence = n.fence, revision = n.revision, height = n.height, block_hash = n.block_hash;

-- fragment: log_schema
-- The schema that contains the log.
(SELECT relnamespace FROM pg_class WHERE oid = to_regclass('oncelog_log'));

-- fragment: now_ms
(extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- fragment: erase_entities
-- Erases the values of entities with one of the given versions. `o` is the row before the change.
UPDATE oncelog_entities AS e SET value = '', erased = 1 FROM oncelog_entities AS o, oncelog_lanes AS l
WHERE o.ctid = e.ctid AND l.lane = $1 AND e.lane = $1 AND e.scope = $2 AND e.version = ANY($3::bigint[]);

-- fragment: charged_bytes
-- How many bytes tenants were charged for the value of an entity.
CASE WHEN o.expires_at_ms IS NULL OR o.expires_at_ms > l.log_time_ms THEN octet_length(o.value) ELSE 0 END;

-- fragment: acknowledged_of_short_key
-- Acknowledged sequence of a member `m` with a short key.
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = m.lane AND a.scope = m.scope AND a.member = m.member AND a.digest IS NULL OFFSET 0
) AS a ON true;

-- fragment: acknowledged_of_long_key
-- The same for a long key.
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = m.lane AND a.digest = m.digest AND a.digest IS NOT NULL OFFSET 0
) AS a ON true;

-- fragment: measured_rows
-- Rows, each with its number and the bytes of the rows before it, for the limits of a page.
SELECT table_name, row_id, state FROM (
    SELECT table_name, row_id, state, row_number() OVER in_order AS number,
        sum(octet_length(state)) OVER in_order - octet_length(state) AS before;

-- fragment: short_rows
-- Rows of a scope with short keys.
SELECT table_name, row_id, state FROM oncelog_rows
WHERE digest IS NULL AND lane = $1 AND scope = $2;

-- fragment: long_rows
-- Rows of a scope with long keys.
SELECT table_name, row_id, state FROM oncelog_rows
WHERE digest IS NOT NULL AND lane = $1 AND left(scope, 64) = left($2, 64) AND scope = $2;

-- fragment: short_relationships
-- Relationships of a scope with short keys.
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE digest IS NULL AND lane = $1 AND scope = $2;

-- fragment: long_relationships
-- Relationships of a scope with long keys.
SELECT resource, relation, subject, version FROM oncelog_relationships
WHERE digest IS NOT NULL AND lane = $1 AND left(scope, 64) = left($2, 64) AND scope = $2;

-- name: is_there
-- Reads the catalog itself, because a session caches the result of looking up a name.
SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'oncelog_log' AND pg_table_is_visible(oid));

-- name: encoding
SELECT current_setting('server_encoding'), pg_is_in_recovery();

-- name: make_log
INSERT INTO oncelog_log (id, schema_version, epoch, lanes, eviction_interval, index_secret, created_ms)
VALUES (1, $1, $2, $3, $4, $5, $6);

-- name: make_state
INSERT INTO oncelog_state (id, erasures, confirmations, timeline)
VALUES (1, 0, 0, substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8));

-- name: make_lanes
INSERT INTO oncelog_lanes ({head_columns})
SELECT lane, 0, 0, 0, 0, 0, 0, $2 FROM generate_series(0, $1::integer) AS lane;

-- name: epoch
SELECT epoch FROM oncelog_log;

-- name: alone
-- Lock for creating or migrating a log, declaring policies, and moving a log into the database.
SELECT pg_advisory_xact_lock((1332634476::bigint << 32) | to_regnamespace(quote_ident(current_schema()))::oid::bigint);

-- name: time
SELECT {now_ms};

-- name: barrier
-- A write that changes nothing, in its own transaction. Its COMMIT makes everything before it in the write-ahead log
-- durable: on the disk, and on the standbys that the server waits for.
SELECT pg_logical_emit_message(true, 'oncelog', '');

-- name: server
-- A session's server, identified by its start time; whether its commits wait for standbys; and its timeline.
SELECT pg_postmaster_start_time(), current_setting('synchronous_standby_names') <> '',
    CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END;

-- name: timeline
SELECT timeline FROM oncelog_state;

-- name: set_timeline
UPDATE oncelog_state SET timeline = $1 WHERE timeline IS DISTINCT FROM $1;

-- name: positions
SELECT lane, position FROM oncelog_lanes;

-- name: state
-- The state of the log after the lanes have been locked. The statement has a new snapshot, so it sees all commits of
-- earlier lock holders, and it reads the clock after the wait for the locks.
SELECT {now_ms}, s.erasures, s.confirmations, c.elapsed_ms, c.time_ms,
    s.tenants, s.leaps, g.epoch,
    l.lane, l.position, l.log_time_ms, l.eviction_time_ms, l.fence, l.revision, l.height, l.block_hash
FROM oncelog_lanes AS l CROSS JOIN oncelog_state AS s CROSS JOIN oncelog_log AS g LEFT JOIN oncelog_clocks AS c ON c.boot = $2
WHERE l.lane = ANY($1::integer[]);

-- name: look_at_state
-- Like `state`, without lanes.
SELECT {now_ms}, s.erasures, s.confirmations, c.elapsed_ms, c.time_ms
FROM oncelog_state AS s LEFT JOIN oncelog_clocks AS c ON c.boot = $1;

-- name: save_clock
INSERT INTO oncelog_clocks (boot, elapsed_ms, time_ms) VALUES ($1, $2, $3)
ON CONFLICT (boot) DO UPDATE SET elapsed_ms = excluded.elapsed_ms, time_ms = excluded.time_ms;

-- name: forget_clocks
DELETE FROM oncelog_clocks;

-- name: move
-- NULL, unless `oncelog move` has not yet copied the log completely.
SELECT move FROM oncelog_state;

-- name: count_confirmation
UPDATE oncelog_state SET confirmations = confirmations + 1;

-- name: touch_state
-- Writes an identical version of the row, which fails if the disk is full.
UPDATE oncelog_state SET erasures = erasures;

-- name: database_size
SELECT pg_database_size(current_database());

-- name: count_stream_records
SELECT count(*) FROM oncelog_records WHERE lane = $1 AND scope = $2 AND sequence > $3 AND sequence > 0;

-- name: sequence_before
SELECT sequence FROM oncelog_records WHERE lane = $1 AND scope = $2 AND sequence <= $3 AND sequence > 0
ORDER BY sequence DESC LIMIT 1 OFFSET $4;

-- name: sequence_after
SELECT max(sequence) FROM (
    SELECT sequence FROM oncelog_records WHERE lane = $1 AND scope = $2 AND sequence > $3 AND sequence > 0
    ORDER BY sequence LIMIT $4
) AS found;

-- name: set_tenants
UPDATE oncelog_state SET tenants = $1, usage_version = $2;

-- name: lock_usage
-- A tenant may have streams in several lanes, so a transaction locks the rows of its tenants before it counts. All
-- transactions lock first the lanes and then these rows in the same order, which prevents deadlocks.
SELECT tenant, bytes, records, full_at_us FROM oncelog_usage WHERE lane = 0 AND tenant = ANY($1::text[])
ORDER BY tenant FOR NO KEY UPDATE;

-- name: record_sizes
-- Sizes of records, with the columns that determine their tenants.
SELECT position, sequence, policy, actor, scope, partitions, octet_length(body),
    octet_length(scope) + octet_length(client) + octet_length(key) + octet_length(actor)
FROM oncelog_records WHERE lane = $1 AND position > $2 AND position <= $3 ORDER BY position LIMIT $4;

-- name: state_sizes
-- Sizes of entities, relationships and rows, by scope. Expired entities are not counted, because they may have been
-- deleted already.
SELECT e.scope, count(*), sum(octet_length(e.key))::bigint, sum(octet_length(e.value))::bigint FROM oncelog_entities AS e
JOIN oncelog_lanes AS l ON l.lane = e.lane WHERE e.expires_at_ms IS NULL OR e.expires_at_ms > l.log_time_ms
GROUP BY e.lane, e.scope
UNION ALL
SELECT scope, count(*), sum(octet_length(resource) + octet_length(relation) + octet_length(subject))::bigint, 0
FROM oncelog_relationships GROUP BY lane, scope
UNION ALL
SELECT scope, count(*), sum(octet_length(table_name) + octet_length(row_id))::bigint, sum(octet_length(state))::bigint
FROM oncelog_rows GROUP BY lane, scope;

-- name: member_sizes
-- Sizes of current and past members, by stream.
SELECT scope, count(*), sum(octet_length(member))::bigint FROM (
    SELECT lane, scope, member FROM oncelog_members
    UNION SELECT lane, scope, member FROM oncelog_member_changes WHERE kind = 1
) AS known GROUP BY lane, scope;

-- name: begin_usage
INSERT INTO oncelog_usage (lane, tenant, bytes, records, full_at_us)
SELECT 0, tenant, bytes, records, 0 FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS n (tenant, bytes, records);

-- name: set_bytes
UPDATE oncelog_usage AS u SET bytes = n.bytes FROM unnest($1::text[], $2::bigint[]) AS n (tenant, bytes)
WHERE u.lane = 0 AND u.tenant = n.tenant;

-- name: forget_usage
DELETE FROM oncelog_usage WHERE lane = 0 AND tenant = ANY($1::text[]);

-- name: count_erasure
UPDATE oncelog_state SET erasures = erasures + 1;

-- name: is_declared
SELECT EXISTS (SELECT FROM oncelog_policies WHERE name = $1 AND declaration = $2);

-- name: lanes
-- Heads of the lanes that have been written to.
SELECT {head_columns}
FROM oncelog_lanes WHERE revision > 0 ORDER BY lane;

-- name: keys
-- Receipts of the records with the given hashes, oldest first, so that the newest one wins.
SELECT {receipt_columns},
    policy, scope, CASE WHEN client_sequence > 0 THEN client ELSE '' END, key
FROM oncelog_records WHERE key_hash = ANY($1::bigint[]) ORDER BY lane, position;

-- name: sequences
SELECT {receipt_columns},
    policy, scope, client, client_sequence
FROM oncelog_records WHERE sequence_hash = ANY($1::bigint[]) ORDER BY lane, position;

-- name: save
-- Saves the records, blocks and heads of a batch in one round trip.
WITH records AS (
    INSERT INTO oncelog_records (lane, position, sequence, log_time_ms, height, client_sequence, key_hash, sequence_hash,
        policy, scope, client, key, fingerprint, actor, partitions, salt, body)
    SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
        $8::bigint[], $9::text[], $10::text[], $11::text[], $12::bytea[], $13::bytea[], $14::text[], $15::text[],
        $16::bytea[], $17::bytea[])
), partitions AS (
    INSERT INTO oncelog_partition_records (lane, partition, position)
    SELECT * FROM unnest($18::integer[], $19::text[], $20::bigint[])
), blocks AS (
    INSERT INTO oncelog_blocks (lane, height, first_position, count, log_time_ms, previous, root)
    SELECT * FROM unnest($21::integer[], $22::bigint[], $23::bigint[], $24::bigint[], $25::bigint[], $26::bytea[], $27::bytea[])
)
UPDATE oncelog_lanes AS l {set_head}
FROM unnest($28::integer[], $29::bigint[], $30::bigint[], $31::bigint[], $32::bigint[], $33::bigint[], $34::bigint[], $35::bytea[])
    AS n ({head_columns})
WHERE l.lane = n.lane;

-- name: save_lanes
-- Saves the heads of a batch without records.
UPDATE oncelog_lanes AS l {set_head}
FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bytea[])
    AS n ({head_columns})
WHERE l.lane = n.lane;

-- name: lane_page
-- Records of a lane, ordered by position.
SELECT {record_columns}
FROM oncelog_records WHERE lane = $1 AND position > $2 AND position <= $3 ORDER BY position LIMIT $4;

-- name: internal_page
-- Audit and restore records of all lanes, ordered by log time.
SELECT found.* FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) AS n (lane, after, upto) CROSS JOIN LATERAL (
    SELECT {record_columns}
    FROM oncelog_records AS r
    WHERE r.lane = n.lane AND r.position > n.after AND r.position <= n.upto
        AND policy >= 'oncelog.' AND policy < 'oncelog/' AND policy IN ('oncelog.audit', 'oncelog.restore')
    ORDER BY r.position LIMIT $4
) AS found ORDER BY found.log_time_ms, found.lane, found.position LIMIT $4;

-- name: count_internal
-- Number of audit and restore records, counted from their index.
SELECT count(*) FROM oncelog_records
WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy IN ('oncelog.audit', 'oncelog.restore');

-- name: count_audit
SELECT count(*) FROM oncelog_records WHERE policy >= 'oncelog.' AND policy < 'oncelog/' AND policy = 'oncelog.audit';

-- name: partition_positions
-- Positions as one string, as on SQLite.
SELECT string_agg(position::text, ',') FROM (
    SELECT position FROM oncelog_partition_records
    WHERE lane = $1 AND partition = $2 AND position > $3 AND position <= $4 ORDER BY position LIMIT $5
) AS found;

-- name: records_at
-- Records at the given positions of a lane, in order.
SELECT {record_columns}
FROM oncelog_records WHERE lane = $1 AND position = ANY($2::bigint[]) ORDER BY position;

-- name: partition_page
-- Records in a partition.
SELECT r.lane, r.position, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions, body
FROM oncelog_partition_records AS p JOIN oncelog_records AS r ON r.lane = p.lane AND r.position = p.position
WHERE p.lane = $1 AND p.partition = $2 AND p.position > $3 AND p.position <= $4 ORDER BY p.position LIMIT $5;

-- name: stream_page
-- Records of a stream, ordered by sequence.
SELECT {record_columns}
FROM oncelog_records
WHERE lane = $1 AND scope = $2 AND sequence > $3 AND sequence <= $4 AND sequence > 0 ORDER BY sequence LIMIT $5;

-- name: brief_lane_page
-- Views of the records of a policy.
SELECT position, {view_columns}
FROM oncelog_records WHERE lane = $1 AND position > $2 AND position <= $3 AND policy = $5 ORDER BY position LIMIT $4;

-- name: brief_partition_page
SELECT p.position, {view_columns}
FROM oncelog_partition_records AS p JOIN oncelog_records AS r ON r.lane = p.lane AND r.position = p.position
WHERE p.lane = $1 AND p.partition = $2 AND p.position > $3 AND p.position <= $4 AND policy = $6 ORDER BY p.position LIMIT $5;

-- name: briefs_at
SELECT position, {view_columns}
FROM oncelog_records WHERE lane = $1 AND position = ANY($2::bigint[]) AND policy = $3 ORDER BY position;

-- name: roots
-- Number of existing blocks. Random salts make every root unique.
SELECT count(*) FROM unnest($1::integer[], $2::bigint[], $3::bytea[]) AS n (lane, height, root)
JOIN oncelog_blocks AS b ON b.lane = n.lane AND b.height = n.height AND b.root = n.root;

-- name: evidence
-- Records with everything that their hashes cover.
SELECT {record_columns}, salt, body_hash
FROM oncelog_records WHERE lane = $1 AND position > $2 AND position <= $3 ORDER BY position;

-- name: standing
-- All records under a hash, oldest first.
SELECT {record_columns}
FROM oncelog_records WHERE key_hash = $1 ORDER BY lane, position;

-- name: record_estimate
SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'oncelog_records'::regclass;

-- name: page_end
-- Last position and count of the next records of a lane.
SELECT max(position), count(*) FROM (
    SELECT position FROM oncelog_records WHERE lane = $1 AND position > $2 ORDER BY position LIMIT $3
) AS page;

-- name: records_of_keys
-- Identities of the records with the given keys. The client is part of an identity only if clients number their writes.
SELECT policy, scope, CASE WHEN client_sequence > 0 THEN client ELSE '' END, key FROM oncelog_records
WHERE lane = $1 AND position > $2 AND position <= $3 AND key = ANY($4::bytea[]);

-- name: bodies
-- Records that are about to be erased, as in `evidence`.
SELECT {record_columns}, salt, body_hash FROM oncelog_records
WHERE lane = $1 AND position = ANY($2::bigint[]) AND body IS NOT NULL ORDER BY position;

-- name: scoped_positions
-- Positions of the records of a scope between two positions.
SELECT position FROM oncelog_records WHERE lane = $1 AND position > $2 AND position <= $3 AND scope = $4 AND sequence > 0 ORDER BY position;

-- name: entity_page
-- Unexpired entities of a scope, sorted by key, up to a number of rows ($7) and of bytes ($8). The page has the first
-- entity whatever its length, and one more entity than fits, which shows that there are more. As in all listings here,
-- short and long keys are in different indexes (0005_long_names.sql).
SELECT key, value, version, expires_at_ms, erased FROM (
    SELECT key, value, version, expires_at_ms, erased, row_number() OVER by_key AS number,
        sum(octet_length(value)) OVER by_key - octet_length(value) AS before
    FROM (
        (
            SELECT key, value, version, expires_at_ms, erased FROM oncelog_entities
            WHERE digest IS NULL AND lane = $1 AND scope = $2 AND key > $3 AND key >= $4 AND ($5 = '' OR key < $5)
                AND (expires_at_ms IS NULL OR expires_at_ms > $6)
            ORDER BY key LIMIT $7
        ) UNION ALL (
            SELECT key, value, version, expires_at_ms, erased FROM oncelog_entities
            WHERE digest IS NOT NULL AND lane = $1 AND left(scope, 64) = left($2, 64) AND scope = $2
                AND left(key, 64) >= left($3, 64) AND left(key, 64) >= left($4, 64)
                AND key > $3 AND key >= $4 AND ($5 = '' OR key < $5)
                AND (expires_at_ms IS NULL OR expires_at_ms > $6)
            ORDER BY left(key, 64), key LIMIT $7
        )
        ORDER BY key LIMIT $7
    ) AS found
    WINDOW by_key AS (ORDER BY key)
) AS measured
WHERE number <= 2 OR before <= $8 ORDER BY key;

-- name: row_page
-- Rows of all tables of a scope, sorted by table and row, with the limits of `entity_page`.
{measured_rows}
    FROM (
        (
            {short_rows} AND (table_name, row_id) > ($3, $4)
            ORDER BY table_name, row_id LIMIT $5
        ) UNION ALL (
            {long_rows}
                AND left(table_name, 64) >= left($3, 64) AND (table_name, row_id) > ($3, $4)
            ORDER BY left(table_name, 64), table_name, row_id LIMIT $5
        )
        ORDER BY table_name, row_id LIMIT $5
    ) AS found
    WINDOW in_order AS (ORDER BY table_name, row_id)
) AS measured
WHERE number <= 2 OR before <= $6 ORDER BY table_name, row_id;

-- name: row_page_of_table
{measured_rows}
    FROM (
        (
            {short_rows} AND table_name = $3 AND row_id > $4
            ORDER BY row_id LIMIT $5
        ) UNION ALL (
            {long_rows}
                AND left(table_name, 64) = left($3, 64) AND table_name = $3
                AND left(row_id, 64) >= left($4, 64) AND row_id > $4
            ORDER BY left(row_id, 64), row_id LIMIT $5
        )
        ORDER BY row_id LIMIT $5
    ) AS found
    WINDOW in_order AS (ORDER BY row_id)
) AS measured
WHERE number <= 2 OR before <= $6 ORDER BY row_id;

-- name: relationship_page
(
    {short_relationships} AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY resource, relation, subject LIMIT $6
) UNION ALL (
    {long_relationships}
        AND left(resource, 64) >= left($3, 64) AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY left(resource, 64), resource, relation, subject LIMIT $6
)
ORDER BY resource, relation, subject LIMIT $6;

-- name: relationship_page_of_resource
(
    {short_relationships} AND resource = $7 AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY resource, relation, subject LIMIT $6
) UNION ALL (
    {long_relationships}
        AND left(resource, 64) = left($7, 64) AND resource = $7
        AND left(relation, 64) >= CASE WHEN $3 = $7 THEN left($4, 64) ELSE '' END
        AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY left(relation, 64), relation, subject LIMIT $6
)
ORDER BY resource, relation, subject LIMIT $6;

-- name: relationship_page_of_relation
(
    {short_relationships} AND resource = $7 AND relation = $8
        AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY resource, relation, subject LIMIT $6
) UNION ALL (
    {long_relationships}
        AND left(resource, 64) = left($7, 64) AND resource = $7 AND left(relation, 64) = left($8, 64) AND relation = $8
        AND left(subject, 64) >= CASE WHEN $3 = $7 AND $4 = $8 THEN left($5, 64) ELSE '' END
        AND (resource, relation, subject) > ($3, $4, $5)
    ORDER BY left(subject, 64), subject LIMIT $6
)
ORDER BY resource, relation, subject LIMIT $6;

-- name: relationship_page_of_subject
(
    {short_relationships} AND subject = $5 AND (resource, relation) > ($3, $4)
        AND ($7 = '' OR resource = $7) AND ($8 = '' OR relation = $8)
    ORDER BY resource, relation LIMIT $6
) UNION ALL (
    {long_relationships}
        AND left(subject, 64) = left($5, 64) AND subject = $5
        AND left(resource, 64) >= left($3, 64) AND (resource, relation) > ($3, $4)
        AND ($7 = '' OR resource = $7) AND ($8 = '' OR relation = $8)
    ORDER BY left(resource, 64), resource, relation LIMIT $6
)
ORDER BY resource, relation LIMIT $6;

-- name: erase
UPDATE oncelog_records AS r SET body_hash = n.body_hash, salt = NULL, body = NULL
FROM unnest($1::integer[], $2::bigint[], $3::bytea[]) AS n (lane, position, body_hash)
WHERE r.lane = n.lane AND r.position = n.position;

-- name: erase_values
-- Erases the values that a record set and that no later record has replaced, by the keys of its operations. Returns how
-- many bytes tenants were charged for them.
{erase_entities}
    AND e.digest IS NULL AND e.key = ANY($4::text[])
RETURNING {charged_bytes};

-- name: erase_long_values
-- Like `erase_values`, by the digests of long keys.
{erase_entities}
    AND e.digest IS NOT NULL AND e.digest = ANY($4::bytea[])
RETURNING {charged_bytes};

-- name: erase_all_values
-- Like `erase_values`, for records whose bodies do not determine their keys.
{erase_entities}
    AND (e.digest IS NULL OR (e.digest IS NOT NULL AND left(e.scope, 64) = left($2, 64)))
RETURNING {charged_bytes};

-- name: notify
SELECT pg_notify($1, $2);

-- name: begin_shared
INSERT INTO oncelog_shared (token, ended) VALUES ($1, $2);

-- name: end_shared
DELETE FROM oncelog_shared WHERE token = $1;

-- name: is_shared
SELECT count(*) FROM oncelog_shared WHERE token = $1;

-- name: limit_shared
-- Lowers the limit for this transaction, so that an application that is cut off inside it does not block other
-- sessions.
SELECT set_config('idle_in_transaction_session_timeout', $1, true)
FROM (SELECT current_setting('idle_in_transaction_session_timeout')::interval AS now) AS s
WHERE now = interval '0' OR now > $1::text::interval;

-- name: be_durable
SELECT set_config('synchronous_commit', 'on', true)
WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write');

-- name: limit_idle
SELECT set_config('idle_in_transaction_session_timeout', $1, true);

-- name: limit_lock
SELECT set_config('lock_timeout', $1, true);

-- name: lock_key
SELECT pg_advisory_xact_lock($1);

-- name: try_lock_key
SELECT pg_try_advisory_xact_lock($1);

-- name: lock_lanes
SELECT 1 FROM oncelog_lanes WHERE lane = ANY($1::integer[]) ORDER BY lane FOR NO KEY UPDATE;

-- Statements for `oncelog verify` and other commands that inspect a log. SQLite has statements with the same names.

-- name: all_evidence
-- All records with everything that their hashes cover, and with the hashes by which they are found. `body_at` reads
-- long bodies one by one.
SELECT lane, position, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, client_sequence, partitions,
    CASE WHEN octet_length(body) <= $1 THEN body END, salt, body_hash, octet_length(body), key_hash, sequence_hash
FROM oncelog_records ORDER BY lane, position;

-- name: body_at
SELECT body FROM oncelog_records WHERE lane = $1 AND position = $2;

-- name: log_time_at
SELECT log_time_ms FROM oncelog_records WHERE lane = $1 AND position = $2;

-- name: missing_partition_record
-- A record that is not found under one of its partitions. The count makes the planner use the whole key of the index.
SELECT r.lane, r.position, p.value
FROM oncelog_records AS r CROSS JOIN LATERAL json_array_elements_text(r.partitions::json) AS p (value)
WHERE 0 = (
    SELECT count(*) FROM oncelog_partition_records AS i
    WHERE i.lane = r.lane AND i.partition = p.value COLLATE "C" AND i.position = r.position
) ORDER BY r.lane, r.position LIMIT 1;

-- name: extra_partition_record
-- An index row with a partition that its record is not in.
SELECT i.lane, i.position, i.partition FROM oncelog_partition_records AS i
WHERE NOT EXISTS (
    SELECT FROM oncelog_records AS r CROSS JOIN LATERAL json_array_elements_text(r.partitions::json) AS p (value)
    WHERE r.lane = i.lane AND r.position = i.position AND p.value COLLATE "C" = i.partition
) LIMIT 1;

-- name: all_stream_records
-- In the order of the index oncelog_records_stream.
SELECT lane, scope, sequence, position FROM oncelog_records WHERE sequence > 0 ORDER BY lane, scope, sequence;

-- name: all_key_hashes
-- From the index oncelog_records_key alone, without its records.
SELECT key_hash FROM oncelog_records WHERE key_hash IS NOT NULL ORDER BY key_hash;

-- name: all_sequence_hashes
SELECT sequence_hash FROM oncelog_records WHERE sequence_hash IS NOT NULL ORDER BY sequence_hash;

-- name: standing_by_sequence
SELECT {record_columns}
FROM oncelog_records WHERE sequence_hash = $1 ORDER BY lane, position;

-- name: member_page
-- The members of a stream, each with its acknowledged sequence and whether it acts as an owner.
(
    SELECT m.member, coalesce(a.sequence, 0), (m.is_owner = 1 OR r.owners IS NULL) FROM oncelog_members AS m
    LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
    {acknowledged_of_short_key}
    WHERE m.digest IS NULL AND m.lane = $1 AND m.scope = $2 AND m.member > $3 ORDER BY m.member LIMIT $4
) UNION ALL (
    SELECT m.member, coalesce(a.sequence, 0), (m.is_owner = 1 OR r.owners IS NULL) FROM oncelog_members AS m
    LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
    {acknowledged_of_long_key}
    WHERE m.digest IS NOT NULL AND m.lane = $1 AND left(m.scope, 64) = left($2, 64) AND m.scope = $2
        AND left(m.member, 64) >= left($3, 64) AND m.member > $3
    ORDER BY left(m.member, 64), m.member LIMIT $4
)
ORDER BY 1 LIMIT $4;

-- name: membership_page
-- The streams of a member, each with its newest sequence, the member's acknowledged sequence and whether the member
-- acts as an owner.
(
    SELECT m.scope, coalesce(s.sequence, 0), coalesce(a.sequence, 0), (m.is_owner = 1 OR r.owners IS NULL)
    FROM oncelog_members AS m
    LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
    LEFT JOIN oncelog_streams AS s ON s.lane = m.lane AND s.scope = m.scope
    {acknowledged_of_short_key}
    WHERE m.digest IS NULL AND m.member = $1 AND m.scope > $2 AND m.scope >= $3 AND m.scope < $4
    ORDER BY m.scope LIMIT $5
) UNION ALL (
    SELECT m.scope, coalesce(s.sequence, 0), coalesce(a.sequence, 0), (m.is_owner = 1 OR r.owners IS NULL)
    FROM oncelog_members AS m
    LEFT JOIN oncelog_rosters AS r ON r.lane = m.lane AND r.scope = m.scope
    LEFT JOIN oncelog_streams AS s ON s.lane = m.lane AND s.scope = m.scope
    {acknowledged_of_long_key}
    WHERE m.digest IS NOT NULL AND left(m.member, 64) = left($1, 64) AND m.member = $1
        AND left(m.scope, 64) >= left($2, 64) AND left(m.scope, 64) >= left($3, 64)
        AND m.scope > $2 AND m.scope >= $3 AND m.scope < $4
    ORDER BY left(m.scope, 64), m.scope LIMIT $5
)
ORDER BY 1 LIMIT $5;

-- name: oldest_members
-- The first members to join some streams, with long names and short ones.
SELECT n.scope, m.member, m.joined, m.is_owner, coalesce(a.sequence, la.sequence)
FROM unnest($1::integer[], $2::text[]) AS n (lane, scope)
CROSS JOIN LATERAL (
    (
        SELECT member, joined, is_owner, digest FROM oncelog_members AS m
        WHERE m.digest IS NULL AND m.lane = n.lane AND m.scope = n.scope ORDER BY joined LIMIT $3
    ) UNION ALL (
        SELECT member, joined, is_owner, digest FROM oncelog_members AS m
        WHERE m.digest IS NOT NULL AND m.lane = n.lane AND left(m.scope, 64) = left(n.scope, 64) AND m.scope = n.scope
        ORDER BY joined LIMIT $3
    )
) AS m
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = n.lane AND a.scope = n.scope AND a.member = m.member AND a.digest IS NULL OFFSET 0
) AS a ON true
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = n.lane AND a.digest = m.digest AND a.digest IS NOT NULL OFFSET 0
) AS la ON true;

-- name: member_changes
-- Member changes of a lane after a cursor, with the current state of each member. A key is either short or long, so
-- only one of each table's two joins finds a row.
SELECT c.revision, c.scope, c.member, c.kind, (m.member IS NOT NULL OR lm.member IS NOT NULL),
    coalesce(a.sequence, la.sequence, 0), (coalesce(m.is_owner, lm.is_owner) = 1 OR r.owners IS NULL)
FROM oncelog_member_changes AS c
LEFT JOIN oncelog_rosters AS r ON r.lane = c.lane AND r.scope = c.scope
LEFT JOIN LATERAL (
    SELECT member, is_owner FROM oncelog_members AS m
    WHERE m.lane = c.lane AND m.scope = c.scope AND m.member = c.member AND m.digest IS NULL OFFSET 0
) AS m ON true
LEFT JOIN LATERAL (
    SELECT member, is_owner FROM oncelog_members AS m
    WHERE m.lane = c.lane AND m.digest = c.digest AND m.digest IS NOT NULL
        AND left(m.scope, 64) = left(c.scope, 64) AND left(m.member, 64) = left(c.member, 64) OFFSET 0
) AS lm ON true
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = c.lane AND a.scope = c.scope AND a.member = c.member AND a.digest IS NULL OFFSET 0
) AS a ON true
LEFT JOIN LATERAL (
    SELECT sequence FROM oncelog_acknowledged AS a
    WHERE a.lane = c.lane AND a.digest = c.digest AND a.digest IS NOT NULL OFFSET 0
) AS la ON true
WHERE c.lane = $1 AND c.revision >= $2 AND (c.revision, c.scope, c.member, c.kind) > ($2, $3, $4, $5)
ORDER BY c.revision, c.scope, c.member, c.kind LIMIT $6;

-- name: lease_beyond
-- A lease with a fence that its lane has not assigned.
SELECT l.lane, l.policy, l.scope, l.key_hex, l.fence, coalesce(h.fence, 0)
FROM oncelog_leases AS l LEFT JOIN oncelog_lanes AS h ON h.lane = l.lane
WHERE l.fence < 0 OR greatest(l.fence, l.failed_fence) > coalesce(h.fence, 0) LIMIT 1;

-- name: rate_beyond
-- A bucket that is further from full than any rate allows.
SELECT r.lane, r.scope, r.actor, r.full_at_us, h.log_time_ms
FROM oncelog_rates AS r JOIN oncelog_lanes AS h ON h.lane = r.lane
WHERE r.full_at_us < 0 OR r.full_at_us::numeric - h.log_time_ms::numeric * 1000 > $1 LIMIT 1;

-- name: newest_time
SELECT coalesce(max(log_time_ms), 0) FROM oncelog_lanes;

-- name: columns
-- The columns of Oncelog's tables in the log's schema. UNLOGGED is an error, because a server crash empties such
-- tables.
SELECT c.relname::text, a.attname::text,
    concat_ws(' ', format_type(a.atttypid, a.atttypmod), 'COLLATE ' || l.collname, CASE WHEN a.attnotnull THEN 'NOT NULL' END,
        CASE WHEN c.relpersistence <> 'p' THEN 'UNLOGGED' END)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_collation AS l ON l.oid = a.attcollation AND l.collname <> 'default'
WHERE c.relnamespace = {log_schema}
    AND c.relkind = 'r' AND c.relname LIKE 'oncelog\_%'
ORDER BY c.relname COLLATE "C", a.attname COLLATE "C";

-- name: indexes
SELECT x.relname::text, c.relname::text, substring(pg_get_indexdef(i.indexrelid, 0, true) FROM ' USING (.*)'),
    i.indisunique, i.indisvalid AND i.indisready AND i.indislive
FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid JOIN pg_class AS c ON c.oid = i.indrelid
WHERE c.relnamespace = {log_schema}
    AND c.relname LIKE 'oncelog\_%' ORDER BY x.relname COLLATE "C";

-- name: additions
-- Triggers, rules and row security policies on Oncelog's tables, and views and other objects with their prefix. The
-- migrations create none of them.
WITH ours AS (
    SELECT oid, relname::text AS name, relkind AS kind FROM pg_class
    WHERE relnamespace = {log_schema} AND relname LIKE 'oncelog\_%'
)
SELECT 'trigger', t.tgname::text || ' on ' || o.name FROM ours AS o JOIN pg_trigger AS t ON t.tgrelid = o.oid WHERE NOT t.tgisinternal
UNION ALL
SELECT 'rule', r.rulename::text || ' on ' || o.name FROM ours AS o JOIN pg_rewrite AS r ON r.ev_class = o.oid WHERE o.kind = 'r'
UNION ALL
SELECT 'policy', p.polname::text || ' on ' || o.name FROM ours AS o JOIN pg_policy AS p ON p.polrelid = o.oid
UNION ALL
SELECT CASE o.kind WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view' WHEN 'f' THEN 'foreign table' ELSE 'partitioned table' END, o.name
FROM ours AS o WHERE o.kind IN ('v', 'm', 'f', 'p');

-- name: sizes
SELECT c.relname::text, pg_total_relation_size(c.oid) FROM pg_class AS c
WHERE c.relnamespace = {log_schema}
    AND c.relkind = 'r' AND c.relname LIKE 'oncelog\_%' ORDER BY c.relname COLLATE "C";

-- name: waits_for_standby
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep');

-- name: waits_for_long
-- Whether an Oncelog session has been waiting for a standby for longer than a given number of seconds.
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE application_name = 'oncelog' AND datname = current_database()
    AND wait_event = 'SyncRep' AND clock_timestamp() - state_change > $1::double precision * interval '1 second'
);

-- name: server_settings
-- Settings with the values that new sessions get, and the version.
SELECT name, reset_val FROM pg_settings WHERE name = ANY($1::text[]);

-- name: standbys
-- Servers that receive the write-ahead log. The columns are NULL for users without the role pg_monitor.
SELECT coalesce(application_name, ''), coalesce(state, ''), coalesce(sync_state, '') FROM pg_stat_replication;

-- name: archiver
-- Times of the newest archived segment, and of the newest failure.
SELECT (extract(epoch FROM last_archived_time) * 1000)::bigint, (extract(epoch FROM last_failed_time) * 1000)::bigint
FROM pg_stat_archiver;

-- name: session_count
SELECT sum(numbackends)::bigint FROM pg_stat_database;

-- name: own_transaction
SELECT pg_current_xact_id()::text;

-- name: is_behind_all
-- Whether no session can still see the row versions that a transaction has replaced, so that VACUUM removes them.
SELECT NOT EXISTS (
    SELECT FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
    AND (datname = current_database() OR datname IS NULL) AND age(backend_xmin) >= age($1::text::xid)
) AND NOT EXISTS (SELECT FROM pg_prepared_xacts WHERE age(transaction) >= age($1::text::xid))
AND NOT EXISTS (SELECT FROM pg_replication_slots WHERE xmin IS NOT NULL AND age(xmin) >= age($1::text::xid));

-- name: trace_rights
-- Whether the table exists, the rights on it that the user lacks, and whether the user may create it.
SELECT to_regclass('_oncelog_traces') IS NOT NULL, coalesce((
    SELECT array_agg(n.name ORDER BY n.number) FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS n (name, number)
    WHERE NOT has_table_privilege(to_regclass('_oncelog_traces'), n.name)
), ARRAY[]::text[]), coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), quote_ident(current_schema()), quote_ident(current_user);

-- name: find_traces
SELECT 1 WHERE to_regclass('_oncelog_traces') IS NOT NULL;

-- name: traces
SELECT position, traceparent, commit_traceparent FROM _oncelog_traces WHERE lane = $1 AND position = ANY ($2::bigint[]);

-- name: save_traces
INSERT INTO _oncelog_traces (lane, position, traceparent, commit_traceparent)
SELECT * FROM unnest($1::integer[], $2::bigint[], $3::text[], $4::text[])
ON CONFLICT (lane, position) DO UPDATE
SET traceparent = excluded.traceparent, commit_traceparent = excluded.commit_traceparent;

-- name: expire_traces
DELETE FROM _oncelog_traces AS t USING unnest($1::integer[], $2::bigint[]) AS n (lane, position)
WHERE t.lane = n.lane AND t.position <= n.position;
