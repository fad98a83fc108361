"""Facts from mypy: the class that defines each attribute, the result class of each call, and base classes.

One build of the whole program takes about a minute. Its result does not depend on the map of names, so it is cached in
.mypy_cache until a file changes.
"""

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mypy import build
from mypy.fscache import FileSystemCache
from mypy.main import process_options
from mypy.nodes import CallExpr, Expression, MemberExpr, MypyFile, StrExpr, TypeInfo
from mypy.state import state
from mypy.subtypes import is_subtype
from mypy.traverser import NameAndMemberCollector
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    Overloaded,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)
from mypy.typevars import fill_typevars_with_any

from tools.rename.scopes import Source

_CACHE: Final = Path(".mypy_cache/rename-facts.pickle")
Owners = tuple[str, ...] | None
"""Classes of the tree, as "module:Qualified.name". None if mypy does not know the type."""


@dataclass(slots=True)
class ClassFacts:
    bases: list[str]
    """The class and its bases in lookup order. Names without ":" belong to other packages."""
    members: frozenset[str]
    foreign: frozenset[str]
    """Members of base classes from other packages."""
    protocol: frozenset[str]
    """Members of a protocol, empty for other classes."""
    generated: bool
    """Whether `__init__` takes the fields, as in dataclasses, structs and named tuples."""
    struct: bool
    enum: bool


@dataclass(slots=True)
class Facts:
    members: dict[str, dict[tuple[int, int], Owners]] = field(default_factory=dict)
    """Classes that define an attribute, by file and the end of the attribute."""
    made: dict[str, dict[tuple[int, int, int, int], Owners]] = field(default_factory=dict)
    """Classes that a call instantiates, by file and place of the call."""
    first: dict[str, dict[tuple[int, int, int, int], Owners]] = field(default_factory=dict)
    """Classes of the first argument of a call, by file and place of the call."""
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    implementers: dict[str, list[str]] = field(default_factory=dict)
    """Classes that implement a protocol without inheriting from it, by protocol."""

    def owner(self, name: str, member: str) -> str | None:
        """Return the class that defines a member, "" for a class of another package, or None if no class does."""
        known = self.classes.get(name)
        if known is None:
            return None
        for base in known.bases:
            if base in self.classes and member in self.classes[base].members:
                return base
        return "" if member in known.foreign else None


def load(sources: dict[str, Source]) -> Facts:
    digest = hashlib.sha256(b"facts 1")
    for module in sorted(sources):
        digest.update(f"\0{sources[module].path}\0{sources[module].text}".encode())
    if _CACHE.exists():
        known, facts = pickle.loads(_CACHE.read_bytes())  # noqa: S301
        if known == digest.hexdigest():
            assert isinstance(facts, Facts)  # noqa: S101
            return facts
    facts = _Build(sources).facts
    _CACHE.parent.mkdir(exist_ok=True)
    _CACHE.write_bytes(pickle.dumps((digest.hexdigest(), facts)))
    return facts


class _Build:
    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        cache = FileSystemCache()
        targets, options = process_options([], fscache=cache)
        options.incremental = False
        options.export_types = True
        options.preserve_asts = True
        options.native_parser = False  # This option gives the same positions as `ast`.
        options.cache_dir = "/dev/null"
        result = build.build(targets, options, fscache=cache)
        if result.errors:
            raise SystemExit("\n".join(["the tree must be clean under mypy first:", *result.errors]))
        self.types = result.types
        self.calls = {node.callee: node for node in result.types if isinstance(node, CallExpr)}
        self.facts = Facts()
        self.infos: dict[str, TypeInfo] = {}
        for module in sources:
            for info in _classes(module, result.files[module]):
                self.infos[self._id(info)] = info
        for name, info in self.infos.items():
            self.facts.classes[name] = self._class(info)
        with state.strict_optional_set(True):
            self._find_implementers()
        for module, source in sources.items():
            self._file(source, result.files[module])

    def _id(self, info: TypeInfo) -> str:
        source = self.sources.get(info.module_name)
        if source is None:
            return info.fullname
        return f"{info.module_name}:{source.class_at.get(info.defn.line, info.fullname)}"

    def _class(self, info: TypeInfo) -> ClassFacts:
        foreign = [base for base in info.mro if base.module_name not in self.sources]
        init = info.names.get("__init__")
        return ClassFacts(
            bases=[self._id(base) for base in info.mro],
            members=frozenset(name for name, symbol in info.names.items() if not symbol.plugin_generated),
            foreign=frozenset(name for base in foreign for name in base.names),
            protocol=frozenset(info.protocol_members) if info.is_protocol else frozenset(),
            generated=info.is_named_tuple or (init is not None and init.plugin_generated),
            struct=any(base.fullname == "msgspec.Struct" for base in info.mro),
            enum=info.is_enum,
        )

    def _find_implementers(self) -> None:
        plain = {name: info for name, info in self.infos.items() if not info.is_protocol}
        for name, info in self.infos.items():
            if not info.is_protocol:
                continue
            members = info.protocol_members
            self.facts.implementers[name] = [
                other
                for other, one in plain.items()
                if name not in self.facts.classes[other].bases
                and all(one.get(member) is not None for member in members)
                and self._fits(one, info)
            ]

    def _fits(self, one: TypeInfo, protocol: TypeInfo) -> bool:
        try:
            return is_subtype(fill_typevars_with_any(one), fill_typevars_with_any(protocol))
        except Exception:  # noqa: BLE001 - internals of mypy after the build; the type counts as unknown
            return True

    def _file(self, source: Source, tree: MypyFile) -> None:
        collector = NameAndMemberCollector()
        tree.accept(collector)
        members = self.facts.members.setdefault(source.path, {})
        for node in collector.member_exprs:
            members[node.end_line or 0, node.end_column or 0] = self._owners(node)
        for callee in [*collector.name_exprs, *collector.member_exprs]:
            call = self.calls.get(callee)
            if call is not None:
                self._call(source.path, call)

    def _call(self, path: str, call: CallExpr) -> None:
        place = (call.line, call.column, call.end_line or 0, call.end_column or 0)
        if any(call.arg_names):
            kind = get_proper_type(self.types.get(call.callee))
            if isinstance(kind, (CallableType, Overloaded)) and kind.is_type_obj():
                self.facts.made.setdefault(path, {})[place] = (self._id(kind.type_object()),)
            elif isinstance(kind, TypeType):
                self.facts.made.setdefault(path, {})[place] = self._ids(kind)
        if call.args and (any(call.arg_names) or any(isinstance(one, StrExpr) for one in call.args[1:2])):
            self.facts.first.setdefault(path, {})[place] = self._ids(self.types.get(call.args[0]))

    def _owners(self, node: MemberExpr) -> Owners:
        base: Expression = node.expr
        infos = list(self._infos(self.types.get(base)))
        owners = set()
        for info in infos:
            if info is not None:
                owner = info.get_containing_type_info(node.name)
                if owner is not None and owner.module_name in self.sources:
                    owners.add(self._id(owner))
        return None if not owners and None in infos else tuple(sorted(owners))

    def _ids(self, kind: Type | None) -> Owners:
        infos = list(self._infos(kind))
        found = {self._id(info) for info in infos if info is not None and info.module_name in self.sources}
        return None if not found and None in infos else tuple(sorted(found))

    def _infos(self, kind: Type | None) -> Iterator[TypeInfo | None]:
        """Yield the classes of a type, or None if it is unknown."""
        proper = get_proper_type(kind)
        if proper is None or isinstance(proper, AnyType):
            yield None
        elif isinstance(proper, Instance):
            yield proper.type
        elif isinstance(proper, UnionType):
            for one in proper.items:
                yield from self._infos(one)
        elif isinstance(proper, TypeVarType):
            yield from self._infos(UnionType(proper.values) if proper.values else proper.upper_bound)
        elif isinstance(proper, TupleType):
            yield proper.partial_fallback.type
        elif isinstance(proper, (LiteralType, TypedDictType)):
            yield proper.fallback.type
        elif isinstance(proper, TypeType):
            yield from self._infos(proper.item)
        elif isinstance(proper, (CallableType, Overloaded)) and proper.is_type_obj():
            yield proper.type_object()


def _classes(module: str, tree: MypyFile) -> Iterator[TypeInfo]:
    waiting = [symbol.node for symbol in tree.names.values() if isinstance(symbol.node, TypeInfo)]
    seen: set[TypeInfo] = set()
    while waiting:
        info = waiting.pop()
        if info.module_name == module and info not in seen:
            seen.add(info)
            yield info
            waiting += [symbol.node for symbol in info.names.values() if isinstance(symbol.node, TypeInfo)]
