-- Roles of members (core/rules/members.py). `joined` is the order in which members joined the stream: the oldest member
-- inherits a stream whose last owner leaves. An older file takes it from the revision that added the member, then
-- from the name.
ALTER TABLE oncelog_members ADD COLUMN joined INTEGER NOT NULL DEFAULT 0;
ALTER TABLE oncelog_members ADD COLUMN is_owner INTEGER NOT NULL DEFAULT 0;

UPDATE oncelog_members SET joined = o.joined FROM (
    SELECT m.lane, m.scope, m.member,
        row_number() OVER (PARTITION BY m.lane, m.scope ORDER BY coalesce(c.revision, 0), m.member) AS joined
    FROM oncelog_members AS m
    LEFT JOIN oncelog_member_changes AS c ON c.lane = m.lane AND c.scope = m.scope AND c.member = m.member AND c.kind = 1
) AS o
WHERE o.lane = oncelog_members.lane AND o.scope = oncelog_members.scope AND o.member = oncelog_members.member;

CREATE INDEX oncelog_members_joined ON oncelog_members (lane, scope, joined);

-- Number of members and owners in each stream, and the last value of `joined`. `owners` is NULL in a stream from before
-- roles, in which every member acts as an owner until one is appointed.
CREATE TABLE oncelog_rosters (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    members INTEGER NOT NULL,
    owners INTEGER,
    joined INTEGER NOT NULL,
    PRIMARY KEY (lane, scope)
) STRICT, WITHOUT ROWID;

INSERT INTO oncelog_rosters (lane, scope, members, owners, joined)
SELECT lane, scope, count(*), NULL, count(*) FROM oncelog_members GROUP BY lane, scope;
