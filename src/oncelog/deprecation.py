"""Deprecated names, which work for one more release and emit a warning. The changelog lists their replacements."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final
from warnings import warn_explicit

_LIBRARY_FILES: Final = (f"{Path(__file__).parent}{os.sep}", "<frozen importlib", importlib.__file__)
"""File name prefixes of this package and of the import system. The warning skips frames in these files."""

_RENAMED_MODULES: Final = {
    "oncelog.doors": ("oncelog.server", {}),  # parent of the next module; importing it alone was never documented
    "oncelog.doors.identity": (
        "oncelog.server.auth.authenticator",
        {
            "Authenticates": "Authenticator",
            "Created": "CreatedKey",
            "granted": "parse_grants",
            "grants_of_claim": "decode_grants",
        },
    ),
}
"""Old module names, each with the new module and the names that changed in it."""


def find_renamed(module: str, renamed: Mapping[str, str], name: str) -> str:
    """Return the new name for a renamed public name of a module, and warn.

    Raises:
        AttributeError: the module never had the name.
    """
    if name not in renamed:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", f"{module}.{renamed[name]}")
    return renamed[name]


def warn_renamed(old: str, new: str) -> None:
    """Emit a deprecation warning that points to the line of the application that called this package."""
    frame: FrameType = sys._getframe()  # noqa: SLF001 - `warnings` has no other way before Python 3.12
    while frame.f_code.co_filename.startswith(_LIBRARY_FILES) and frame.f_back is not None:
        frame = frame.f_back
    warn_explicit(
        f"{old} is deprecated and will be removed in the next release; use {new}",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def alias_property(old: str, new: str) -> Any:
    """Return a property that warns and then reads the attribute's new name."""

    def read(self: object) -> object:
        warn_renamed(old, new)
        return getattr(self, new)

    read.__doc__ = f"Deprecated: use `{new}`."
    return property(read)


def alias_method(old: str, new: str) -> Callable[..., Any]:
    """Return a method that warns and then calls the method's new name."""

    def call(self: object, *args: object, **options: object) -> object:
        warn_renamed(old, new)
        return getattr(self, new)(*args, **options)

    call.__doc__ = f"Deprecated: use `{new}`."
    return call


class _RenamedModules(MetaPathFinder, Loader):
    """Import hook that finds modules under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in _RENAMED_MODULES:
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        new, renamed = _RENAMED_MODULES[module.__name__]
        if renamed:
            warn_renamed(module.__name__, new)
        source = import_module(new)
        public = [*getattr(source, "__all__", ())]
        names = {name: name for name in public} | renamed
        for old, current in names.items():
            setattr(module, old, getattr(source, current))


def install() -> None:
    """Make renamed modules importable under their old names."""
    sys.meta_path.append(_RenamedModules())
