-- Finds the relationships of a subject without reading its whole scope.
CREATE INDEX oncelog_relationships_subject ON oncelog_relationships (lane, scope, subject, resource, relation);
