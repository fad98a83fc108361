"""Layout of generated code."""

import subprocess
import sys
from pathlib import Path
from textwrap import fill
from typing import Final

from tools.blocking.source import GenerationError

DOCSTRING_COLUMNS: Final = 112
"""Line length of the docstrings of methods."""


def quote(*texts: str) -> str:
    """Return a docstring with the texts as paragraphs."""
    paragraphs = [paragraph for text in texts for paragraph in text.replace("\\", "\\\\").split("\n\n") if paragraph]
    text = "\n\n".join(map(_wrap_long_lines, paragraphs))
    if "\n" not in text:
        return f'"""{text}"""'
    return f'"""{text}\n"""'


def _wrap_long_lines(paragraph: str) -> str:
    is_long = any(len(line) > DOCSTRING_COLUMNS for line in paragraph.splitlines())
    return fill(paragraph, DOCSTRING_COLUMNS) if is_long else paragraph


def indent(head: str, *body: str) -> str:
    """Return a method with the given first line and body."""
    lines = [line for part in body for line in part.splitlines()]
    return "\n".join(["    " + head, *(f"        {line}".rstrip() for line in lines)]) + "\n"


def format_module(text: str, path: Path) -> str:
    """Sort the imports, remove unused ones, and format."""
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check", "--quiet", "--select=I,F401", "--fix-only"], ["format", "--quiet"]):
        done = subprocess.run(  # noqa: S603 - the formatter of this project
            [ruff, *command, f"--stdin-filename={path}", "-"], input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise GenerationError(f"ruff {command[0]}: {done.stderr}")
        text = done.stdout
    return text
