"""Moving a log from a file into a database, with everything that it knows (`oncelog move`).

Import-wise it stands above both stores; neither knows of it, but for the marks that it leaves in them.
"""

from oncelog.storage.migrate.migration import check_migration, migrate_log

__all__ = ["check_migration", "migrate_log"]
