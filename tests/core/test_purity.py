"""The core and its imports do no I/O, read no clocks, draw no random numbers and write no log lines."""

import ast
from pathlib import Path

import oncelog.core

CORE = Path(oncelog.core.__file__).parent
BELOW = ("errors", "error_codes", "error_translation", "cursor", "refusal_reasons")
"""Modules outside the core that the core may import."""

ALLOWED = {
    "base64",
    "bisect",
    "collections",
    "contextlib",
    "decimal",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "json",
    "math",
    "msgspec",
    "oncelog",
    "operator",
    "orjson",
    "re",
    "struct",
    "types",
    "typing",
    "typing_extensions",  # for type checkers only
    "unicodedata",
    "uuid",
}
"""Modules that only compute."""

ALLOWED_OF = {"uuid": {"UUID"}}
"""Allowed names of these modules. Other functions of the modules draw random numbers or read clocks."""

NEVER_CALLED = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


def test_core_imports_only_pure_modules() -> None:
    files = [*sorted(CORE.glob("**/*.py")), *(CORE.parent / f"{name}.py" for name in BELOW)]
    assert len(files) > 10
    for file in files:
        names = imported_names(ast.parse(file.read_text(encoding="utf-8")))
        ours = {name for name in names if name.split(".")[0] == "oncelog"}
        assert {name.split(".")[0] for name in names} <= ALLOWED, file.name
        below = {f"oncelog.{name}" for name in BELOW}
        assert all(name in below or name.startswith("oncelog.core") for name in ours), file.name


def test_core_uses_only_pure_functions_of_modules() -> None:
    for file in CORE.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not ALLOWED_OF.keys() & {alias.name for alias in node.names}, f"{file.name}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and node.module in ALLOWED_OF:
                assert {alias.name for alias in node.names} <= ALLOWED_OF[node.module], f"{file.name}:{node.lineno}"


def test_core_calls_no_impure_builtins() -> None:
    for file in CORE.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in NEVER_CALLED, f"{file.name}:{node.lineno}"
