"""Names of a package that are imported when they are first used.

A command that only needs a few names does not wait for threads, SQLite or aiohttp.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from oncelog.deprecation import find_renamed


def import_lazily(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: `modules` maps names to modules, `renamed` old names to new ones."""

    def __getattr__(name: str) -> object:  # noqa: N807 - it becomes one
        if name not in modules:
            return getattr(sys.modules[package], find_renamed(package, renamed or {}, name))
        value: object = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
