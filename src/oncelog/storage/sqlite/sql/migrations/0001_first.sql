-- The first schema. The prefix marks the log's tables: an application may add tables with other names.
--
-- A place is a lane and a position in one number (lane << 48 | position), so every key starts with the lane.
-- Names from callers are TEXT, identities and hashes BLOB. STRICT tables accept no other types.

-- Properties of the log in one row. Only the epoch and the version ever change.
CREATE TABLE oncelog_log (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    schema_version INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    lanes INTEGER NOT NULL,
    eviction_interval INTEGER NOT NULL,
    index_secret BLOB NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT;

-- State that every transaction changes. `commits` tells a process that another one has committed. The clock
-- columns belong to the newest commit: its time, and the machine's boot id and uptime at that time.
CREATE TABLE oncelog_state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    commits INTEGER NOT NULL,
    erasures INTEGER NOT NULL,
    clock_boot TEXT NOT NULL,
    clock_elapsed_ms INTEGER NOT NULL,
    clock_time_ms INTEGER NOT NULL
) STRICT;

CREATE TABLE oncelog_policies (
    name TEXT PRIMARY KEY,
    declaration TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Lane heads. Keys up to sealed_position are in segments; keys up to sealing_position are being sealed.
CREATE TABLE oncelog_lanes (
    lane INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,
    log_time_ms INTEGER NOT NULL,
    eviction_time_ms INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    height INTEGER NOT NULL,
    block_hash BLOB NOT NULL,
    sealed_position INTEGER NOT NULL DEFAULT 0,
    sealing_position INTEGER NOT NULL DEFAULT 0
) STRICT;

-- Records. An erased record has a body_hash instead of salt and body. The body is the last column, so that reading the
-- header does not read a long body.
--
-- Rows are in the order of their commits, not of their places, and keep their size when they are erased. SQLite
-- therefore only appends to this table and never moves a row to a different page. A move would leave a copy of the row
-- in a gap of the old page, and a later erasure of the row would not reach that copy (`secure_delete` does not
-- overwrite gaps).
CREATE TABLE oncelog_records (
    id INTEGER PRIMARY KEY,
    place INTEGER NOT NULL UNIQUE,
    sequence INTEGER NOT NULL,
    log_time_ms INTEGER NOT NULL,
    height INTEGER NOT NULL,
    client_sequence INTEGER NOT NULL,
    policy TEXT NOT NULL,
    scope TEXT NOT NULL,
    client TEXT NOT NULL,
    key BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    actor TEXT NOT NULL,
    partitions TEXT NOT NULL,
    salt BLOB,
    body_hash BLOB,
    body BLOB,
    padding BLOB
) STRICT;

CREATE TABLE oncelog_blocks (
    lane INTEGER NOT NULL,
    height INTEGER NOT NULL,
    first_position INTEGER NOT NULL,
    count INTEGER NOT NULL,
    log_time_ms INTEGER NOT NULL,
    previous BLOB NOT NULL,
    root BLOB NOT NULL,
    PRIMARY KEY (lane, height)
) STRICT, WITHOUT ROWID;

-- Positions of the records in a partition, in order.
CREATE TABLE oncelog_partition_records (
    lane INTEGER NOT NULL,
    partition TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (lane, partition, position)
) STRICT, WITHOUT ROWID;

-- Position of the record at each sequence of a stream.
CREATE TABLE oncelog_stream_records (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, sequence)
) STRICT, WITHOUT ROWID;

-- The key index (index.py): a keyed hash of each identity, and the place of its record. Keys are sorted inside a
-- segment, so that segments are written and merged from one end to the other. The index can be rebuilt from the
-- records.
CREATE TABLE oncelog_keys (
    segment INTEGER NOT NULL,
    hash INTEGER NOT NULL,
    place INTEGER NOT NULL,
    PRIMARY KEY (segment, hash, place)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_key_segments (
    segment INTEGER PRIMARY KEY,
    level INTEGER NOT NULL,
    keys INTEGER NOT NULL
) STRICT;

-- Jobs that fill segments: level 0 is filled from the newest records, other levels from the level below. The work is
-- complete up to the hash `cursor`.
CREATE TABLE oncelog_key_jobs (
    level INTEGER PRIMARY KEY,
    target INTEGER NOT NULL,
    sources TEXT NOT NULL,
    keys INTEGER NOT NULL,
    cursor INTEGER NOT NULL
) STRICT;

-- Side state, one table for each mapping of core.values.Snapshot.

CREATE TABLE oncelog_streams (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_clients (
    lane INTEGER NOT NULL,
    policy TEXT NOT NULL,
    scope TEXT NOT NULL,
    client TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    last_seen_ms INTEGER NOT NULL,
    last_key BLOB NOT NULL,
    last_fingerprint BLOB NOT NULL,
    PRIMARY KEY (lane, policy, scope, client)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_entities (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL,
    expires_at_ms INTEGER,
    PRIMARY KEY (lane, scope, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_relationships (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    resource TEXT NOT NULL,
    relation TEXT NOT NULL,
    subject TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, resource, relation, subject)
) STRICT, WITHOUT ROWID;

-- `state` is core.merge.Row in MessagePack: values and their stamps, whose clocks are unsigned 64-bit numbers.
CREATE TABLE oncelog_rows (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (lane, scope, table_name, row_id)
) STRICT, WITHOUT ROWID;

-- The key is in hexadecimal, so that one JSON array can hold many keys.
CREATE TABLE oncelog_leases (
    lane INTEGER NOT NULL,
    policy TEXT NOT NULL,
    scope TEXT NOT NULL,
    client TEXT NOT NULL,
    key_hex TEXT NOT NULL,
    fence INTEGER NOT NULL,
    holder TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    failed_fence INTEGER NOT NULL,
    failure BLOB NOT NULL,
    PRIMARY KEY (lane, policy, scope, client, key_hex)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_members (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL,
    PRIMARY KEY (lane, scope, member)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_acknowledged (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, member)
) STRICT, WITHOUT ROWID;

CREATE TABLE oncelog_consumers (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    consumer TEXT NOT NULL,
    cursor INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, consumer)
) STRICT, WITHOUT ROWID;
