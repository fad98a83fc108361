"""Comparison of a schema with the definitions that the migrations create."""

from collections.abc import Mapping
from typing import Final

from oncelog.storage.verify.findings import InconsistencyError

_PROBLEMS_MAX: Final = 10
_NAME_CHARACTERS_MAX: Final = 200


def check_definitions(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise InconsistencyError with the names of all definitions that are missing, surplus or different."""
    problems = [
        f"the {_format_name(name)} {_describe_problem(name in wanted, name in found)}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if problems:
        more = f"; and {len(problems) - _PROBLEMS_MAX} more" if len(problems) > _PROBLEMS_MAX else ""
        raise InconsistencyError("; ".join(problems[:_PROBLEMS_MAX]) + more)


def _format_name(name: str) -> str:
    short = name[:_NAME_CHARACTERS_MAX]
    return short if short.isprintable() else ascii(short)[1:-1]


def _describe_problem(is_wanted: bool, is_found: bool) -> str:
    if not is_found:
        return "is missing"
    return "is not as Oncelog makes it" if is_wanted else "is not one of Oncelog's"
