"""Output of all commands: JSON for programs; tables and lines, coloured on a terminal, for human readers."""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import msgspec
import orjson
import typer

NO_COLOR_VARIABLE: Final = "NO_COLOR"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_GAP: Final = "  "
Style = Literal["heading", "good", "bad", "dim", ""]
_STYLE_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "heading": {"bold": True},
    "good": {"fg": "green"},
    "bad": {"fg": "red"},
    "dim": {"dim": True},
}


# --- colours ----------------------------------------------------------------------------------------------


def uses_color(stream: Any) -> bool:
    """Return whether a stream shows colours: it is a terminal that supports them, and NO_COLOR is not set."""
    if os.environ.get(NO_COLOR_VARIABLE) or os.environ.get("TERM") == "dumb":
        return False
    return stream is not None and bool(stream.isatty())


def style(text: str, name: Style) -> str:
    """Return the text in a style, or unchanged if standard output shows no colours."""
    return typer.style(text, **_STYLE_OPTIONS[name]) if name and uses_color(sys.stdout) else text


def escape_unprintable(text: str) -> str:
    """Escape all unprintable characters, which could control the terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)


# --- lines and tables -------------------------------------------------------------------------------------


def format_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], indent: str = "") -> list[str]:
    """Return a table, or nothing if it has no rows. Columns of numbers are aligned to the right."""
    values = list(rows)
    if not values:
        return []
    columns = range(len(headings))
    numbers = {column for column in columns if all(type(row[column]) is int for row in values)}
    cells = [[format_cell(row[column]) for column in columns] for row in values]
    widths = [max(len(row[column]) for row in [headings, *cells]) for column in columns]
    lines = [style(format_row(headings, widths, numbers), "heading")]
    lines += [format_row(row, widths, numbers) for row in cells]
    return [indent + line for line in lines]


def format_row(cells: Iterable[str], widths: Sequence[int], numbers: Collection[int] = ()) -> str:
    """Return one line of a table. `numbers` are the indexes of the columns that are aligned to the right."""
    padded = [
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(padded).rstrip()


def format_cell(value: Any, characters_max: int | None = None) -> str:
    """Return a value on one line without control characters. With `characters_max`, a longer text is shortened."""
    text = f"{value:,}" if type(value) is int else escape_unprintable(str(value))
    return text if characters_max is None or len(text) <= characters_max else text[: characters_max - 1] + "…"


def format_columns(columns: Iterable[str], styles: Sequence[Style] = ()) -> bytes:
    """Format columns as a line for human readers, with control characters escaped.

    `styles` are the styles of the first columns. The columns are not aligned, because the next lines are not known yet.
    """
    texts = [escape_unprintable(column) for column in columns]
    while texts and not texts[-1].strip():
        texts.pop()
    named: list[Style] = [*styles]
    named += [""] * len(texts)
    return (_GAP.join(style(text, name) for text, name in zip(texts, named, strict=False)).rstrip() + "\n").encode()


def format_label(label: str, width: int) -> str:
    """Return a label in front of a value, as in `epoch:   5f1c…`."""
    return style(f"{label + ':' if label else '':<{width}}", "dim")


# --- results ----------------------------------------------------------------------------------------------


def encode_json_line(value: Any) -> bytes:
    """Encode an object as JSON, with a line feed."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def write_lines(lines: Iterable[bytes]) -> None:
    """Write lines, which include their line feeds, to standard output and flush it."""
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def print_result(value: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print a command's result, as JSON on one line for programs or as lines for human readers.

    In JSON, structs become objects.
    """
    if as_json:
        typer.echo(orjson.dumps(value, default=msgspec.to_builtins).decode())
        return
    for line in lines:
        typer.echo(line)


# --- values -----------------------------------------------------------------------------------------------


def format_record_counts(records: int, restore_records: int, audit_records: int) -> str:
    """Format a record count. Internal records are listed separately, because users count only their own writes."""
    internal = [
        f"{count} {kind} records" for count, kind in ((restore_records, "restore"), (audit_records, "audit")) if count
    ]
    return " and ".join([f"{records - restore_records - audit_records} records", *internal])


def format_utc(time_ms: int, separator: str = " ", zone: str = " UTC") -> str:
    """Format milliseconds since 1970 as a UTC time, or as a number if the time is outside the calendar."""
    try:
        moment = EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return moment.isoformat(sep=separator, timespec="milliseconds").replace("+00:00", zone)


def format_duration(duration_ms: int) -> str:
    """Format a duration with its two largest units: `3 d 4 h`, `2 min 5 s`, `0 s`."""
    seconds = duration_ms // 1000
    parts = []
    for name, unit_s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, unit_s)
        parts.append((count, name))
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {name}" for count, name in parts[first : first + 2] if count or name == parts[first][1])
