-- Marks an entity whose value was erased with the record that set it. It keeps its key, version and expiry; its value
-- is empty.
ALTER TABLE oncelog_entities ADD COLUMN erased INTEGER NOT NULL DEFAULT 0;
