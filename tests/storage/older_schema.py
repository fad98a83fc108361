"""Downgrade a current database to an older schema version."""

from databases import query

WITHOUT_USAGE_VERSION = (
    "ALTER TABLE oncelog_entities DROP COLUMN erased",
    "ALTER TABLE oncelog_state DROP COLUMN usage_version",
)
"""Statements for both databases. They revert all migrations since the one that introduced version 2 of the usage."""
WITHOUT_ROLES = (
    *WITHOUT_USAGE_VERSION,
    "DROP INDEX IF EXISTS oncelog_records_internal",
    "DROP TABLE oncelog_rosters",
    "DROP INDEX IF EXISTS oncelog_members_joined",
    "DROP INDEX IF EXISTS oncelog_members_long_joined",
    "ALTER TABLE oncelog_members DROP COLUMN joined",
    "ALTER TABLE oncelog_members DROP COLUMN is_owner",
)
"""Statements for both databases. They revert all migrations since the one that introduced roles."""


def downgrade_to_schema_4(place: str) -> None:
    """Revert the tables of a database to schema version 4."""
    keys = {
        "clients": "policy, scope, client",
        "entities": "scope, key",
        "relationships": "scope, resource, relation, subject",
        "rows": "scope, table_name, row_id",
        "leases": "policy, scope, client, key_hex",
        "members": "scope, member",
        "acknowledged": "scope, member",
        "consumers": "scope, consumer",
        "rates": "scope, actor",
        "member_changes": "scope, member, kind",
    }
    by_subject = "(lane, scope, subject, resource, relation)"
    for table, columns in keys.items():
        query(place, f"ALTER TABLE oncelog_{table} DROP COLUMN digest")
        query(place, f"ALTER TABLE oncelog_{table} ADD PRIMARY KEY (lane, {columns}), REPLICA IDENTITY DEFAULT")
    for statement in (
        *WITHOUT_ROLES,
        "DROP TABLE oncelog_floors",
        "ALTER TABLE oncelog_state DROP COLUMN leaps, DROP COLUMN timeline",
        "DROP TABLE oncelog_horizons",
        "DROP INDEX IF EXISTS oncelog_relationships_subject",
        f"CREATE INDEX oncelog_relationships_subject ON oncelog_relationships {by_subject}",
        "CREATE INDEX oncelog_members_member ON oncelog_members (member, scope)",
        "DROP INDEX oncelog_member_changes_revision",
        "CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision, scope, member, kind)",
        "UPDATE oncelog_log SET schema_version = 4",
    ):
        query(place, statement)
