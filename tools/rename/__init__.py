"""Rename modules, classes, functions, attributes and parameters by a map in TOML files; see __main__.py."""
