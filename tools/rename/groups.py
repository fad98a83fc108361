"""Members that must be renamed together: overrides, and implementations of a protocol."""

import ast
from collections.abc import Iterator

from tools.rename.facts import Facts
from tools.rename.name_map import NameMap, parts
from tools.rename.project import Project, Symbol


class Groups:
    """Groups of members, by class and name. A member is in the group of each member that it overrides or implements."""

    def __init__(self, facts: Facts, members: set[str]) -> None:
        self._facts = facts
        self._parent: dict[str, str] = {}
        self._by_root: dict[str, list[str]] = {}
        for name, known in facts.classes.items():
            for member in known.members & members:
                for base in known.bases[1:]:
                    if base in facts.classes and member in facts.classes[base].members:
                        self._join(f"{name}.{member}", f"{base}.{member}")
        for protocol, implementers in facts.implementers.items():
            for member in facts.classes[protocol].protocol & members:
                for name in implementers:
                    mine, theirs = facts.owner(protocol, member), facts.owner(name, member)
                    if mine and theirs:
                        self._join(f"{mine}.{member}", f"{theirs}.{member}")
        for key in self._parent:
            self._by_root.setdefault(self._root(key), []).append(key)

    def _root(self, key: str) -> str:
        while self._parent.setdefault(key, key) != key:
            key = self._parent[key]
        return key

    def _join(self, one: str, other: str) -> None:
        self._parent[self._root(one)] = self._root(other)

    def of(self, key: str) -> list[str]:
        return self._by_root.get(self._root(key), [key]) if key in self._parent else [key]


def missing(project: Project, facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is missing in the map, its new name, and the key that requires it."""
    names = project.names
    wanted = {parts(key)[1].rpartition(".")[2] for key in names.names}
    groups = Groups(facts, wanted)
    for key, new in list(names.names.items()):
        module, qualname, local = parts(key)
        member = f"{module}:{qualname}"
        if "." not in qualname or qualname.endswith((".__init__", ".__new__")):
            continue
        for other in groups.of(member):
            if other == member:
                continue
            if not local:
                if names.names.get(other) != new:
                    yield other, new, key
            elif _has_parameter(project, other, local) and names.names.get(f"{other}({local})") != new:
                yield f"{other}({local})", new, key


def _has_parameter(project: Project, key: str, name: str) -> bool:
    module, qualname, _ = parts(key)
    node = project.node(Symbol(module, qualname))
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return any(one.arg == name for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def propagate(project: Project, facts: Facts) -> list[str]:
    """Add the missing keys to the map. Return the added lines."""
    added: dict[str, str] = {}
    names: NameMap = project.names
    while True:
        found = [(key, new) for key, new, _ in missing(project, facts) if key not in names.names]
        if not found:
            return [f'"{key}" = "{new}"' for key, new in sorted(added.items())]
        for key, new in found:
            names.names.setdefault(key, new)
            added[key] = names.names[key]
