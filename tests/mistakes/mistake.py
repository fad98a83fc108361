"""A mistake that users make, and what its error message must contain."""

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from mistakes.workplace import Workplace

Make = Callable[["Workplace"], Awaitable[str]]
"""Makes the mistake and returns the message that the user sees."""

SECRET: Final = "hunter2-Zx9-which-is-not-for-any-message"  # noqa: S105 - stands for any secret of a user
"""Password or token in the mistakes. No message may contain it."""
MESSAGE_CHARACTERS_MAX: Final = 1500
_INTERNALS: Final = re.compile(
    r"Traceback \(most recent call last\)|object at 0x|<class '|File \"/|^(?:AttributeError|KeyError|IndexError)\b",
    re.MULTILINE,
)
"""Text that tells users about Oncelog's code instead of their mistake."""
_REMEDY: Final = re.compile(
    r"\b(must|use|pass|set|run|install|open|create|choose|check|correct|name|write|give|start|stop|send|add|repeat|"
    r"free|raise|restore|remove|delete|read|sign|request|wait|retry|try|needs?|return|annotate|did you mean|upgrade|"
    r"only|exactly|at most|from \d+ to|requires?|accepts|chmod|unset|list|encode|overwrite|(un)?expected|expecting|"
    r"is missing|missing a|is the server running|searched|help|cannot be combined|lists|parameters|without|contains|"
    r"oncelog \w+|is \w+://)\b",
    re.IGNORECASE,
)


class Mistake(Struct, frozen=True):
    """One row of the list."""

    name: str
    make: Make
    wrong: tuple[str, ...]
    """Texts in the message that name the fault and its place: the field, file, URL or limit."""
    remedy: str
    """Text in the message that says what to do."""

    def check(self, message: str, secrets: Sequence[str]) -> None:
        """Raise AssertionError if the message does not explain the mistake."""
        missing = [text for text in (*self.wrong, self.remedy) if _normalize(text) not in _normalize(message)]
        assert not missing, f"{missing} not in the message of {self.name!r}:\n{message}"
        assert _REMEDY.search(message), f"{self.name!r} gives no hint of what to do:\n{message}"
        assert not _INTERNALS.search(message), f"{self.name!r} shows internals:\n{message}"
        assert len(message) <= MESSAGE_CHARACTERS_MAX, f"{self.name!r} has a long message:\n{message}"
        shown = [secret for secret in (SECRET, *secrets) if secret in message]
        assert not shown, f"{self.name!r} shows a secret:\n{message}"


class MistakeTable(list[Mistake]):
    """The mistakes of one area."""

    def add(self, *wrong: str, remedy: str) -> Callable[[Make], Make]:
        """Add the mistake that a function makes, under the function's name."""

        def register(make: Make) -> Make:
            self.append(Mistake(make.__name__.replace("_", " "), make, wrong, remedy))
            return make

        return register

    def add_command(
        self,
        name: str,
        arguments: str,
        *wrong: str,
        remedy: str,
        given: str = "",
        files: Mapping[str, str] | None = None,
        program: str | None = None,
        **environment: str,
    ) -> None:
        """Add a mistake in a command line. The command reads `given` and must fail.

        `files` are created first. For `program` see `cli.processes.Command`.
        """

        async def make(workplace: "Workplace") -> str:
            for path, content in (files or {}).items():
                (workplace.directory / path).write_text(content)
            return await workplace.run_command(
                *shlex.split(arguments), given=given, program=program, environment=environment
            )

        self.append(Mistake(name, make, wrong, remedy))


def _normalize(text: str) -> str:
    """Ignore upper case, and the line breaks and frames that a terminal adds."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split()).lower()
