-- What a subject is related to, without a look at everything in its scope.
CREATE INDEX oncelog_relationships_subject ON oncelog_relationships (lane, scope, subject, resource, relation);
