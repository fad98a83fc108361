-- Finds the relationships of a subject without a scan of its scope.
CREATE INDEX oncelog_relationships_subject ON oncelog_relationships (lane, scope, subject, resource, relation);
