"""Test vectors: inputs, with outputs computed by independent implementations."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent.parent / "vectors"


def load(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return vectors
