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
    """Return the `__getattr__` of a package: `modules` maps names to modules, `renamed` old names to new ones.

    A module may be followed by a colon and the name that it has for the object.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 - the package assigns it to `__getattr__`
        if name not in modules:
            return getattr(sys.modules[package], find_renamed(package, renamed or {}, name))
        module, _, attribute = modules[name].partition(":")
        value: object = getattr(import_module(module), attribute or name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
