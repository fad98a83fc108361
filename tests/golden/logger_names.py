"""Script: import every module of Oncelog and print the names of its loggers."""

import logging
import pkgutil
import sys
from importlib import import_module

import oncelog

SKIPPED = ("oncelog.__main__", "oncelog.testing")
"""Modules that are not imported: the command-line entry point, and the test tools."""

for module in pkgutil.walk_packages(oncelog.__path__, "oncelog."):
    if not module.name.startswith(SKIPPED):
        import_module(module.name)
loggers = logging.root.manager.loggerDict
for name in sorted(loggers):
    if name.startswith("oncelog") and isinstance(loggers[name], logging.Logger):
        sys.stdout.write(f"{name}\n")
