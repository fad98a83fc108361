-- The first schema, in whatever schema the connection's search_path names. All tables are ours by their prefix: an
-- application may keep its own beside them.
--
-- Every key starts with the lane. Texts are compared byte by byte (COLLATE "C"), as in every other store: no locale of
-- the machine may change an order. Identities, hashes and bodies are bytea.

-- What the log was made with. One row; only the epoch and the version ever change.
CREATE TABLE oncelog_log (
    id smallint PRIMARY KEY CHECK (id = 1),
    schema_version integer NOT NULL,
    epoch text NOT NULL,
    lanes integer NOT NULL,
    eviction_interval integer NOT NULL,
    index_secret bytea NOT NULL,
    created_ms bigint NOT NULL
);

-- What all lanes share. Commits only read it: a row that every one of them wrote would make them wait for each other.
-- `move` is what `oncelog move` has still to do; NULL in a log that is whole.
CREATE TABLE oncelog_state (
    id smallint PRIMARY KEY CHECK (id = 1),
    erasures bigint NOT NULL,
    confirmations bigint NOT NULL,
    move text
);

-- What the database's clock showed, and how long a gateway's machine (boot) had been up by then.
CREATE TABLE oncelog_clocks (
    boot text COLLATE "C" PRIMARY KEY,
    elapsed_ms bigint NOT NULL,
    time_ms bigint NOT NULL
);

CREATE TABLE oncelog_policies (
    name text COLLATE "C" PRIMARY KEY,
    declaration text NOT NULL
);

-- The heads. Whoever commits to a lane holds its row from the first look to the end of the transaction: so the order of
-- commits is the order of positions, and who follows positions misses nothing. All rows are there from the beginning.
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

-- The truth. An erased record has a body_hash in place of salt and body. What is found by a key or by a client's number
-- is found by a keyed hash (key_hash.py) and checked against the record.
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

-- Which records touch a partition, in order.
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

-- `state` is core.merge.Row in MessagePack: values and their stamps, whose clocks have 64 bits without a sign.
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

-- Transactions that `share` has with its caller, while they are open. What `ended` refers to is never there: so a
-- transaction that is committed before its row has been removed, by the caller's own COMMIT, comes to nothing.
CREATE TABLE oncelog_shared (
    token bytea PRIMARY KEY,
    ended bytea NOT NULL REFERENCES oncelog_shared (token) DEFERRABLE INITIALLY DEFERRED
);
