"""Pages for people: the landing page at `/`, and the API page at `/docs`, which renders the OpenAPI document."""

from pathlib import Path
from typing import Final

STATIC_DIRECTORY: Final = Path(__file__).parent / "static"
