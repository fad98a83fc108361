-- A B-tree index row holds at most 2,704 bytes, but the names in one key may have several thousand bytes in total. A
-- key whose texts have more than 2,000 bytes in UTF-8 is therefore indexed by their SHA-256 digest
-- (side_state_tables.py: compute_digest); all other keys are indexed by the texts, as before. Ordered listings read
-- long keys through an index on the first 64 characters of each text, and sort keys that begin alike.
--
-- The primary keys become partial unique indexes, so that an older server that is still running can no longer write to
-- these tables. For the same reason, a publication needs a different replica identity, which matters only if wal_level
-- is logical.

ALTER TABLE oncelog_clients ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_clients_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_entities ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_entities_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_relationships ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_relationships_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_rows ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_rows_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_leases ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_leases_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_members ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_members_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_acknowledged ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_acknowledged_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_consumers ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_consumers_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_rates ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_rates_pkey, REPLICA IDENTITY FULL;
ALTER TABLE oncelog_member_changes ADD COLUMN digest bytea, DROP CONSTRAINT oncelog_member_changes_pkey, REPLICA IDENTITY FULL;
DROP INDEX oncelog_relationships_subject;
DROP INDEX oncelog_members_member;
DROP INDEX oncelog_member_changes_revision;

-- Long keys that were indexed by their texts, because PostgreSQL had compressed them.
UPDATE oncelog_clients
SET digest = sha256(convert_to(policy, 'UTF8') || '\x00' || convert_to(scope, 'UTF8') || '\x00' || convert_to(client, 'UTF8'))
WHERE octet_length(policy) + octet_length(scope) + octet_length(client) > 2000;
UPDATE oncelog_entities SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(key, 'UTF8'))
WHERE octet_length(scope) + octet_length(key) > 2000;
UPDATE oncelog_relationships
SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(resource, 'UTF8') || '\x00'
    || convert_to(relation, 'UTF8') || '\x00' || convert_to(subject, 'UTF8'))
WHERE octet_length(scope) + octet_length(resource) + octet_length(relation) + octet_length(subject) > 2000;
UPDATE oncelog_rows
SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(table_name, 'UTF8') || '\x00' || convert_to(row_id, 'UTF8'))
WHERE octet_length(scope) + octet_length(table_name) + octet_length(row_id) > 2000;
UPDATE oncelog_leases
SET digest = sha256(convert_to(policy, 'UTF8') || '\x00' || convert_to(scope, 'UTF8') || '\x00'
    || convert_to(client, 'UTF8') || '\x00' || convert_to(key_hex, 'UTF8'))
WHERE octet_length(policy) + octet_length(scope) + octet_length(client) + octet_length(key_hex) > 2000;
UPDATE oncelog_members SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(member, 'UTF8'))
WHERE octet_length(scope) + octet_length(member) > 2000;
UPDATE oncelog_acknowledged SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(member, 'UTF8'))
WHERE octet_length(scope) + octet_length(member) > 2000;
UPDATE oncelog_consumers SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(consumer, 'UTF8'))
WHERE octet_length(scope) + octet_length(consumer) > 2000;
UPDATE oncelog_rates SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(actor, 'UTF8'))
WHERE octet_length(scope) + octet_length(actor) > 2000;
UPDATE oncelog_member_changes SET digest = sha256(convert_to(scope, 'UTF8') || '\x00' || convert_to(member, 'UTF8'))
WHERE octet_length(scope) + octet_length(member) > 2000;

CREATE UNIQUE INDEX oncelog_clients_short ON oncelog_clients (lane, policy, scope, client) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_clients_long ON oncelog_clients (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_entities_short ON oncelog_entities (lane, scope, key) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_entities_long ON oncelog_entities (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_relationships_short ON oncelog_relationships (lane, scope, resource, relation, subject)
WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_relationships_long ON oncelog_relationships (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_rows_short ON oncelog_rows (lane, scope, table_name, row_id) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_rows_long ON oncelog_rows (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_leases_short ON oncelog_leases (lane, policy, scope, client, key_hex) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_leases_long ON oncelog_leases (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_members_short ON oncelog_members (lane, scope, member) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_members_long ON oncelog_members (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_acknowledged_short ON oncelog_acknowledged (lane, scope, member) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_acknowledged_long ON oncelog_acknowledged (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_consumers_short ON oncelog_consumers (lane, scope, consumer) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_consumers_long ON oncelog_consumers (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_rates_short ON oncelog_rates (lane, scope, actor) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_rates_long ON oncelog_rates (lane, digest) WHERE digest IS NOT NULL;
CREATE UNIQUE INDEX oncelog_member_changes_short ON oncelog_member_changes (lane, scope, member, kind) WHERE digest IS NULL;
CREATE UNIQUE INDEX oncelog_member_changes_long ON oncelog_member_changes (lane, digest, kind) WHERE digest IS NOT NULL;

-- Indexes for listings, first of short keys, then of long ones.
CREATE INDEX oncelog_relationships_subject ON oncelog_relationships (lane, scope, subject, resource, relation)
WHERE digest IS NULL;
CREATE INDEX oncelog_members_member ON oncelog_members (member, scope) WHERE digest IS NULL;
CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision);
CREATE INDEX oncelog_entities_long_order ON oncelog_entities (lane, left(scope, 64), left(key, 64)) WHERE digest IS NOT NULL;
CREATE INDEX oncelog_rows_long_order ON oncelog_rows (lane, left(scope, 64), left(table_name, 64), left(row_id, 64))
WHERE digest IS NOT NULL;
CREATE INDEX oncelog_relationships_long_order
ON oncelog_relationships (lane, left(scope, 64), left(resource, 64), left(relation, 64), left(subject, 64))
WHERE digest IS NOT NULL;
CREATE INDEX oncelog_relationships_long_subject
ON oncelog_relationships (lane, left(scope, 64), left(subject, 64), left(resource, 64), left(relation, 64))
WHERE digest IS NOT NULL;
CREATE INDEX oncelog_members_long_order ON oncelog_members (lane, left(scope, 64), left(member, 64)) WHERE digest IS NOT NULL;
CREATE INDEX oncelog_members_long_member ON oncelog_members (left(member, 64), left(scope, 64)) WHERE digest IS NOT NULL;
