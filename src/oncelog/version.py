"""Version of the installed package, as its metadata has it."""

from importlib.metadata import version
from typing import Final

__version__: Final = version("oncelog")
