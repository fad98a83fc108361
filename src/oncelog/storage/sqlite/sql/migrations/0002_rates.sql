-- Token buckets of the actors' rates for new writes (core.values.Bucket). The scope is empty for the whole log.
CREATE TABLE oncelog_rates (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    actor TEXT NOT NULL,
    full_at_us INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, actor)
) STRICT, WITHOUT ROWID;
