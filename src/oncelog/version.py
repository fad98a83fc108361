"""Version of the installed package, read from its metadata."""

from importlib.metadata import version
from typing import Final

__version__: Final = version("oncelog")
