-- Finds the streams of a member without a scan of all members.
CREATE INDEX oncelog_members_member ON oncelog_members (member, scope);

-- Newest member changes, each with the lane revision that made it. A subscriber queries the changes after the last
-- revision that it knows. There is one row for each member and kind, so the table remains small. `kind` is 1 for the
-- membership and 2 for the acknowledgement.
CREATE TABLE oncelog_member_changes (
    lane INTEGER NOT NULL,
    scope TEXT NOT NULL,
    member TEXT NOT NULL,
    kind INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (lane, scope, member, kind)
) STRICT, WITHOUT ROWID;

CREATE INDEX oncelog_member_changes_revision ON oncelog_member_changes (lane, revision, scope, member, kind);

-- A stream that has or had a member is in the table of streams, so that no other actor can open it.
INSERT INTO oncelog_streams (lane, scope, sequence)
SELECT DISTINCT lane, scope, 0 FROM oncelog_members WHERE true ON CONFLICT DO NOTHING;
