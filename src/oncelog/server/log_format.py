"""Formats of the server's log output, for the standard `logging` module: one record per line, as text or as JSON.

Code passes the fields of a record as `logger.info("…", extra={"client_id": …})`. Clients choose most values, so the
formatters ensure that no value can end the line, forge a record or make writing fail.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

VALUE_CHARACTERS_MAX: Final = 8192
"""Maximum length of a value. A longer one is truncated and ends with the number of omitted characters."""
EXCEPTION_CHARACTERS_MAX: Final = 65_536
DEPTH_MAX: Final = 4
"""Maximum nesting of lists and objects in a value."""
_STANDARD_FIELDS: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_RESERVED_FIELDS: Final = frozenset({"time", "level", "logger", "message", "exception"})
# Control characters, line separators, characters that change the direction of text, and lone surrogates.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_UNQUOTED: Final = re.compile(r'[^\s"=\\]+')
_SHORT_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def configure(level: Level, format: Format, stream: TextIO | None = None) -> None:  # noqa: A002 - the setting's name
    """Write the process's log records of at least this level to the stream, by default standard error.

    A second call replaces the handler of the first call. Handlers of the application remain in place.
    """
    root = logging.getLogger()
    for handler in [other for other in root.handlers if isinstance(other, _ServerHandler)]:
        root.removeHandler(handler)
    handler = _ServerHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
    # The access log contains whole request lines, in which a client may have put its credential.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class _ServerHandler(logging.StreamHandler[TextIO]):
    """The server's handler, which `configure` recognises by its class."""


class TextFormatter(logging.Formatter):
    """`2026-11-16T05:50:00.123Z INFO oncelog.doors message key=value key="va lue"`; exceptions indented below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        parts = [
            _format_time(record),
            record.levelname,
            _escape_text(record.name),
            _escape_text(_format_message(record)),
        ]
        parts += [f"{_escape_name(name)}={_format_value(value)}" for name, value in _get_extra_fields(record).items()]
        lines = _format_exception(self, record).splitlines()
        return "\n".join([" ".join(parts), *(f"    {_escape_text(line)}" for line in lines)])


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII: `time`, `level`, `logger`, `message`, the fields, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        fields: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _format_message(record),
        }
        for name, value in _get_extra_fields(record).items():
            fields[f"{name}_" if name in _RESERVED_FIELDS else name] = value
        exception = _format_exception(self, record)
        if exception:
            fields["exception"] = exception
        return json.dumps(fields)


# --- fields of a record ---------------------------------------------------------------------------------


def _format_time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _format_message(record: logging.LogRecord) -> str:
    try:
        return shorten(record.getMessage())
    except Exception:  # noqa: BLE001 - a record with wrong arguments is still written
        return shorten(_call_safely(str, record.msg))


def _get_extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {str(name): _to_json_value(value) for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _format_exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the exception and the stack trace of a record."""
    texts = []
    if record.exc_info and record.exc_info[1] is not None:
        texts.append(_call_safely(formatter.formatException, record.exc_info))
    elif record.exc_text:
        texts.append(record.exc_text)
    if record.stack_info:
        texts.append(record.stack_info)
    return shorten("\n".join(texts), EXCEPTION_CHARACTERS_MAX)


def _to_json_value(value: object, depth: int = DEPTH_MAX) -> Any:
    """Convert a value of any type to a JSON value."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and value.bit_length() <= 64:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if depth and type(value) in (list, tuple, set, frozenset):
        return [_to_json_value(item, depth - 1) for item in _call_safely(list, value, [])]
    if depth and isinstance(value, Mapping):
        pairs = _call_safely(lambda mapping: list(mapping.items()), value, [])
        return {shorten(_call_safely(str, name)): _to_json_value(item, depth - 1) for name, item in pairs}
    return shorten(_call_safely(hex if type(value) is int else str, value))


def _call_safely(convert: Callable[[Any], Any], value: object, default: Any = None) -> Any:
    """Return the converted value, or the default or a placeholder if the conversion fails."""
    try:
        return convert(value)
    except Exception:  # noqa: BLE001 - no value may break logging
        return f"<{type(value).__name__} that cannot be written>" if default is None else default


def shorten(text: str, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    """Truncate a string that is too long, and append the number of omitted characters."""
    beyond = len(text) - characters_max
    return text if beyond <= 0 else f"{text[:characters_max]}… ({beyond} more characters)"


# --- as text ----------------------------------------------------------------------------------------------


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if _UNQUOTED.fullmatch(text) and not _UNSAFE.search(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escape_text(quoted)}"'


def _escape_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)


def _escape_text(text: str) -> str:
    return _UNSAFE.sub(lambda match: _SHORT_ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04x}", text)
