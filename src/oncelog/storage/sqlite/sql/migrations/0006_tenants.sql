-- The quotas of tenants, in JSON (storage/tenants.py). NULL where there are none, and then nothing is counted.
ALTER TABLE oncelog_state ADD COLUMN tenants TEXT;

-- What each tenant has (core.tenants.Usage). All rows are of lane 0: a tenant may have streams in several lanes.
CREATE TABLE oncelog_usage (
    lane INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    records INTEGER NOT NULL,
    full_at_us INTEGER NOT NULL,
    PRIMARY KEY (lane, tenant)
) STRICT, WITHOUT ROWID;
