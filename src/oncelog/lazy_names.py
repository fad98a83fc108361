"""Lazy imports: a package imports a name when it is first used.

A command that needs only a few names therefore does not import threading, sqlite3 or aiohttp.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from oncelog.deprecation import find_renamed


def import_lazily(
    package: str, modules: Mapping[str, str], *, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that defines `__all__`.

    `modules` maps names to the modules that define them. A module may be followed by a colon and the object's name in
    that module. `renamed` maps deprecated names to current ones.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 - the package assigns it to `__getattr__`
        if name not in modules:
            return getattr(sys.modules[package], find_renamed(package, renamed or {}, name))
        module, _, attribute = modules[name].partition(":")
        value: object = getattr(import_module(module), attribute or name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807 - as above
        return sorted({*sys.modules[package].__all__, *modules})

    return __getattr__, __dir__
