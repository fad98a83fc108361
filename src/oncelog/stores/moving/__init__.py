"""Moving a log from a file into a database, with everything that it knows (`oncelog move`).

Import-wise it stands above both stores; neither knows of it, but for the marks that it leaves in them.
"""

from oncelog.stores.moving.mover import demand_possible, move

__all__ = ["demand_possible", "move"]
