-- An entity whose value was erased with the record that set it: its key, version and expiry stay, its value is empty.
ALTER TABLE oncelog_entities ADD COLUMN erased integer NOT NULL DEFAULT 0;
