-- The streams of a member, without a look at all members of all streams.
CREATE INDEX oncelog_members_member ON oncelog_members (member, scope);

-- Whose membership or acknowledgement has changed, and the revision of the lane that did it: whoever follows them asks
-- for what is newer than the last that he knows. One row for each, so that it grows no further than those do. `kind` is
-- 1 for the membership, 2 for the acknowledgement.
CREATE TABLE oncelog_member_changes (
    lane integer NOT NULL,
    scope text COLLATE "C" NOT NULL,
    member text COLLATE "C" NOT NULL,
    kind integer NOT NULL,
    revision bigint NOT NULL,
    PRIMARY KEY (lane, scope, member, kind)
);

CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision, scope, member, kind);

-- A stream that has or had a member is in the table of streams, so that nobody else can open it.
INSERT INTO oncelog_streams (lane, scope, sequence)
SELECT DISTINCT lane, scope, 0 FROM oncelog_members WHERE true ON CONFLICT DO NOTHING;
