"""Generate the blocking classes from the async ones: `make blocking`.

Every public method of an async class gets a blocking method with the same parameters, types and docstring, which calls
the async method through a portal (`src/oncelog/portal.py`):

- an async method runs in the event loop, and the blocking method returns its result;
- other methods also run there, because most of them are not thread-safe;
- an async iterator becomes an iterator;
- a result whose class has a blocking twin (`Pending`) is wrapped in it.

`BlockingRuns` and the calls of functions that `once` decorates run in the caller's thread, without a portal.
`translation.py` removes `async` and `await` from the async code.

Facts that the generator cannot derive from the async class are in `table.py` and in handwritten base classes
(`blocking_base.py` in each package). The generator rejects table entries that match nothing, so the table cannot become
outdated.
"""

from tools.blocking.generator import generate
from tools.blocking.table import MODULES


def main() -> None:
    """Write all generated modules."""
    for module in MODULES:
        module.path.write_text(generate(module), encoding="utf-8")


if __name__ == "__main__":
    main()
