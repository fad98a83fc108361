"""An application's own validation of new events: found by its name, asked for new ids only (EV-10).

from oncelog import NewEvent

def check(event: NewEvent) -> None:
    if event.type == "order.placed" and event.body["total"] < 0:
        raise ValueError("total must not be negative")

What it raises is told to the client as `validation_failed`, with its text. It runs inside the transaction of a commit,
so it must be quick, decide by the event alone, and must not wait.
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


class NewEvent(Struct, frozen=True):
    """An event that is about to be committed."""

    id: UUID
    type: str
    body: dict[str, Any]
    """All of it, `type` too."""
    partitions: tuple[str, ...]
    client_id: str
    actor: str


EventCheck = Callable[[NewEvent], None]

VALIDATORS_GROUP: Final = "oncelog.validators"
"""Of the entry points that can be named in place of a callable."""
OBJECTION_CHARACTERS_MAX: Final = 2000
"""What a longer objection has beyond it is left out, and how much that was is said."""


def load_validator(name: str) -> Validate:
    """The validation that a setting names. Raises SettingsError if there is none, or it is not callable."""
    is_path = ":" in name
    directory = str(Path.cwd())
    if is_path and directory not in sys.path:
        # As `python -m` does: the application's module is found in the directory where the server is started.
        sys.path.insert(0, directory)
    entry_point = metadata.EntryPoint(name, name, VALIDATORS_GROUP) if is_path else _find_entry_point(name)
    try:
        found = entry_point.load()
    except Exception as error:
        problem = f"cannot be {'imported' if is_path else 'loaded'}: {type(error).__name__}: {error}"
        raise SettingsError(f"validate: {name} {problem}") from error
    if not callable(found):
        raise SettingsError(f"validate: {name} is not callable")
    if iscoroutinefunction(found) or iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004 - not whether
        raise SettingsError(f"validate: {name} is a coroutine function, and must be an ordinary one")
    return to_validator(found)


def to_validator(check: EventCheck) -> Validate:
    """A check of events as the log takes it. What it raises is the objection; writes of other policies pass."""

    def validate(submission: Submission) -> str | None:
        if submission.policy.name != EVENTS.name:
            return None
        try:
            # Nothing is what it is to return. Anything else is no silent yes: a text is an objection, as of the
            # library's own `Validate`, and what else there may be the log takes for a fault of the check.
            objection: object = check(_to_event(submission))  # type: ignore[func-returns-value]
        except (Exception, SystemExit) as error:
            # Its text goes to a client, in JSON. If it could not, a whole group commit would have no answer.
            raise ValueError(_format_objection(error) or type(error).__name__) from error
        return _format_objection(objection) if isinstance(objection, str) else objection  # type: ignore[return-value]

    return validate


def _format_objection(value: object) -> str:
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - it is the application's
        return ""
    beyond = len(text) - OBJECTION_CHARACTERS_MAX
    text = text if beyond <= 0 else f"{text[:OBJECTION_CHARACTERS_MAX]}… ({beyond} more characters)"
    return text.encode("utf-8", "replace").decode()


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
