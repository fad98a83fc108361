"""The server's log: one record per line regardless of its content, as text or JSON."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.server.log_format import (
    EXCEPTION_CHARACTERS_MAX,
    VALUE_CHARACTERS_MAX,
    Format,
    JsonFormatter,
    TextFormatter,
    configure,
)

MOMENT_S = 1_794_808_200.123  # 2026-11-16T05:50:00.123Z


def record(message: str = "started", *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("oncelog.doors", logging.INFO, __file__, 1, message, args, None)
    made.created = MOMENT_S
    vars(made).update(extra)
    return made


def text(message: str = "started", *args: object, **extra: Any) -> str:
    return TextFormatter().format(record(message, *args, **extra))


def fields(message: str = "started", *args: object, **extra: Any) -> dict[str, Any]:
    line = JsonFormatter().format(record(message, *args, **extra))
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def exc_info_of(message: str) -> Any:
    """Return `sys.exc_info` for an exception with this message."""
    try:
        int(message)
    except ValueError:
        kind, _, trace = sys.exc_info()
    return kind, ValueError(message), trace


class Unwritable:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is restored after the test."""
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = (root.level, list(root.handlers), access.level)
    yield root
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    access.setLevel(before[2])


# --- text ------------------------------------------------------------------------------------


def test_text_line_has_time_level_logger_message_and_fields() -> None:
    shown = text("listening on %s", "::1", port=7171, path="a b", is_open=False, actor=None, share=0.5)
    assert shown == (
        "2026-11-16T05:50:00.123Z INFO oncelog.doors listening on ::1 "
        'port=7171 path="a b" is_open=false actor=null share=0.5'
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("größe", "größe"),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "no"', '"say \\"no\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("two\nlines\r\t", '"two\\nlines\\r\\t"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("\u2028\u202e\x85", '"\\u2028\\u202e\\u0085"'),
        ("\ud800", '"\\ud800"'),
        ([1, "a"], '"[1, \\"a\\"]"'),
        (b"ab", "b'ab'"),
        (float("nan"), "nan"),
    ],
)
def test_text_value_is_quoted_and_escaped(value: object, shown: str) -> None:
    assert text(value=value).endswith(f" started value={shown}")


def test_message_cannot_forge_another_record() -> None:
    shown = text("client %s gone", "x\n2026-11-16T05:50:00.123Z ERROR oncelog.doors forged")
    assert len(shown.splitlines()) == 1
    assert "\\n2026-11-16" in shown


def test_field_names_are_sanitized() -> None:
    assert text("started", **{"a b=\n": 1}).endswith(" a_b__=1")


def test_text_exception_is_indented_below_its_record() -> None:
    shown = text(exc_info=exc_info_of("bad\n2026-11-16T05:50:00.123Z ERROR oncelog.doors forged\x1b"))
    first, *others = shown.split("\n")
    assert first == "2026-11-16T05:50:00.123Z INFO oncelog.doors started"
    assert others[0] == "    Traceback (most recent call last):"
    assert others[-2:] == ["    ValueError: bad", "    2026-11-16T05:50:00.123Z ERROR oncelog.doors forged\\u001b"]
    assert all(line.startswith("    ") for line in others)


@given(message=st.text(), name=st.text(min_size=1), value=st.text())
def test_content_cannot_break_the_line(message: str, name: str, value: str) -> None:
    # The prefix avoids a clash with the standard attributes of records.
    shown = text("%s", message, **{f"x{name}": value})
    assert len(shown.splitlines()) == 1
    shown.encode()


# --- JSON ---------------------------------------------------------------------------------


def test_json_line_has_all_fields() -> None:
    assert fields("listening on %s", "::1", port=7171, path="a\nb", tags=["x", None], where={"a": 1.5}) == {
        "time": "2026-11-16T05:50:00.123Z",
        "level": "info",
        "logger": "oncelog.doors",
        "message": "listening on ::1",
        "port": 7171,
        "path": "a\nb",
        "tags": ["x", None],
        "where": {"a": 1.5},
    }


def test_json_exception_is_one_field() -> None:
    found = fields(exc_info=exc_info_of("bad"))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: bad")


def test_extra_field_does_not_replace_a_standard_field() -> None:
    found = fields(time="x", level="y", logger="z", exception="w")
    assert (found["time"], found["level"], found["logger"]) == ("2026-11-16T05:50:00.123Z", "info", "oncelog.doors")
    assert [found[f"{name}_"] for name in ("time", "level", "logger", "exception")] == ["x", "y", "z", "w"]
    assert "exception" not in found


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**30, hex(10**30)),
        (b"ab", "b'ab'"),
        (Unwritable(), "<Unwritable that cannot be written>"),
        ({Unwritable(): Unwritable()}, {"<Unwritable that cannot be written>": "<Unwritable that cannot be written>"}),
        ([[[[[1]]]]], [[[["[1]"]]]]),
        ("\ud800", "\ud800"),
    ],
)
def test_unusual_values_are_logged(value: object, written: Any) -> None:
    found = fields(value=value)["value"]
    assert found == written
    assert text(value=value)


def test_integer_too_long_for_decimal_is_written_in_hexadecimal() -> None:
    assert fields(value=10**5000)["value"] == hex(10**5000)


def test_recursive_value_is_logged() -> None:
    circle: list[object] = []
    circle.append(circle)
    assert fields(value=circle)["value"] == [[[["[[...]]"]]]]


def test_record_with_bad_format_arguments_is_logged() -> None:
    assert fields("%d of %d", 1)["message"] == "%d of %d"
    assert fields("%s", Unwritable())["message"] == "%s"
    assert "%d of %d" in text("%d of %d", 1)


@pytest.mark.rule("CO-30")
def test_long_values_are_truncated_with_a_note() -> None:
    whole, cut = "x" * VALUE_CHARACTERS_MAX, "x" * (VALUE_CHARACTERS_MAX + 7)
    found = fields("%s", cut, whole=whole, cut=cut)
    assert found["whole"] == whole
    assert found["cut"] == found["message"] == f"{whole}… (7 more characters)"
    long = fields(exc_info=(ValueError, ValueError("x" * EXCEPTION_CHARACTERS_MAX), None))["exception"]
    assert len(long) < EXCEPTION_CHARACTERS_MAX + 100
    assert long.endswith("more characters)")


# --- configuration ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("form", ["text", "json"])
def test_records_of_all_loggers_at_or_above_the_level_are_written(form: Format) -> None:
    stream = io.StringIO()
    configure("warning", form, stream)
    logging.getLogger("oncelog.doors").info("quiet")
    logging.getLogger("oncelog.doors").warning("loud", extra={"port": 1})
    logging.getLogger("other").error("loud too")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    if form == "json":
        assert [json.loads(line)["message"] for line in lines] == ["loud", "loud too"]
    else:
        assert lines[0].endswith(" WARNING oncelog.doors loud port=1")


def test_second_configuration_replaces_the_first(root: logging.Logger) -> None:
    first, second = io.StringIO(), io.StringIO()
    others = list(root.handlers)
    configure("info", "text", first)
    configure("debug", "text", second)
    logging.getLogger("oncelog.doors").debug("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
    assert root.handlers[:-1] == others


@pytest.mark.usefixtures("root")
def test_log_goes_to_standard_error_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    logging.getLogger("oncelog.doors").info("hello")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(" INFO oncelog.doors hello\n")


@pytest.mark.usefixtures("root")
def test_request_lines_are_not_logged() -> None:
    stream = io.StringIO()
    configure("debug", "text", stream)
    logging.getLogger("aiohttp.access").info('"GET /v1/events?token=secret HTTP/1.1" 200')
    assert stream.getvalue() == ""
    logging.getLogger("aiohttp.server").error("Error handling request")
    assert "Error handling request" in stream.getvalue()
