-- Quotas of tenants, in JSON (storage/tenants.py). NULL if the log has no quotas; usage is then not counted.
ALTER TABLE oncelog_state ADD COLUMN tenants TEXT;

-- Usage of each tenant (core.tenants.Usage). All rows are in lane 0: a tenant may have streams in several lanes.
CREATE TABLE oncelog_usage (
    lane INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    records INTEGER NOT NULL,
    full_at_us INTEGER NOT NULL,
    PRIMARY KEY (lane, tenant)
) STRICT, WITHOUT ROWID;
