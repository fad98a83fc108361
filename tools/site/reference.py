"""Generate the reference pages: Python names, commands, HTTP operations, settings, limits, metrics and errors."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import msgspec
import typer.main
from msgspec import Struct
from typer.core import TyperGroup

import oncelog
import oncelog.client
import oncelog.client.chat
import oncelog.client.deltas
import oncelog.client.ledger
import oncelog.core.limits
import oncelog.engine.limits
import oncelog.error_codes
import oncelog.errors
import oncelog.server.limits
from oncelog.cli import app
from oncelog.server.attribute_docstrings import collect_docstrings, find_attribute_docstrings
from oncelog.server.limits import ApiLimits

_PUBLIC_MODULES: Final = (oncelog, oncelog.client, oncelog.client.ledger, oncelog.client.deltas, oncelog.client.chat)
_LINE_LENGTH: Final = 100
_LIMIT_MODULES: Final = (oncelog.core.limits, oncelog.server.limits)


def write_reference(directory: Path) -> None:
    """Write all generated pages into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in _PAGES:
        (directory / f"{name}.md").write_text(generate_page(name), encoding="utf-8")


def generate_page(name: str) -> str:
    """Return the text of one page, such as `settings`."""
    return "\n".join(_PAGES[name]()) + "\n"


# --- Python ------------------------------------------------------------------------------------------


def _python() -> Iterator[str]:
    yield "# Python names\n"
    yield "Generated from the docstrings. Names that are not listed here are private and may change.\n"
    seen: set[int] = set()
    for module in _PUBLIC_MODULES:
        yield f"## `{module.__name__}`\n"
        yield _text(module.__doc__)
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) in seen:
                continue
            if inspect.isclass(value) or inspect.isroutine(value):
                seen.add(id(value))
                yield from _describe_object(name, value)


def _describe_object(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    yield f"```python\n{_signature(name, value)}\n```\n"
    yield _text(value.__doc__)
    if not inspect.isclass(value):
        return
    documented = find_attribute_docstrings(value)
    if documented:
        yield from (f"- `{attribute}`: {_line(text)}" for attribute, text in documented.items())
        yield ""
    for method, function in vars(value).items():
        inner = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
        text = inspect.getdoc(inner)
        if method.startswith("_") or not text or not (inspect.isroutine(inner) or isinstance(inner, property)):
            continue
        kind = "" if inspect.isroutine(inner) else " (property)"
        yield f"`{name}.{method}`{kind}\n"
        if inspect.isroutine(inner):
            yield f"```python\n{_signature(method, inner)}\n```\n"
        yield f"{_text(text)}"


def _signature(name: str, value: Any) -> str:
    prefix = "class " if inspect.isclass(value) else "async def " if inspect.iscoroutinefunction(value) else "def "
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{prefix}{name}"
    parameters = [
        str(one.replace(default=inspect.Parameter.empty) if "object at 0x" in repr(one.default) else one)
        for one in signature.parameters.values()
    ]
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"{prefix}{name}"
    joined = f"{prefix}{name}({', '.join(parameters)})"
    if len(joined) <= _LINE_LENGTH:
        return joined
    return f"{prefix}{name}(\n" + "".join(f"    {one},\n" for one in parameters) + ")"


# --- commands ----------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Generated from `oncelog COMMAND --help`. [The page on the command line](../cli.md) has examples and exit"
    yield "statuses.\n"
    root = cast("TyperGroup", typer.main.get_command(app))
    for name, command in root.commands.items():
        inner = command.commands if isinstance(command, TyperGroup) else {"": command}
        for inner_name, one in inner.items():
            path = f"oncelog {name} {inner_name}".rstrip()
            yield f"## `{path}`\n"
            context = typer.Context(one, info_name=path)
            usage = one.get_usage(context).removeprefix("Usage: ")
            yield f"```text\n{usage}\n```\n"
            yield from _help(one.help or "")
            rows = [record for record in (parameter.get_help_record(context) for parameter in one.params) if record]
            if rows:
                yield "| option | meaning |\n|---|---|"
                yield from (f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows)
                yield ""


def _help(text: str) -> Iterator[str]:
    """Yield the help of a command, with its examples in one pasteable block."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    examples = [one for one in paragraphs if one.startswith(("Example:  ", "  "))]
    yield from (f"{one}\n" for one in paragraphs if one not in (*examples, "Examples:"))
    if examples:
        commands = "\n".join(textwrap.dedent(one.removeprefix("Example:")) for one in examples)
        yield f"```sh\n{commands}\n```\n"


# --- HTTP --------------------------------------------------------------------------------------------


def _http_operations() -> Iterator[str]:
    # The tests compare this file with a server's answer.
    document = json.loads((Path(__file__).parents[2] / "tests/golden/files/openapi.json").read_text(encoding="utf-8"))
    yield "# HTTP operations\n"
    yield "Generated from the OpenAPI document, which a server sends at `/openapi.json`.\n"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"## {method.upper()} `{path}`\n"
            yield f"{operation['summary']}. {operation.get('description', '')}\n"
            yield from _parameters(operation.get("parameters", []))
            yield from _body(operation.get("requestBody"))
            yield "| status | meaning |\n|---|---|"
            yield from (f"| {status} | {_cell(one['description'])} |" for status, one in operation["responses"].items())
            yield ""


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    if parameters:
        yield "| parameter | in | meaning |\n|---|---|---|"
        for one in parameters:
            deprecated = " (deprecated)" if one.get("deprecated") else ""
            yield f"| `{one['name']}`{deprecated} | {one['in']} | {_cell(one.get('description', ''))} |"
        yield ""


def _body(body: dict[str, Any] | None) -> Iterator[str]:
    if body is not None:
        example = body["content"]["application/json"].get("example")
        yield f"Body: {body['description']}\n"
        if example is not None:
            yield f"```json\n{json.dumps(example, indent=2)}\n```\n"


# --- tables ------------------------------------------------------------------------------------------


def _settings() -> Iterator[str]:
    from oncelog.server import settings  # noqa: PLC0415 - its imports need a server's dependencies

    yield "# Settings\n"
    yield "Generated from the code. [The guide to the server](../../guides/server.md) explains how to set them.\n"
    for prefix, parts in settings.list_tables().items():
        yield f"## `[{prefix.rstrip('.')}]`\n" if prefix else "## General\n"
        for part in parts:
            yield _text(type(part).__doc__)
            yield "| setting | default | meaning |\n|---|---|---|"
            texts = find_attribute_docstrings(type(part))
            for field in msgspec.structs.fields(part):
                default = "required" if field.required else _toml(getattr(part, field.name))
                yield f"| `{prefix}{field.name}` | `{default}` | {_cell(texts.get(field.name))} |"
            yield ""


def _toml(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def _default(value: Any) -> str:
    if isinstance(value, Struct) or value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _limits() -> Iterator[str]:
    yield "# Limits\n"
    yield "Generated from the code. Limits with a lower-case name can be configured: [settings](settings.md) for a"
    yield "server, and `oncelog.Limits` for an embedded log.\n"
    for module in _LIMIT_MODULES:
        yield f"## Fixed limits of `{module.__name__}`\n"
        yield "| limit | value | meaning |\n|---|---|---|"
        texts = collect_docstrings(ast.parse(inspect.getsource(module)).body)
        for name, value in vars(module).items():
            if name.isupper() and not name.startswith("_") and isinstance(value, int | float):
                yield f"| `{name}` | {value:,} | {_cell(texts.get(name, ''))} |"
        yield ""
    for cls in (oncelog.Limits, ApiLimits):
        yield from _limit_fields(cls)


def _limit_fields(cls: type[Struct]) -> Iterator[str]:
    texts = find_attribute_docstrings(cls)
    yield f"## `{cls.__name__}`\n"
    yield "| limit | default | meaning |\n|---|---|---|"
    defaults = cls()
    yield from (
        f"| `{name}` | {_default(getattr(defaults, name))} | {_cell(texts.get(name, ''))} |"
        for name in cls.__struct_fields__
    )
    yield ""


def _metrics() -> Iterator[str]:
    from oncelog.server import metrics  # noqa: PLC0415 - its imports need a server's dependencies

    yield "# Metrics\n"
    yield "Generated from the code. [The guide to the server](../../guides/server.md#metrics) explains how to scrape"
    yield "them.\n"
    yield "| metric | kind | labels | meaning |\n|---|---|---|---|"
    for one in metrics._DECLARATIONS:  # noqa: SLF001 - the only list of all metrics
        is_counter = "Counter" in one.family.__name__
        name = f"oncelog_{one.name}_total" if is_counter else f"oncelog_{one.name}"
        labels = ", ".join(f"`{label}`" for label in one.labels)
        yield f"| `{name}` | {'counter' if is_counter else 'gauge'} | {labels} | {_cell(one.text)} |"
    yield from (f"| `{name}` | histogram | | {_cell(text)} |" for name, text, _ in metrics.HISTOGRAMS)
    yield ""


def _errors() -> Iterator[str]:
    yield "# Errors\n"
    yield "## Exceptions\n"
    yield f"```text\n{_tree(oncelog.errors)}\n```\n"
    yield "## Error codes of the server\n"
    yield "The APIs for chats and deltas write codes in capitals.\n"
    yield "| code | can be sent again as it is |\n|---|---|"
    for name, value in vars(oncelog.error_codes).items():
        if name.isupper() and isinstance(value, str) and name != "PROTOCOL_VERSION":
            again = "yes, after a pause" if value in oncelog.error_codes.RETRYABLE_CODES else "no"
            yield f"| `{value}` | {again} |"
    yield ""


def _tree(module: ModuleType) -> str:
    return str(module.__doc__).partition("\n\n")[2].rstrip()


def _text(docstring: str | None) -> str:
    return f"{inspect.cleandoc(docstring or '')}\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str | None) -> str:
    return _line(text or "").replace("|", r"\|")


_PAGES: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "python": _python,
    "commands": _commands,
    "http-operations": _http_operations,
    "settings": _settings,
    "limits": _limits,
    "metrics": _metrics,
    "errors": _errors,
}
