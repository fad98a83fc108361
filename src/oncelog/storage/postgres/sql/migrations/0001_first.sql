-- The first version of the tables, in the schema that the connection's search_path selects. All Oncelog tables have the
-- same prefix, so that an application may keep other tables in the same schema.
--
-- Every key starts with the lane. Texts are compared byte by byte (COLLATE "C"), as in every other store, so that the
-- machine's locale does not affect the order. Identities, hashes and bodies are bytea.

-- The settings of the log. One row, of which only the epoch and the version ever change.
CREATE TABLE oncelog_log (
    id smallint PRIMARY KEY CHECK (id = 1),
    schema_version integer NOT NULL,
    epoch text NOT NULL,
    lanes integer NOT NULL,
    eviction_interval integer NOT NULL,
    index_secret bytea NOT NULL,
    created_ms bigint NOT NULL
);

-- State that all lanes share. Commits only read it: if every commit wrote the row, commits would wait for each other.
-- `move` describes a move that `oncelog move` has not completed, and is NULL otherwise.
CREATE TABLE oncelog_state (
    id smallint PRIMARY KEY CHECK (id = 1),
    erasures bigint NOT NULL,
    confirmations bigint NOT NULL,
    move text
);

-- Readings of the database's clock, each with the uptime of a machine (boot) that runs Oncelog.
CREATE TABLE oncelog_clocks (
    boot text COLLATE "C" PRIMARY KEY,
    elapsed_ms bigint NOT NULL,
    time_ms bigint NOT NULL
);

CREATE TABLE oncelog_policies (
    name text COLLATE "C" PRIMARY KEY,
    declaration text NOT NULL
);

-- Heads of lanes. A commit locks its lane's row before its first read and until the transaction ends. The order of
-- commits is therefore the order of positions, and a reader that follows positions misses no record. All rows exist
-- from the beginning.
CREATE TABLE oncelog_lanes (
    lane integer PRIMARY KEY,
    position bigint NOT NULL,
    log_time_ms bigint NOT NULL,
    eviction_time_ms bigint NOT NULL,
    fence bigint NOT NULL,
    revision bigint NOT NULL,
    height bigint NOT NULL,
    block_hash bytea NOT NULL
) WITH (fillfactor = 20);

-- Records, from which all other tables are derived. An erased record has a body_hash instead of salt and body. A lookup by
-- key or client sequence uses a keyed hash (key_hash.py), and is checked against the record.
CREATE TABLE oncelog_records (
    lane integer NOT NULL,
    position bigint NOT NULL,
    sequence bigint NOT NULL,
    log_time_ms bigint NOT NULL,
    height bigint NOT NULL,
    client_sequence bigint NOT NULL,
    key_hash bigint,
    sequence_hash bigint,
    policy text COLLATE "C" NOT NULL,
    scope text COLLATE "C" NOT NULL,
    client text COLLATE "C" NOT NULL,
    key bytea NOT NULL,
    fingerprint bytea NOT NULL,
    actor text COLLATE "C" NOT NULL,
    partitions text COLLATE "C" NOT NULL,
    salt bytea,
    body_hash bytea,
    body bytea,
    PRIMARY KEY (lane, position)
);
CREATE INDEX oncelog_records_key ON oncelog_records (key_hash) WHERE key_hash IS NOT NULL;
CREATE INDEX oncelog_records_sequence ON oncelog_records (sequence_hash) WHERE sequence_hash IS NOT NULL;
CREATE UNIQUE INDEX oncelog_records_stream ON oncelog_records (lane, scope, sequence) WHERE sequence > 0;

CREATE TABLE oncelog_blocks (
    lane integer NOT NULL,
    height bigint NOT NULL,
    first_position bigint NOT NULL,
    count bigint NOT NULL,
    log_time_ms bigint NOT NULL,
    previous bytea NOT NULL,
    root bytea NOT NULL,
    PRIMARY KEY (lane, height)
);

-- The records of each partition, in order of position.
CREATE TABLE oncelog_partition_records (
    lane integer NOT NULL,
    partition text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    PRIMARY KEY (lane, partition, position)
);

-- Side state, one table for each mapping of core.values.Snapshot.

CREATE TABLE oncelog_streams (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (lane, scope)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_clients (
    lane integer NOT NULL,
    policy text COLLATE "C" NOT NULL,
    scope text COLLATE "C" NOT NULL,
    client text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    last_seen_ms bigint NOT NULL,
    last_key bytea NOT NULL,
    last_fingerprint bytea NOT NULL,
    PRIMARY KEY (lane, policy, scope, client)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_entities (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    version bigint NOT NULL,
    expires_at_ms bigint,
    PRIMARY KEY (lane, scope, key)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_relationships (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    relation text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (lane, scope, resource, relation, subject)
);

-- `state` is core.merge.Row in MessagePack: values with their stamps, whose clocks are unsigned 64-bit numbers.
CREATE TABLE oncelog_rows (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    table_name text COLLATE "C" NOT NULL,
    row_id text COLLATE "C" NOT NULL,
    state bytea NOT NULL,
    PRIMARY KEY (lane, scope, table_name, row_id)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_leases (
    lane integer NOT NULL,
    policy text COLLATE "C" NOT NULL,
    scope text COLLATE "C" NOT NULL,
    client text COLLATE "C" NOT NULL,
    key_hex text COLLATE "C" NOT NULL,
    fence bigint NOT NULL,
    holder text COLLATE "C" NOT NULL,
    until_ms bigint NOT NULL,
    fingerprint bytea NOT NULL,
    failed_fence bigint NOT NULL,
    failure bytea NOT NULL,
    PRIMARY KEY (lane, policy, scope, client, key_hex)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_members (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    member text COLLATE "C" NOT NULL,
    PRIMARY KEY (lane, scope, member)
);

CREATE TABLE oncelog_acknowledged (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    member text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (lane, scope, member)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_consumers (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    consumer text COLLATE "C" NOT NULL,
    cursor bigint NOT NULL,
    PRIMARY KEY (lane, scope, consumer)
) WITH (fillfactor = 70);

CREATE TABLE oncelog_rates (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    actor text COLLATE "C" NOT NULL,
    full_at_us bigint NOT NULL,
    PRIMARY KEY (lane, scope, actor)
) WITH (fillfactor = 70);

-- Open transactions that `share` borrows from an application. `ended` refers to a token that never exists, so a COMMIT by
-- the application fails unless Oncelog has removed the row before.
CREATE TABLE oncelog_shared (
    token bytea PRIMARY KEY,
    ended bytea NOT NULL REFERENCES oncelog_shared (token) DEFERRABLE INITIALLY DEFERRED
);
