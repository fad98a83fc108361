"""Validation of new events by application code. The server loads it by name and calls it for new ids only (EV-10).

from oncelog import NewEvent

def check(event: NewEvent) -> None:
    if event.type == "order.placed" and event.body["total"] < 0:
        raise ValueError("total must not be negative")

The client receives the text of the exception as `validation_failed`. The check runs inside a commit's transaction, so
it must be quick, must depend on the event alone, and must not block.
"""

import sys
from collections.abc import Callable
from importlib import metadata
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from oncelog.core.plan import Validate
from oncelog.core.policy import EVENTS
from oncelog.core.values import Submission
from oncelog.errors import SettingsError
from oncelog.server.errors import raise_first
from oncelog.server.log_format import shorten


class NewEvent(Struct, frozen=True):
    """An event that is about to be committed."""

    id: UUID
    type: str
    body: dict[str, Any]
    """The whole event, including `type`."""
    partitions: tuple[str, ...]
    client_id: str
    actor: str


EventCheck = Callable[[NewEvent], None]

VALIDATORS_GROUP: Final = "oncelog.validators"
"""Entry point group that the server searches for the name in the `validate` setting."""
OBJECTION_CHARACTERS_MAX: Final = 2000
"""Maximum length of an objection. A longer one is truncated and ends with the number of omitted characters."""


def load_validator(name: str) -> Validate:
    """Load the check that the `validate` setting names. Raises SettingsError if it is missing or not callable."""
    is_path = ":" in name
    directory = str(Path.cwd())
    if is_path and directory not in sys.path:
        # Like `python -m`, find the application's module in the server's working directory.
        sys.path.insert(0, directory)
    entry_point = metadata.EntryPoint(name, name, VALIDATORS_GROUP) if is_path else _find_entry_point(name)
    try:
        found = entry_point.load()
    except Exception as error:
        problem = f"cannot be {'imported' if is_path else 'loaded'}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            problem += "; install the module for the server's Python, or add its directory to PYTHONPATH"
        raise SettingsError(f"validate: {name} {problem}") from error
    is_coroutine = iscoroutinefunction(found) or iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004 - inspects the method
    raise_first(
        SettingsError,
        (not callable(found), f"validate: {name} is not callable"),
        (is_coroutine, f"validate: {name} is a coroutine function; it must be a regular function"),
    )
    return to_validator(found)


def to_validator(check: EventCheck) -> Validate:
    """Convert an event check to a validation for the log. Its exceptions are objections; other writes pass."""

    def validate(submission: Submission) -> str | None:
        if submission.policy.name != EVENTS.name:
            return None
        try:
            # A check should return None. If it returns a string, that is an objection, as with the library's
            # `Validate`. The log treats any other value as a fault in the check.
            objection: object = check(_to_event(submission))  # type: ignore[func-returns-value]
        except (Exception, SystemExit) as error:
            # The client receives the text in JSON. Text that cannot be encoded would leave a whole group commit
            # unanswered.
            raise ValueError(_format_objection(error) or type(error).__name__) from error
        return _format_objection(objection) if isinstance(objection, str) else objection  # type: ignore[return-value]

    return validate


def _format_objection(value: object) -> str:
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - code of the application
        return ""
    return shorten(text, OBJECTION_CHARACTERS_MAX).encode("utf-8", "replace").decode()


def _to_event(submission: Submission) -> NewEvent:
    body = msgspec.json.decode(submission.body)
    return NewEvent(
        UUID(bytes=submission.key), body["type"], body, submission.partitions, submission.client, submission.actor
    )


def _find_entry_point(name: str) -> metadata.EntryPoint:
    found = list(metadata.entry_points(group=VALIDATORS_GROUP, name=name))
    if len(found) != 1:
        count_text = "no entry point" if not found else "more than one entry point"
        raise SettingsError(f"validate: there is {count_text} named {name!r} in the group {VALIDATORS_GROUP}")
    return found[0]
