"""A valid delta in JSON, and invalid deltas with the path and text of the expected error."""

import json
from hashlib import sha256
from typing import Any, Final, NamedTuple

GOOD: Final[dict[str, Any]] = {
    "op": "UPDATE",
    "table": "todos",
    "rowId": "row-1",
    "clientId": "client-1",
    "hlc": "65536000000",
    "columns": [{"column": "a", "value": 1}, {"column": "b", "value": {"x": 1.5, "y": [None, "é"]}}],
}
IDENTITY: Final = ("clientId", "columns", "hlc", "rowId", "table")


def id_of(members: dict[str, Any]) -> str:
    """Compute the delta id with `json`, for values that `json` and JCS serialize identically: short floats and ASCII
    keys.
    """
    named = {name: members[name] for name in IDENTITY}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return sha256(text.encode()).hexdigest()


def delta_json(**members: Any) -> dict[str, Any]:
    """Return a delta with its id as JSON members."""
    made = {**GOOD, **members}
    return {"deltaId": id_of(made), **made}


def delta_text(**raw: str | None) -> str:
    """Return a delta in JSON. Arguments replace members with JSON texts; None omits a member."""
    good = {name: json.dumps(value) for name, value in delta_json().items()}
    members = [f'"{name}":{text}' for name, text in {**good, **raw}.items() if text is not None]
    return f"{{{','.join(members)}}}"


class Fault(NamedTuple):
    """Members that replace valid ones, with the path and text of the expected error."""

    raw: dict[str, str | None]
    path: str
    words: str


_HLC = "must be a decimal string from 0 to 2^64−1 without leading zeros"
_NAME = "must be an identifier"
_COLUMN = '{"column":"a","value":1}'


def _columns(*texts: str) -> dict[str, str | None]:
    return {"columns": f"[{','.join(texts)}]"}


FAULTS: Final[dict[str, Fault]] = {
    **{
        f"no {name}": Fault({name: None}, f".{name}", "is missing")
        for name in ("deltaId", "op", "table", "rowId", "clientId", "hlc", "columns")
    },
    **{
        f"{name} is null": Fault({name: "null"}, f".{name}", "Expected `str`, got `null`")
        for name in ("deltaId", "table", "rowId", "clientId", "hlc")
    },
    "op is null": Fault({"op": "null"}, ".op", "Expected `str`, got `null`"),
    "unknown op": Fault({"op": '"UPSERT"'}, ".op", "must be one of INSERT, UPDATE, DELETE"),
    "op in lower case": Fault({"op": '"insert"'}, ".op", "must be one of INSERT, UPDATE, DELETE"),
    "empty op": Fault({"op": '""'}, ".op", "must be one of INSERT, UPDATE, DELETE"),
    "hlc as a number": Fault({"hlc": "65536000000"}, ".hlc", "Expected `str`, got `int`"),
    "hlc as a large number": Fault({"hlc": "116000000000000001"}, ".hlc", "would become 116000000000000000 "),
    **{
        f"hlc {text!r}": Fault({"hlc": json.dumps(text)}, ".hlc", _HLC)
        for text in (
            "",
            "-1",
            "-0",
            "+1",
            "00",
            "01",
            "0x10",
            "1e3",
            "1.0",
            " 1",
            "1 ",
            "1\n",
            "1_0",
            "٣",
            "18446744073709551616",
            "9" * 400,
            "ff",
            '1","x":"',
        )
    },
    **{
        f"table {text!r}": Fault({"table": json.dumps(text)}, ".table", _NAME)
        for text in ("", "1a", "a b", "a-b", "a.b", 'a"b', "é", "a\0", "a\n", "a" * 129, "ａ")
    },
    "rowId is empty": Fault({"rowId": '""'}, ".rowId", "must have 1 to 512 characters, not 0"),
    "rowId is too long": Fault({"rowId": json.dumps("r" * 513)}, ".rowId", "must have 1 to 512 characters, not 513"),
    "rowId has NUL": Fault({"rowId": r'"a\u0000"'}, ".rowId", "must not contain U+0000"),
    "rowId is a number": Fault({"rowId": "1"}, ".rowId", "Expected `str`, got `int`"),
    "rowId has a lone surrogate": Fault({"rowId": r'"\ud800"'}, ".rowId", "lone surrogate"),
    "clientId is empty": Fault({"clientId": '""'}, ".clientId", "must have 1 to 512 characters, not 0"),
    "clientId has NUL": Fault({"clientId": r'"\u0000"'}, ".clientId", "must not contain U+0000"),
    "columns are an object": Fault({"columns": '{"a":1}'}, ".columns", "Expected `array`, got `object`"),
    "columns are null": Fault({"columns": "null"}, ".columns", "Expected `array`, got `null`"),
    "a column is a string": Fault(_columns(_COLUMN, '"b"'), ".columns[1]", "Expected `object`, got `str`"),
    "a column without a name": Fault(_columns('{"value":1}'), ".columns[0].column", "is missing"),
    "a column without value": Fault(_columns(_COLUMN, '{"column":"b"}'), ".columns[1].value", "is missing"),
    "a column with another member": Fault(
        _columns('{"column":"a","value":1,"hlc":"1"}'), ".columns[0]", "unknown field `hlc`"
    ),
    "a column's name is a number": Fault(_columns('{"column":1,"value":1}'), ".columns[0].column", "Expected `str`"),
    "a column's name": Fault(_columns(_COLUMN, '{"column":"b c","value":1}'), ".columns[1].column", _NAME),
    "a column's name has NUL": Fault(_columns(r'{"column":"b\u0000","value":1}'), ".columns[0].column", _NAME),
    "a repeated column": Fault(_columns(_COLUMN, _COLUMN), ".columns[1].column", "'a' appears more than once"),
    "a repeated column, spelled with escapes": Fault(
        _columns(_COLUMN, r'{"column":"\u0061","value":2}'), ".columns[1].column", "'a' appears more than once"
    ),
    "too many columns": Fault(
        _columns(*(f'{{"column":"c{number}","value":0}}' for number in range(1001))),
        ".columns",
        "must have at most 1000 entries, not 1001",
    ),
    **{
        f"a value is {text}": Fault(_columns(f'{{"column":"a","value":{text}}}'), ".columns[0].value", words)
        for text, words in (
            ("9007199254740993", "would become 9007199254740992 "),
            ("-72057594037927936", "would become -72057594037927940 "),
            ("1e999", "infin"),
            (r'"\udc00"', "lone surrogate"),
            ('{"k":1,"k":2}', "duplicate key"),
        )
    },
}
"""Faults by name. They keep the id of the valid delta, because the id of a malformed delta is not checked."""

NOT_JSON: Final = {
    **{
        f"a value is {text or 'nothing'}": delta_text(columns=f'[{{"column":"a","value":{text}}}]')
        for text in ("NaN", "Infinity", "-Infinity", "undefined", "", "01", "1.", ".5", "+1", "'a'", '"\t"')
    },
    "truncated": delta_text()[:-1],
    "an extra comma": delta_text().replace("}", ",}", 1),
}
