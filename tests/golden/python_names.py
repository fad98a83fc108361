"""Script: print the public names of Oncelog with their signatures and public attributes.

Oncelog's own types in signatures are shown as `oncelog.*`, because the module of a class and the names of private
classes may change.
"""

import enum
import inspect
import re
import sys
from importlib import import_module
from typing import Any, Final, Union, get_origin

PACKAGES: Final = (
    "oncelog",
    "oncelog.client",
    "oncelog.client.ledger",
    "oncelog.client.deltas",
    "oncelog.client.chat",
    "oncelog.errors",
    "oncelog.proof",
)
ALSO_PUBLIC: Final = {"oncelog": ("open",)}
_OWN_TYPE: Final = re.compile(r"(?:type\[)?\boncelog(?:\.\w+)+")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_QUOTED: Final = re.compile(r"(: |-> )'[^'>]*'(?=[,) ]|$)|ForwardRef\('[^']*'\)")


def public_names(package: Any) -> list[str]:
    """Return the names in `__all__`, or, without `__all__`, the classes and functions that the module defines."""
    names = getattr(package, "__all__", None)
    if names is None:
        names = [name for name, value in vars(package).items() if _is_defined_in(value, package.__name__)]
    return sorted([*names, *ALSO_PUBLIC.get(package.__name__, ())])


def _is_defined_in(value: object, module: str) -> bool:
    return getattr(value, "__module__", "") == module and not getattr(value, "__name__", "_").startswith("_")


def describe(name: str, value: Any) -> list[str]:
    """Return the lines that describe a public name."""
    if inspect.isclass(value):
        if issubclass(value, enum.Enum):
            return [f"enum {name}", *(f"    {member.name} = {member.value!r}" for member in value)]
        return [f"class {name}{_bases(value)}{_signature(value)}", *(f"    {line}" for line in _members(value))]
    if callable(value) and get_origin(value) is not Union:
        return [f"{_kind(value)} {name}{_signature(value)}"]
    return [f"{name} = {_own_types(repr(value))}"]


def _bases(value: type) -> str:
    """Return the public base classes, which callers may use in `except` and `isinstance`."""
    bases = [base.__name__ for base in value.__mro__[1:-1] if _is_known(base)]
    return f"[{', '.join(bases)}]" if bases else ""


def _is_known(base: type) -> bool:
    return base.__module__ in ("builtins", "enum") or base.__name__ == "OncelogError"


def _members(value: type) -> list[str]:
    found = []
    for name in sorted(dir(value)):
        if name.startswith("_") or name in dir(BaseException) or hasattr(object, name):
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if inspect.isfunction(member):
            found.append(f"{_kind(member)} {name}{_signature(member)}")
        else:
            found.append(name)
    return found


def _kind(value: Any) -> str:
    is_asynchronous = inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    return "async def" if is_asynchronous else "def"


def _signature(value: Any) -> str:
    try:
        return _own_types(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


def _own_types(text: str) -> str:
    text = _QUOTED.sub(r"\1oncelog.*", text)
    return _ADDRESS.sub("", _OWN_TYPE.sub("oncelog.*", text))


def main() -> None:
    for package in PACKAGES:
        module = import_module(package)
        sys.stdout.write(f"# {package}\n\n")
        for name in public_names(module):
            sys.stdout.write("\n".join(describe(name, getattr(module, name))) + "\n\n")


if __name__ == "__main__":
    main()
