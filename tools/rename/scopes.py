"""Scopes of a Python file: the definition of each name, and the position of every name in the text."""

import ast
import bisect
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_GENERICS: Final = frozenset(
    (
        *("list", "dict", "set", "frozenset", "tuple", "type", "deque", "defaultdict", "Optional", "Union", "Final"),
        *("Callable", "Awaitable", "Coroutine", "Iterable", "Iterator", "AsyncIterator", "Sequence", "Mapping"),
        *("MutableMapping", "Generator", "AsyncGenerator", "ClassVar", "Queue", "Future", "Task"),
    )
)
IMPORTERS: Final = frozenset({"import_module", "with_driver"})
_DEFINITION: Final = re.compile(r"(?:async\s+)?(?:def|class)\s+")


class Import(NamedTuple):
    """The target of an import statement: a module (`name` is None) or a name of a module."""

    module: str
    name: str | None
    alias: ast.alias


@dataclass(eq=False, slots=True)
class Scope:
    kind: str
    """One of module, class, function and inner. An inner scope is a lambda or comprehension, whose variables belong to
    the enclosing function.
    """
    qualname: str
    parent: "Scope | None"
    index: int
    bindings: "dict[str, list[ast.AST | Import]]" = field(default_factory=dict)
    outer: dict[str, str] = field(default_factory=dict)
    """Names declared `global` or `nonlocal`."""

    def key(self, module: str, name: str) -> str:
        """Return the key of a name of this scope, as in the map of names."""
        if self.kind == "module":
            return f"{module}:{name}"
        return f"{module}:{self.qualname}.{name}" if self.kind == "class" else f"{module}:{self.qualname}({name})"


class Use(NamedTuple):
    """A name in the text, and the scope in which Python looks it up."""

    name: str
    scope: Scope
    start: int
    bound: bool


def resolve(scope: Scope, name: str) -> Scope | None:
    """Return the scope that defines a name, or None for a builtin."""
    current: Scope | None = scope
    while current is not None:
        declared = current.outer.get(name)
        if declared == "global":
            while current.parent is not None:
                current = current.parent
            return current
        if declared is None and name in current.bindings and (current.kind != "class" or current is scope):
            return current
        current = current.parent
    return None


class Source:
    """A parsed file. Offsets count characters of `text`."""

    def __init__(self, path: str, module: str, text: str) -> None:
        self.path = path
        self.module = module
        self.is_package = path.endswith("/__init__.py")
        self.text = text
        self.tree = ast.parse(text)
        self._lines = re.split(r"(?<=\n)", text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._tokens: list[tokenize.TokenInfo] | None = None
        self._names: dict[str, list[int]] | None = None
        self.shifted: dict[int, tuple[int, int]] = {}
        """Offsets of nodes that were parsed from a string, by id. `kept` keeps the ids unique."""
        self.kept: list[ast.AST] = []
        self.scopes: list[Scope] = []
        self.uses: list[Use] = []
        self.attributes: list[tuple[ast.Attribute, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.patterns: list[tuple[ast.MatchClass, Scope]] = []
        self.imports: list[tuple[ast.Import | ast.ImportFrom, Scope]] = []
        self.nodes: dict[str, ast.AST] = {}
        """Classes and functions by qualified name (the first of several)."""
        self.class_at: dict[int, str] = {}
        self.imported_by_call: dict[int, str] = {}
        """Modules in variables after `x = import_module("a.b")`, by the id of the variable's node."""
        self.pairs: list[tuple[ast.expr, ast.Constant, Scope]] = []
        """Strings in a tuple, with the preceding element, as in `(module, "name")`."""
        self.data: set[int] = set()
        """Offsets of strings that are keys of a dictionary."""
        self.scope_of: dict[int, Scope] = {}
        """Scope of a class or function, by the id of its node."""
        _Builder(self).run()

    @property
    def tokens(self) -> list[tokenize.TokenInfo]:
        if self._tokens is None:
            self._tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))
        return self._tokens

    def offset(self, line: int, column: int) -> int:
        """Return the offset of an `ast` position, whose columns count bytes."""
        text = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def token_offset(self, place: tuple[int, int]) -> int:
        return self._starts[place[0] - 1] + place[1]

    def line_of(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def span(self, node: ast.AST) -> tuple[int, int]:
        shifted = self.shifted.get(id(node))
        if shifted is not None:
            return shifted
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def find_name(self, name: str, start: int) -> int:
        """Return the offset of the first token `name` after an offset."""
        if self._names is None:
            self._names = {}
            for token in self.tokens:
                if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                    self._names.setdefault(token.string, []).append(self.token_offset(token.start))
        places = self._names[name]
        return places[bisect.bisect_left(places, start)]

    def code_in(self, node: ast.Constant) -> ast.expr | None:
        """Parse an annotation that is written as a string."""
        start, end = self.span(node)
        raw = self.text[start:end]
        if len(raw) < 3 or raw[0] not in "\"'" or raw[1:-1] != node.value:
            return None
        try:
            tree = ast.parse(raw[1:-1], mode="eval").body
        except SyntaxError:
            return None
        for part in ast.walk(tree):
            if hasattr(part, "col_offset"):
                self.kept.append(part)
                code = raw[1:-1].encode()
                first = len(code[: part.col_offset].decode())
                last = len(code[: getattr(part, "end_col_offset", None)].decode())
                self.shifted[id(part)] = (start + 1 + first, start + 1 + last)
        return tree


class _Builder:
    """Fills the scopes and uses of a file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.scope = self._new("module", "", None)

    def run(self) -> None:
        for node in self.source.tree.body:
            self.visit(node)

    def _new(self, kind: str, qualname: str, parent: Scope | None) -> Scope:
        scope = Scope(kind, qualname, parent, len(self.source.scopes))
        self.source.scopes.append(scope)
        return scope

    def _bind(self, name: str, what: ast.AST | Import, start: int | None, scope: Scope | None = None) -> None:
        scope = scope or self.scope
        declared = scope.outer.get(name)
        target: Scope | None = scope
        if declared is not None:
            target = resolve(scope if declared == "global" else scope.parent or scope, name)
            while declared == "global" and target is not None and target.parent is not None:
                target = target.parent
        (target or scope).bindings.setdefault(name, []).append(what)
        if start is not None:
            self.source.uses.append(Use(name, scope, start, bound=True))

    def visit(self, node: ast.AST, *, annotation: bool = False) -> None:
        special = getattr(self, f"_{type(node).__name__}", None)
        if special is not None:
            special(node, annotation)
        else:
            self._children(node, annotation)

    def _children(self, node: ast.AST, annotation: bool) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child, annotation=annotation)

    def _Name(self, node: ast.Name, _: bool) -> None:  # noqa: N802
        start, _end = self.source.span(node)
        if isinstance(node.ctx, ast.Load):
            self.source.uses.append(Use(node.id, self.scope, start, bound=False))
        else:
            self._bind(node.id, node, start)

    def _NamedExpr(self, node: ast.NamedExpr, annotation: bool) -> None:  # noqa: N802
        self.visit(node.value, annotation=annotation)
        scope = self.scope
        while scope.kind == "inner" and scope.qualname.endswith("<comprehension>") and scope.parent is not None:
            scope = scope.parent
        self._bind(node.target.id, node.target, self.source.span(node.target)[0], scope)

    def _Constant(self, node: ast.Constant, annotation: bool) -> None:  # noqa: N802
        if annotation and isinstance(node.value, str):
            tree = self.source.code_in(node)
            if tree is not None:
                self.visit(tree, annotation=True)

    def _Subscript(self, node: ast.Subscript, annotation: bool) -> None:  # noqa: N802
        if isinstance(node.slice, ast.Constant):
            self.source.data.add(self.source.span(node.slice)[0])
        self.visit(node.value, annotation=annotation)
        name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if name == "Literal":
            self.visit(node.slice)
        elif name == "Annotated" and isinstance(node.slice, ast.Tuple) and node.slice.elts:
            self.visit(node.slice.elts[0], annotation=True)
            for rest in node.slice.elts[1:]:
                self.visit(rest)
        else:
            self.visit(node.slice, annotation=annotation or name in _GENERICS)

    def _Tuple(self, node: ast.Tuple, annotation: bool) -> None:  # noqa: N802
        self._children(node, annotation)
        for before, after in itertools.pairwise(node.elts):
            if isinstance(after, ast.Constant) and isinstance(after.value, str):
                self.source.pairs.append((before, after, self.scope))

    def _Dict(self, node: ast.Dict, annotation: bool) -> None:  # noqa: N802
        self.source.data |= {self.source.span(key)[0] for key in node.keys if isinstance(key, ast.Constant)}
        self._children(node, annotation)

    def _Attribute(self, node: ast.Attribute, annotation: bool) -> None:  # noqa: N802
        self.visit(node.value, annotation=annotation)
        self.source.attributes.append((node, self.scope))

    def _Call(self, node: ast.Call, _: bool) -> None:  # noqa: N802
        self.source.calls.append((node, self.scope))
        self.visit(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for number, value in enumerate(node.args):
            self.visit(value, annotation=name == "cast" and number == 0)
        for one in node.keywords:
            self.visit(one.value, annotation=name == "TypeVar" and one.arg == "bound")

    def _Assign(self, node: ast.Assign, annotation: bool) -> None:  # noqa: N802
        self._children(node, annotation)
        self._imported(node.targets[0], node.value)

    def _imported(self, target: ast.expr, call: ast.expr | None) -> None:
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in IMPORTERS and isinstance(call.args[0].value, str):
                self.source.imported_by_call[id(target)] = call.args[0].value

    def _AnnAssign(self, node: ast.AnnAssign, _: bool) -> None:  # noqa: N802
        self.visit(node.annotation, annotation=True)
        alias = getattr(node.annotation, "id", getattr(node.annotation, "attr", "")) == "TypeAlias"
        if node.value is not None:
            self.visit(node.value, annotation=alias)
        self.visit(node.target)
        self._imported(node.target, node.value)

    def _define(self, node: FunctionNode | ast.ClassDef) -> None:
        start = self.source.offset(node.lineno, node.col_offset)
        match = _DEFINITION.match(self.source.text, start)
        assert match is not None  # noqa: S101
        self._bind(node.name, node, match.end())

    def _inside(self, name: str) -> str:
        qualname = self.scope.qualname
        return f"{qualname}.{name}" if qualname else name

    def _function(self, node: FunctionNode, _: bool) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._define(node)
        qualname = self._inside(node.name)
        self.source.nodes.setdefault(qualname, node)
        every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
        parameters = [one for one in every if one is not None]
        for value in [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]:
            self.visit(value)
        for annotation in [*(one.annotation for one in parameters), node.returns]:
            if annotation is not None:
                self.visit(annotation, annotation=True)
        self._body(node, self._new("function", qualname, self.scope), parameters, node.body)

    _FunctionDef = _AsyncFunctionDef = _function

    def _body(self, node: ast.AST, scope: Scope, parameters: list[ast.arg], body: list[ast.stmt]) -> None:
        self.source.scope_of[id(node)] = scope
        around, self.scope = self.scope, scope
        for part in parameters:
            self._bind(part.arg, part, self.source.span(part)[0])
        for statement in _declarations(body):
            kind = "global" if isinstance(statement, ast.Global) else "nonlocal"
            scope.outer.update(dict.fromkeys(statement.names, kind))
        for one in body:
            self.visit(one)
        self.scope = around

    def _Lambda(self, node: ast.Lambda, _: bool) -> None:  # noqa: N802
        for value in [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]:
            self.visit(value)
        every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
        scope = self._new("inner", self._inside("<lambda>"), self.scope)
        self._body(node, scope, [one for one in every if one is not None], [ast.Expr(node.body)])

    def _comprehension(self, node: Comprehension, annotation: bool) -> None:
        self.visit(node.generators[0].iter, annotation=annotation)
        around, self.scope = self.scope, self._new("inner", self._inside("<comprehension>"), self.scope)
        for number, generator in enumerate(node.generators):
            self.visit(generator.target)
            if number:
                self.visit(generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for value in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.visit(value)
        self.scope = around

    _ListComp = _SetComp = _DictComp = _GeneratorExp = _comprehension

    def _ClassDef(self, node: ast.ClassDef, _: bool) -> None:  # noqa: N802
        for value in [*node.decorator_list, *node.bases]:
            self.visit(value)
        for one in node.keywords:
            self.visit(one.value)
        self._define(node)
        qualname = self._inside(node.name)
        self.source.nodes.setdefault(qualname, node)
        self.source.class_at[node.lineno] = qualname
        self._body(node, self._new("class", qualname, self.scope), [], node.body)

    def _import(self, node: ast.Import | ast.ImportFrom, _: bool) -> None:
        self.source.imports.append((node, self.scope))
        for alias in node.names:
            start = None if alias.asname is None else self.source.span(alias)[1] - len(alias.asname)
            if isinstance(node, ast.Import):
                root = alias.name.partition(".")[0]
                whole = alias.name if alias.asname else root
                self._bind(alias.asname or root, Import(whole, None, alias), start)
            else:
                module = self._absolute(node)
                self._bind(alias.asname or alias.name, Import(module, alias.name, alias), start)

    _Import = _ImportFrom = _import

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.source.module.split(".")
        above = parts[: len(parts) - node.level + self.source.is_package]
        return ".".join([*above, node.module] if node.module else above)

    def _declared(self, node: ast.Global | ast.Nonlocal, _: bool) -> None:
        start = self.source.offset(node.lineno, node.col_offset)
        for name in node.names:
            self.source.uses.append(Use(name, self.scope, self.source.find_name(name, start), bound=False))

    _Global = _Nonlocal = _declared

    def _ExceptHandler(self, node: ast.ExceptHandler, _: bool) -> None:  # noqa: N802
        if node.type is not None:
            self.visit(node.type)
            if node.name:
                self._bind(node.name, node, self.source.find_name(node.name, self.source.span(node.type)[1]))
        for one in node.body:
            self.visit(one)

    def _MatchAs(self, node: ast.MatchAs, _: bool) -> None:  # noqa: N802
        if node.pattern is not None:
            self.visit(node.pattern)
        if node.name is not None:
            self._bind(node.name, node, self.source.span(node)[1] - len(node.name))

    def _MatchStar(self, node: ast.MatchStar, _: bool) -> None:  # noqa: N802
        if node.name is not None:
            self._bind(node.name, node, self.source.span(node)[1] - len(node.name))

    def _MatchMapping(self, node: ast.MatchMapping, annotation: bool) -> None:  # noqa: N802
        self._children(node, annotation)
        if node.rest is not None:
            after = self.source.span(node.patterns[-1])[1] if node.patterns else self.source.span(node)[0]
            self._bind(node.rest, node, self.source.find_name(node.rest, after))

    def _MatchClass(self, node: ast.MatchClass, annotation: bool) -> None:  # noqa: N802
        self.source.patterns.append((node, self.scope))
        self._children(node, annotation)


def _declarations(body: list[ast.stmt]) -> Iterator[ast.Global | ast.Nonlocal]:
    """Yield the `global` and `nonlocal` statements of a body, except in nested functions and classes."""
    for node in body:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                for child in getattr(node, name, ()):
                    inner = [child] if isinstance(child, ast.stmt) else getattr(child, "body", [])
                    yield from _declarations(inner)
