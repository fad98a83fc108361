-- Roles of members (core/rules/members.py). `joined` is the order in which members joined the stream: the oldest member
-- inherits a stream whose last owner leaves. An older database takes it from the revision that added the member,
-- then from the name.
ALTER TABLE oncelog_members ADD COLUMN joined bigint NOT NULL DEFAULT 0, ADD COLUMN is_owner integer NOT NULL DEFAULT 0;

UPDATE oncelog_members AS m SET joined = o.joined FROM (
    SELECT m.ctid AS place,
        row_number() OVER (PARTITION BY m.lane, m.scope ORDER BY coalesce(c.revision, 0), m.member) AS joined
    FROM oncelog_members AS m
    LEFT JOIN oncelog_member_changes AS c ON c.lane = m.lane AND c.scope = m.scope AND c.member = m.member AND c.kind = 1
) AS o
WHERE o.place = m.ctid;

-- The columns have no defaults, so that an older server that is still running cannot add members, which it would not
-- count.
ALTER TABLE oncelog_members ALTER COLUMN joined DROP DEFAULT, ALTER COLUMN is_owner DROP DEFAULT;

CREATE INDEX oncelog_members_joined ON oncelog_members (lane, scope, joined) WHERE digest IS NULL;
CREATE INDEX oncelog_members_long_joined ON oncelog_members (lane, left(scope, 64), joined) WHERE digest IS NOT NULL;

-- Number of members and owners in each stream, and the last value of `joined`. `owners` is NULL in a stream from before
-- roles, in which every member acts as an owner until one is appointed.
CREATE TABLE oncelog_rosters (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    members bigint NOT NULL,
    owners bigint,
    joined bigint NOT NULL,
    PRIMARY KEY (lane, scope)
);

INSERT INTO oncelog_rosters (lane, scope, members, owners, joined)
SELECT lane, scope, count(*), NULL, count(*) FROM oncelog_members GROUP BY lane, scope;
