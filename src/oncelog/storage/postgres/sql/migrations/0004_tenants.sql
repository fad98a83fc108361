-- The quotas of tenants, in JSON (storage/tenants.py). NULL if the log has no quotas; usage is then not counted.
ALTER TABLE oncelog_state ADD COLUMN tenants text;

-- The usage of each tenant (core.tenants.Usage). All rows are in lane 0, because a tenant may have streams in several
-- lanes. A commit locks its lanes, then the rows that it changes, in the order of names. All rows exist in advance.
CREATE TABLE oncelog_usage (
    lane integer NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    bytes bigint NOT NULL,
    records bigint NOT NULL,
    full_at_us bigint NOT NULL,
    PRIMARY KEY (lane, tenant)
) WITH (fillfactor = 70);
