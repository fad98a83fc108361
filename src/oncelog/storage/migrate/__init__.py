"""Migration of a log from a file into a database (`oncelog move`).

The migration depends on both stores. The stores do not depend on it: they only check the markers that it saves.
"""
