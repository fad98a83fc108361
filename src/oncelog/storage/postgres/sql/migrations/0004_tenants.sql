-- The quotas of tenants, in JSON (storage/tenants.py). NULL where there are none, and then nothing is counted.
ALTER TABLE oncelog_state ADD COLUMN tenants text;

-- What each tenant has (core.tenants.Usage). All rows are of lane 0: a tenant may have streams in several lanes. So a row
-- is locked by whoever counts in it, after the lanes and in the order of names. All rows are there before they are needed.
CREATE TABLE oncelog_usage (
    lane integer NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    bytes bigint NOT NULL,
    records bigint NOT NULL,
    full_at_us bigint NOT NULL,
    PRIMARY KEY (lane, tenant)
) WITH (fillfactor = 70);
