"""Migration of a log from a file into a database (`oncelog move`).

The migration uses both stores. The stores see only the marks that it leaves in them.
"""
