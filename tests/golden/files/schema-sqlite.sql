-- application_id: 1332634476
-- user_version: 0
-- encoding: UTF-8
-- page_size: 4096
-- journal_mode: wal
-- auto_vacuum: 0

-- index oncelog_member_changes_revision on oncelog_member_changes
CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision, scope, member, kind)

-- index oncelog_members_joined on oncelog_members
CREATE INDEX oncelog_members_joined ON oncelog_members (lane, scope, joined)

-- index oncelog_members_member on oncelog_members
CREATE INDEX oncelog_members_member ON oncelog_members (member, scope)

-- index oncelog_records_internal on oncelog_records
CREATE INDEX oncelog_records_internal ON oncelog_records (place) WHERE policy >= 'oncelog.' AND policy < 'oncelog/'

-- index oncelog_relationships_subject on oncelog_relationships
CREATE INDEX oncelog_relationships_subject ON oncelog_relationships (lane, scope, subject, resource, relation)

-- index sqlite_autoindex_oncelog_records_1 on oncelog_records
-- automatic

-- table oncelog_acknowledged on oncelog_acknowledged
CREATE TABLE oncelog_acknowledged (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, member)
) STRICT, WITHOUT ROWID

-- table oncelog_blocks on oncelog_blocks
CREATE TABLE oncelog_blocks (
    lane INTEGER NOT NULL,
    height INTEGER NOT NULL,
    first_position INTEGER NOT NULL,
    count INTEGER NOT NULL,
    log_time_ms INTEGER NOT NULL,
    previous BLOB NOT NULL,
    root BLOB NOT NULL,
    PRIMARY KEY (lane, height)
) STRICT, WITHOUT ROWID

-- table oncelog_clients on oncelog_clients
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
) STRICT, WITHOUT ROWID

-- table oncelog_consumers on oncelog_consumers
CREATE TABLE oncelog_consumers (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    consumer TEXT NOT NULL,
    cursor INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, consumer)
) STRICT, WITHOUT ROWID

-- table oncelog_entities on oncelog_entities
CREATE TABLE oncelog_entities (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL,
    expires_at_ms INTEGER, erased INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (lane, scope, key)
) STRICT, WITHOUT ROWID

-- table oncelog_floors on oncelog_floors
CREATE TABLE oncelog_floors (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    floor INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID

-- table oncelog_horizons on oncelog_horizons
CREATE TABLE oncelog_horizons (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    hlc TEXT NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID

-- table oncelog_key_jobs on oncelog_key_jobs
CREATE TABLE oncelog_key_jobs (
    level INTEGER PRIMARY KEY,
    target INTEGER NOT NULL,
    sources TEXT NOT NULL,
    keys INTEGER NOT NULL,
    cursor INTEGER NOT NULL
) STRICT

-- table oncelog_key_runs on oncelog_key_runs
CREATE TABLE oncelog_key_runs (
    segment INTEGER NOT NULL,
    last INTEGER NOT NULL,
    keys BLOB NOT NULL,
    PRIMARY KEY (segment, last)
) STRICT, WITHOUT ROWID

-- table oncelog_key_segments on oncelog_key_segments
CREATE TABLE oncelog_key_segments (
    segment INTEGER PRIMARY KEY,
    level INTEGER NOT NULL,
    keys INTEGER NOT NULL
) STRICT

-- table oncelog_lanes on oncelog_lanes
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
) STRICT

-- table oncelog_leases on oncelog_leases
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
) STRICT, WITHOUT ROWID

-- table oncelog_log on oncelog_log
CREATE TABLE oncelog_log (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    schema_version INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    lanes INTEGER NOT NULL,
    eviction_interval INTEGER NOT NULL,
    index_secret BLOB NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT

-- table oncelog_member_changes on oncelog_member_changes
CREATE TABLE oncelog_member_changes (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL,
    kind INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, member, kind)
) STRICT, WITHOUT ROWID

-- table oncelog_members on oncelog_members
CREATE TABLE oncelog_members (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL, joined INTEGER NOT NULL DEFAULT 0, is_owner INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (lane, scope, member)
) STRICT, WITHOUT ROWID

-- table oncelog_partition_records on oncelog_partition_records
CREATE TABLE oncelog_partition_records (
    lane INTEGER NOT NULL,
    partition TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (lane, partition, position)
) STRICT, WITHOUT ROWID

-- table oncelog_policies on oncelog_policies
CREATE TABLE oncelog_policies (
    name TEXT PRIMARY KEY,
    declaration TEXT NOT NULL
) STRICT, WITHOUT ROWID

-- table oncelog_rates on oncelog_rates
CREATE TABLE oncelog_rates (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    actor TEXT NOT NULL,
    full_at_us INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, actor)
) STRICT, WITHOUT ROWID

-- table oncelog_records on oncelog_records
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
) STRICT

-- table oncelog_relationships on oncelog_relationships
CREATE TABLE oncelog_relationships (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    resource TEXT NOT NULL,
    relation TEXT NOT NULL,
    subject TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, resource, relation, subject)
) STRICT, WITHOUT ROWID

-- table oncelog_rosters on oncelog_rosters
CREATE TABLE oncelog_rosters (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    members INTEGER NOT NULL,
    owners INTEGER,
    joined INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID

-- table oncelog_rows on oncelog_rows
CREATE TABLE oncelog_rows (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    table_name TEXT NOT NULL,
    row_id TEXT NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (lane, scope, table_name, row_id)
) STRICT, WITHOUT ROWID

-- table oncelog_state on oncelog_state
CREATE TABLE oncelog_state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    commits INTEGER NOT NULL,
    erasures INTEGER NOT NULL,
    clock_boot TEXT NOT NULL,
    clock_elapsed_ms INTEGER NOT NULL,
    clock_time_ms INTEGER NOT NULL
, moved TEXT, tenants TEXT, leaps TEXT, usage_version INTEGER NOT NULL DEFAULT 1) STRICT

-- table oncelog_stream_records on oncelog_stream_records
CREATE TABLE oncelog_stream_records (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, sequence)
) STRICT, WITHOUT ROWID

-- table oncelog_streams on oncelog_streams
CREATE TABLE oncelog_streams (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID

-- table oncelog_usage on oncelog_usage
CREATE TABLE oncelog_usage (
    lane INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    records INTEGER NOT NULL,
    full_at_us INTEGER NOT NULL,
    PRIMARY KEY (lane, tenant)
) STRICT, WITHOUT ROWID

