-- Tombstone horizon of a gateway (core.rules.compaction): a clock reading in decimal digits, because an INTEGER has
-- only 63 bits. Older versions of Oncelog would restore rows whose tombstones were dropped, so they must not write.
CREATE TABLE oncelog_horizons (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    hlc TEXT NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID;
