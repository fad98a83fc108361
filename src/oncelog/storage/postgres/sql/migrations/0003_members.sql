-- Finds the streams of a member without reading the members of all streams.
CREATE INDEX oncelog_members_member ON oncelog_members (member, scope);

-- The lane revision at which the membership (`kind` 1) or the acknowledgement (`kind` 2) of a member last changed.
-- Subscribers read the rows above the newest revision that they know. Each member has at most one row of each kind.
CREATE TABLE oncelog_member_changes (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    member text COLLATE "C" NOT NULL,
    kind integer NOT NULL,
    revision bigint NOT NULL,
    PRIMARY KEY (lane, scope, member, kind)
);

CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision, scope, member, kind);

-- A stream that has or had a member is in the table of streams, so that no other caller can open it.
INSERT INTO oncelog_streams (lane, scope, sequence)
SELECT DISTINCT lane, scope, 0 FROM oncelog_members WHERE true ON CONFLICT DO NOTHING;
