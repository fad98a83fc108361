"""The files of the tree, their modules, and their new paths according to the map."""

import ast
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from tools.rename.name_map import NameMap
from tools.rename.scopes import Import, Scope, Source, resolve

TOP: Final = ("src", "tests", "bench", "examples", "tools")
ROOTS: Final = ("src/", "tests/", "examples/todo/", "")
"""Directories with importable content: `mypy_path`, and the `pythonpath` of pytest."""
GENERATED: Final = ("_pb2.py", "_pb2_grpc.py")
OWN: Final = ("tools/rename/", "tools/check_renames.py")
"""The files of this tool. Their examples contain old names."""


class Symbol(NamedTuple):
    """A definition in a module, or the module itself if `qualname` is empty."""

    module: str
    qualname: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.qualname}"


def module_of(path: str) -> str:
    """Return the dotted name of a Python file."""
    root = next(root for root in ROOTS if path.startswith(root))
    return path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def tracked_files(revision: str | None = None) -> list[str]:
    command = ["git", "ls-tree", "-r", "--name-only", revision] if revision else ["git", "ls-files"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    return listed.splitlines()


class Moves:
    """New paths of files and modules."""

    def __init__(self, names: NameMap, files: Iterable[str]) -> None:
        self.files = {path: self._new_path(names, path) for path in files}
        """New path by old path, of every tracked file."""
        python = [path for path in self.files if path.endswith(".py") and path.startswith(TOP)]
        self.modules = {module_of(path): module_of(self.files[path]) for path in python}
        """New module by old module. Packages without an __init__.py are included."""
        self.path_of = {module_of(path): path for path in python}
        for path in python:
            self._add_namespaces(path)
        self.directories: dict[str, set[str]] = {}
        for old, new in self.files.items():
            for inside in PurePosixPath(old).parents:
                rest = PurePosixPath(old).relative_to(inside)
                kept = new.endswith(f"/{rest}")
                self.directories.setdefault(str(inside), set()).add(new.removesuffix(f"/{rest}") if kept else "")

    def _add_namespaces(self, path: str) -> None:
        old, new = module_of(path), module_of(self.files[path])
        while "." in old and "." in new:
            same = old.rpartition(".")[2] == new.rpartition(".")[2]
            old, new = old.rpartition(".")[0], new.rpartition(".")[0]
            if old in self.path_of or not same:
                return
            self.modules.setdefault(old, new)

    @staticmethod
    def _new_path(names: NameMap, path: str) -> str:
        test = _longest(names.tests, path, "/")
        if test:
            return names.tests[test] + path.removeprefix(test)
        if not path.startswith(TOP):
            return path
        root = next(root for root in ROOTS if path.startswith(root))
        inner = path.removeprefix(root)
        dotted = inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not path.endswith(".py"):
            dotted = str(PurePosixPath(inner).parent).replace("/", ".")
        best = _longest(names.modules, dotted, ".")
        if not best:
            return path
        moved = (names.modules[best] + dotted.removeprefix(best)).replace(".", "/")
        if not path.endswith(".py"):
            return f"{root}{moved}/{PurePosixPath(inner).name}"
        return f"{root}{moved}/__init__.py" if path.endswith("/__init__.py") else f"{root}{moved}.py"

    def new_directory(self, path: str) -> str:
        """Return a directory's new path. If its files are separated, return its package's path or the old one."""
        found = self.directories.get(path, set())
        if len(found) == 1 and "" not in found:
            return next(iter(found))
        init = self.files.get(f"{path}/__init__.py")
        return path if init is None else str(PurePosixPath(init).parent)


def _longest(table: dict[str, str], name: str, separator: str) -> str:
    while name and name not in table:
        name = name.rpartition(separator)[0]
    return name


@dataclass(slots=True)
class Project:
    """The parsed tree under a map of names."""

    names: NameMap
    moves: Moves
    sources: dict[str, Source] = field(default_factory=dict)
    """Sources by old module."""
    conflicts: set[str] = field(default_factory=set)
    _locals: dict[tuple[int, str], str] = field(default_factory=dict)

    def new_module(self, module: str) -> str:
        return self.moves.modules.get(module, module)

    def is_module(self, module: str) -> bool:
        return module in self.moves.modules

    def exported(self, module: str, name: str) -> Symbol:
        """Follow imports from a name of a module to its definition."""
        for _ in range(20):
            source = self.sources.get(module)
            bound = source.scopes[0].bindings.get(name) if source is not None else None
            if not bound:
                inner = f"{module}.{name}"
                return Symbol(inner, "") if self.is_module(inner) else Symbol(module, name)
            only = bound[0]
            if f"{module}:{name}" in self.names.names or not isinstance(only, Import) or _is_renamed(only):
                return Symbol(module, name)
            if only.name is None:
                return Symbol(only.module, "")
            if (only.module, only.name) == (module, name):
                return Symbol(f"{module}.{name}", "")
            module, name = only.module, only.name
        return Symbol(module, name)

    def new_export(self, module: str, name: str) -> str:
        """Return the new local name that `from module import name` binds."""
        symbol = self.exported(module, name)
        if not symbol.qualname:
            new = self.new_module(symbol.module)
            same = symbol.module.rpartition(".")[2] == name
            return new.rpartition(".")[2] if new != symbol.module and same else name
        if symbol.module not in self.sources:
            return name
        return self.names.new_name(symbol.key, name)

    def is_submodule(self, module: str, name: str) -> bool:
        """Return whether an attribute of a package is a submodule, not an imported module."""
        return self.exported(module, name) == Symbol(f"{module}.{name}", "") and self.is_module(f"{module}.{name}")

    def new_local(self, source: Source, scope: Scope, name: str) -> str:
        """Return the new name of a variable in a scope."""
        known = self._locals.get((id(scope), name))
        if known is None:
            known = self._locals[id(scope), name] = self._new_local(source, scope, name)
        return known

    def _new_local(self, source: Source, scope: Scope, name: str) -> str:
        key = named(scope).key(source.module, name)
        if key in self.names.names:
            return self.names.names[key]
        found = set()
        for bound in scope.bindings.get(name, ()):
            if not isinstance(bound, Import) or (_is_renamed(bound) and bound.name is not None):
                found.add(self.names.identifiers.get(name, name))
            elif bound.name is not None:
                found.add(self.new_export(bound.module, bound.name))
            elif bound.alias.asname:
                found.add(self.names.identifiers.get(name, name))
            else:
                found.add(self.new_module(bound.alias.name).partition(".")[0])
        if len(found) > 1:
            self.conflicts.add(
                f"{source.path}: {name} is bound more than once, and becomes {' and '.join(sorted(found))}"
            )
        return min(found) if found else name

    def static(self, source: Source, scope: Scope, node: ast.expr) -> Symbol | None:
        """Return the module, class or function that an expression names, without evaluation."""
        if isinstance(node, ast.Name):
            return self._static_name(source, scope, node.id)
        if isinstance(node, ast.Attribute):
            base = self.static(source, scope, node.value)
            if base is not None and not base.qualname:
                if self.is_module(base.module):
                    return self.exported(base.module, node.attr)
                return Symbol(f"{base.module}.{node.attr}", "")
            if base is not None and base.module in self.sources:
                inner = f"{base.qualname}.{node.attr}"
                return Symbol(base.module, inner) if inner in self.sources[base.module].nodes else None
        elif isinstance(node, ast.Subscript):
            return self.static(source, scope, node.value)
        return None

    def _static_name(self, source: Source, scope: Scope, name: str) -> Symbol | None:
        home = resolve(scope, name)
        if home is None:
            return Symbol("builtins", name)
        bound = home.bindings[name][0]
        if isinstance(bound, Import):
            return Symbol(bound.module, "") if bound.name is None else self.exported(bound.module, bound.name)
        if isinstance(bound, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            return Symbol(source.module, f"{home.qualname}.{name}" if home.qualname else name)
        imported = source.imported_by_call.get(id(bound))
        return None if imported is None else Symbol(imported, "")

    def node(self, symbol: Symbol) -> ast.AST | None:
        source = self.sources.get(symbol.module)
        return source.nodes.get(symbol.qualname) if source is not None else None


def _is_renamed(bound: Import) -> bool:
    return bound.alias.asname is not None and bound.alias.asname != bound.alias.name


def named(scope: Scope) -> Scope:
    """Return the function or class around a lambda or comprehension."""
    while scope.kind == "inner" and scope.parent is not None:
        scope = scope.parent
    return scope


def load(names: NameMap, files: Iterable[str] | None = None) -> Project:
    """Parse the files in the working directory."""
    project = Project(names, Moves(names, tracked_files() if files is None else files))
    for module, path in project.moves.path_of.items():
        if not path.endswith(GENERATED) and not path.startswith(OWN):
            project.sources[module] = Source(path, module, Path(path).read_text())
    return project
