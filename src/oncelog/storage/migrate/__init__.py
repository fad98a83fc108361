"""Migration of a log from a file into a database (`oncelog move`).

It uses both stores. They know of it only by the marks that it leaves in them.
"""
