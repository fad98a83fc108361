-- The tombstone horizon of a gateway (core.rules.compaction): a clock reading in decimal digits, since 64 bits do not
-- fit into a bigint. Older versions of Oncelog would restore rows whose tombstones were dropped, so they must not
-- write.
CREATE TABLE oncelog_horizons (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    hlc text COLLATE "C" NOT NULL,
    PRIMARY KEY (lane, scope)
);
