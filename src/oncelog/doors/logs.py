"""The server's log, for the standard `logging` module: one record a line, for people (text) or machines (JSON).

What a record says beyond its message comes as `logger.info("…", extra={"client_id": …})`. Most of it was sent by
somebody: nothing in a value can end the line, start another record or make writing fail.
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
"""What a longer value has beyond it is left out, and how much that was is said."""
EXCEPTION_CHARACTERS_MAX: Final = 65_536
DEPTH_MAX: Final = 4
"""Of lists and objects in a value."""
_OF_EVERY_RECORD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_OUR_FIELDS: Final = frozenset({"time", "level", "logger", "message", "exception"})
# Controls, what counts as the end of a line somewhere, what turns the direction of writing, and lone surrogates.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_BARE: Final = re.compile(r'[^\s"=\\]+')
_SHORT_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def configure(level: Level, format: Format, stream: TextIO | None = None) -> None:  # noqa: A002 - the setting's name
    """Sends all records of the process from that level on to the stream, standard error by default.

    A second call takes the place of the first; handlers of others stay.
    """
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(handler)
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
    # It has whole request lines, and a client may have put its credential there. Our metrics count requests.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """By its class it is known to be ours."""


class TextFormatter(logging.Formatter):
    """`2026-11-16T05:50:00.123Z INFO oncelog.doors message key=value key="va lue"`; exceptions indented below it."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        parts = [_time(record), record.levelname, _escaped(record.name), _escaped(_message(record))]
        parts += [f"{_escaped_name(name)}={_text_value(value)}" for name, value in _extra(record).items()]
        lines = _exception(self, record).splitlines()
        return "\n".join([" ".join(parts), *(f"    {_escaped(line)}" for line in lines)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, all in ASCII: `time`, `level`, `logger`, `message`, the fields, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _extra(record).items():
            fields[f"{name}_" if name in _OUR_FIELDS else name] = value
        exception = _exception(self, record)
        if exception:
            fields["exception"] = exception
        return json.dumps(fields)


# --- what a record says ---------------------------------------------------------------------------------


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return _shortened(record.getMessage())
    except Exception:  # noqa: BLE001 - a record that was badly written still says something
        return _shortened(_safely(str, record.msg))


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {str(name): _plain(one) for name, one in vars(record).items() if name not in _OF_EVERY_RECORD}


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The exception and the stack, as the record has them."""
    texts = []
    if record.exc_info and record.exc_info[1] is not None:
        texts.append(_safely(formatter.formatException, record.exc_info))
    elif record.exc_text:
        texts.append(record.exc_text)
    if record.stack_info:
        texts.append(record.stack_info)
    return _shortened("\n".join(texts), EXCEPTION_CHARACTERS_MAX)


def _plain(value: object, depth: int = DEPTH_MAX) -> Any:
    """What JSON has a form for, whatever the value was."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and value.bit_length() <= 64:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if depth and type(value) in (list, tuple, set, frozenset):
        return [_plain(one, depth - 1) for one in _safely(list, value, [])]
    if depth and isinstance(value, Mapping):
        pairs = _safely(lambda mapping: list(mapping.items()), value, [])
        return {_shortened(_safely(str, name)): _plain(one, depth - 1) for name, one in pairs}
    return _shortened(_safely(hex if type(value) is int else str, value))


def _safely(make: Callable[[Any], Any], value: object, otherwise: Any = None) -> Any:
    """What is made of it; if that fails, a word that it did."""
    try:
        return make(value)
    except Exception:  # noqa: BLE001 - anything may be in a value, and the log must go on
        return f"<{type(value).__name__} that cannot be written>" if otherwise is None else otherwise


def _shortened(text: str, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    beyond = len(text) - characters_max
    return text if beyond <= 0 else f"{text[:characters_max]}… ({beyond} more characters)"


# --- as text ----------------------------------------------------------------------------------------------


def _text_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if _BARE.fullmatch(text) and not _UNSAFE.search(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escaped(quoted)}"'


def _escaped_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)


def _escaped(text: str) -> str:
    return _UNSAFE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return _SHORT_ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}"
